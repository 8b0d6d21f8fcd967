"""The one report: of a run, and of what several participants found."""

import json
import os

import nbformat
import pytest
from bs4 import BeautifulSoup
from lesson_files import MACHINE, notebook, result, run
from nbformat.v4 import new_output

from gpumem.files import LARGEST_FILE_BYTES
from gpumem.inputs import InputError
from gpumem.runs import OutOfMemory
from gpumem.units import MIB
from labkit.cli import main
from labkit.course import report
from labkit.course.check import WIDGET_STATE
from labkit.course.outcomes import Outcome, read_outcomes
from labkit.lesson import claims, session
from labkit.lesson.results import RESULT_MIME

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>"
CLAIM = next(
    c for c in claims.of_lesson("06") if c.needs == "any" and c.unit == "share" and c.wrong_below
)


def executed(folder, *outputs, **changes):
    book = notebook("pass")
    book.cells[2].outputs = list(outputs)
    record = result(**changes).to_dict()
    book.cells[3].outputs = [
        new_output("display_data", data={RESULT_MIME: record, "text/plain": "sum"})
    ]
    nbformat.write(book, folder / "06_saving.ipynb")
    return book


def html_output(text):
    return new_output("display_data", data={"text/html": text})


def outcome(**changes):
    values = {"title": "What does it save?", "status": "passed", "seconds": 12.34}
    values |= {"notebook": "06_saving.ipynb"} | changes
    return Outcome("06", "06_saving", **values)


def test_the_report_shows_lessons_timings_verdicts_and_every_notebook(tmp_path):
    claim = next(c for c in claims.all_claims().values() if c.unit == "share" and c.needs == "any")
    judgement = session.judgement_record(claims.judge(claim.id, 0.123, "simulated for T4"))
    executed(tmp_path, html_output("<b>a picture</b>"), judgements=(judgement,))
    other = Outcome("07", "07_more", "More", "failed", ("it broke",), 1.0)
    page = report.report(tmp_path, [outcome(host_peak_bytes=812 << 20), other]).read_text()
    assert "<b>a picture</b>" in page
    cells = [cell.text for cell in BeautifulSoup(page, "html.parser").select("main > div tr > *")]
    shown = {"06 What does it save?", "✓ passed", "12.3", "812 MiB", "✗ failed", "–", "it broke"}
    judged = {"12.3 %", judgement["verdict"], "simulated for T4", " ".join(claim.sources)}
    assert shown | judged <= set(cells)
    assert "1 of 2 lessons passed, 13 seconds of work, on Test CPU." in page


def test_widgets_show_what_they_held(tmp_path):
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "box"}, "text/plain": "HBox"}
    book = executed(tmp_path, new_output("display_data", data=view))
    held = new_output("stream", name="stdout", text="inside the widget")
    book.metadata["widgets"] = {
        WIDGET_STATE: {
            "state": {
                "box": {"state": {"children": ["IPY_MODEL_out", "IPY_MODEL_box"]}},
                "out": {"model_name": "OutputModel", "state": {"outputs": [held]}},
            }
        }
    }
    nbformat.write(book, tmp_path / "06_saving.ipynb")
    page = report.report(tmp_path, [outcome()]).read_text()
    assert "inside the widget" in page
    assert "Interactive: open the notebook" in page


def test_a_notebook_that_is_missing_or_damaged_is_said_so(tmp_path):
    page = report.report(tmp_path, [outcome(notebook="")]).read_text()
    assert "There is no notebook to show" in page
    (tmp_path / "06_saving.ipynb").write_text("{")
    assert "is not a valid notebook" in report.report(tmp_path, [outcome()]).read_text()


def test_a_folder_without_outcomes_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        read_outcomes(tmp_path / "none")
    with pytest.raises(InputError, match="holds no outcomes"):
        read_outcomes(tmp_path)
    (tmp_path / "06_saving.json").write_text('{"number": 6}')
    with pytest.raises(InputError, match=r"06_saving\.json is not an outcome"):
        read_outcomes(tmp_path)


def test_formulas_become_mathml_and_broken_ones_stay_text():
    cell = nbformat.v4.new_markdown_cell(r"Bytes: $L \cdot a$. Broken: $\frac{$. Code: `$x$`.")
    page = report.render(nbformat.v4.new_notebook(cells=[cell]))
    assert page.count("<math") == 1
    assert r"$\frac{$" in page
    assert "<code>$x$</code>" in page


# --- several participants ----------------------------------------------------------------------


def judged(measured, mode="simulated for T4"):
    return session.judgement_record(claims.judge(CLAIM.id, measured, mode))


def text(**changes):
    return json.dumps(result(**changes).to_dict())


def page_of(folder, **options):
    classroom = report.gather(sorted(folder.iterdir()), **options)
    return report.compare(classroom, folder / "class.html").read_text(encoding="utf-8")


def row(page, heading):
    """The texts of the first row that begins with ``heading``."""
    rows = BeautifulSoup(page, "html.parser").find_all("tr")
    cells = [[cell.get_text("|", strip=True) for cell in r.find_all(["td", "th"])] for r in rows]
    return next(texts for texts in cells if texts[0].startswith(heading))


@pytest.fixture
def sent(tmp_path):
    """Three participants: a result on a GPU, a folder of `labkit run`, a folder of two lessons."""
    folder = tmp_path / "sent"
    for name in ("Bob", "Cem"):
        (folder / name).mkdir(parents=True)
    measured = run(
        mode="measured",
        device="Tesla T4",
        peak_bytes=18 * MIB,
        step_peaks_bytes=(),
        by_category={"weights": 18 * MIB},
    )
    gpu = {"kind": "cuda", "name": "Tesla T4", "versions": {"torch": "2.10.0+cu128"}}
    on_gpu = (judged(0.38, "measured on Tesla T4"),)
    (folder / "Ada.json").write_text(text(runs=(measured,), machine=gpu, judgements=on_gpu))
    card = "[✔ correct] Exercise 06-1\n  That is right."
    shown = new_output("display_data", data={"text/plain": card})
    executed(folder / "Bob", shown, judgements=(judged(0.01),))
    outcome = {"number": "07", "status": "failed", "notebook": ""}
    (folder / "Bob" / "07_more.json").write_text(json.dumps(outcome))
    (folder / "Bob" / "06_saving.json").write_text(json.dumps(outcome | {"status": "passed"}))
    (folder / "Bob" / "report.html").write_text("<p>a report</p>")
    (folder / "Cem" / "06.json").write_text(text(judgements=(judged(0.39),)))
    (folder / "Cem" / "07.json").write_text(text(lesson="07"))
    return folder


def test_each_lesson_shows_what_every_participant_found(sent):
    found = report.gather(sorted(sent.iterdir()))
    assert {name: sorted(lessons) for name, lessons in found.participants.items()} == {
        "Ada": ["06"],
        "Bob": ["06"],
        "Cem": ["06", "07"],
    }
    path = f"{sent}/Bob/07_more.json"
    reason = "is not a result we can read: `labkit run` says that its lesson failed"
    assert found.left_out == [f"{path}: {path} {reason}"]
    page = page_of(sent)
    assert row(page, "Machine")[1] == "Tesla T4|torch 2.10.0+cu128|2026-01-02"
    assert row(page, "Exercises")[1:] == ["–", "06-1: correct", "–"]
    first, *cells = row(page, CLAIM.says)
    assert first.endswith("|2 supported, 1 wrong")
    assert cells == [
        "✔ supported|38 %|measured on Tesla T4",
        "✘ wrong|1 %|simulated for T4",
        "✔ supported|39 %|simulated for T4",
    ]
    first, *cells = row(page, "baseline")
    assert first.endswith("|50 % apart")
    assert cells == ["18.0 MiB|measured on Tesla T4"] + ["12.0 MiB|simulated for T4"] * 2


def test_only_runs_of_equal_lesson_name_and_parameters_are_set_side_by_side(tmp_path):
    oom = OutOfMemory(MIB, 12 * MIB, None, {"weights": 12 * MIB}, 1, "forward", "", "")
    for name, changes in {
        "a": {},
        "b": {"parameters": {"batch_size": 4, "precision": "fp32"}},  # of the lesson
        "c": {"runs": (run(parameters={"batch_size": 9}),)},
        "d": {"runs": (run(name="other"), run())},
        "e": {"lesson": "07"},
        "f": {"runs": (run(name="other", oom=oom),)},
    }.items():
        (tmp_path / f"{name}.json").write_text(text(**changes))
    page, peak = page_of(tmp_path), "12.0 MiB|simulated for T4"
    assert row(page, "baseline") == [
        "baseline|batch_size 8|in a lesson with batch_size 8, precision fp32|equal",
        *(peak, "–", "–", peak, "–"),
    ]
    first, *_, d, f = row(page, "other")
    assert (d, f) == (peak, f"out of memory at {peak}")
    assert "apart" not in first, "a failed run does not count"


def test_verdicts_of_the_newest_result_are_judged_again_and_foreign_claims_left_out(tmp_path):
    older = {**judged(0.01), "verdict": "supported", "says": NASTY}
    unknown = {"id": "no-such-claim", "verdict": "wrong"}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.json").write_text(text(judgements=(older, unknown)))
    page = page_of(tmp_path)
    assert row(page, CLAIM.says)[1:] == ["✘ wrong|1 %|simulated for T4"]
    assert "no-such-claim" not in page
    depends = (judged({"batch 1": 0.01, "batch 8": 0.4}),)
    newer = text(judgements=depends, date="2026-02-02T03:04:05+00:00")
    (tmp_path / "a" / "0.json").write_text(newer)
    cell = "◆ depends|✘ batch 1: 1 %|✔ batch 8: 40 %|simulated for T4"
    assert row(page_of(tmp_path), CLAIM.says)[1] == cell


def test_anonymous_pages_name_nobody(sent):
    (sent / "Eve Secret.json").write_text('{"Eve Secret": ')
    assert "Eve Secret" in page_of(sent)
    page = page_of(sent, anonymous=True)
    for name in ("Ada", "Bob", "Cem", "Eve", "Secret"):
        assert name not in page
    assert [f"Participant {i}" in page for i in (1, 3, 4)] == [True, True, False]


def test_hostile_names_and_texts_of_participants_are_escaped(tmp_path):
    hostile = text(
        title="\ud800" + NASTY,
        machine={"kind": NASTY, "name": NASTY, "versions": {"torch": NASTY, "cuda": None}},
        parameters={NASTY: NASTY},
        runs=(run(name=NASTY, device=NASTY, parameters={NASTY: NASTY}),),
        judgements=(judged({NASTY: 0.4}, NASTY),),
    )
    for name in (NASTY.replace("/", ""), b"\xff\xfe".decode("utf-8", "surrogateescape")):
        (tmp_path / f"{name}.json").write_text(hostile)
    (tmp_path / f"{NASTY.replace('/', '')}2.zip").write_text("")
    soup = BeautifulSoup(page_of(tmp_path), "html.parser")
    assert not soup.find_all(["script", "img"])
    assert soup.find("meta", {"http-equiv": "Content-Security-Policy"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not a result we can read"),
        (b"\xff\xfe\xff", "is not a result we can read"),
        (b"\0" * (LARGEST_FILE_BYTES + 1), "larger than 20.0 MiB"),
    ],
    ids=["json", "bytes", "large"],
)
def test_a_broken_file_is_named_with_its_reason_and_the_others_are_read(tmp_path, content, words):
    (tmp_path / "bad.json").write_bytes(content)
    (tmp_path / "good.json").write_text(text())
    found = report.gather(sorted(tmp_path.iterdir()))
    assert [len(lessons) for lessons in found.participants.values()] == [0, 1]
    [sentence] = found.left_out
    assert sentence.startswith(f"{tmp_path}/bad.json: ")
    assert words in sentence
    assert sentence in BeautifulSoup(page_of(tmp_path), "html.parser").get_text()


def test_other_kinds_of_files_are_left_out(tmp_path):
    (tmp_path / "good.json").write_text(text())
    (tmp_path / "link.json").symlink_to(tmp_path / "good.json")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "work.zip").write_bytes(b"PK")
    (tmp_path / "fresh.ipynb").write_text(nbformat.writes(notebook("pass")))
    odd = executed(tmp_path, html_output("x"))
    odd.cells[2].outputs[0]["data"] = 5
    (tmp_path / "06_saving.ipynb").write_text(json.dumps(odd))
    invalid, *others = report.gather([tmp_path]).left_out
    assert "06_saving.ipynb is not a valid notebook: " in invalid
    assert others == [
        f"{tmp_path}/fresh.ipynb: it shows no result: lab.result(...) did not run",
        f"{tmp_path}/link.json: it is not a regular file",
        f"{tmp_path}/pipe.json: it is not a regular file",
        f"{tmp_path}/work.zip: it ends in neither .json nor .ipynb",
    ]


def command(*arguments):
    return main.main(["report", *map(str, arguments)])


def test_the_command_compares_participants_and_says_where(sent, tmp_path, capsys):
    out = sent / "page.html"
    for _ in range(2):  # the page of the first time is not a result
        assert command(*sent.iterdir(), "--out", out) == 0
    assert "Ada" in out.read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert printed.startswith("Participants: 3; results: 4; lessons: 2; files left out: 1.\n")
    assert str(out) in printed
    (tmp_path / "a.json").write_text("{")
    assert command(tmp_path / "a.json", "--out", out) == 1, "no result could be read"


def test_what_cannot_be_compared_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada.json").write_text(text(machine=MACHINE))
    for arguments, words in (
        (("ada.json", "none"), "there is no file or folder none"),
        (("ada", "ada.json"), "two participants are called ada"),
        (("ada.json", "--out", "ada.json"), "must name a file that ends in .html"),
    ):
        assert command(*arguments) == 2
        assert words in capsys.readouterr().err
    assert (tmp_path / "ada.json").read_text() == text(machine=MACHINE)
    assert not (tmp_path / "report.html").exists()

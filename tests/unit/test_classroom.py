"""`labkit class`: what participants sent, gathered and set side by side on one page."""

import json
import os

import nbformat
import pytest
from bs4 import BeautifulSoup
from lesson_files import MACHINE, notebook, result, run
from nbformat.v4 import new_output

from labkit.cli import main
from labkit.course import claims, classroom, session, verdicts
from labkit.course.results import RESULT_MIME
from labkit.runs import OutOfMemory
from labkit.support.files import LARGEST_FILE_BYTES
from labkit.values import MIB

NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>"
CLAIM = next(
    c for c in claims.of_lesson("06") if c.needs == "any" and c.unit == "share" and c.wrong_below
)
GPU = {
    "kind": "cuda",
    "name": "Tesla T4",
    "capacity_bytes": 15 << 30,
    "host_memory_bytes": 12 << 30,
    "cores": 2,
    "versions": {"torch": "2.10.0+cu128", "cuda": "12.8", "python": "3.12.1"},
}


def judged(measured, mode="simulated for T4"):
    return session.judgement_record(verdicts.judge(CLAIM.id, measured, mode))


def text(**changes):
    return json.dumps(result(**changes).to_dict())


def executed(record):
    book = notebook("pass")
    book.cells[3].outputs = [new_output("display_data", data={RESULT_MIME: record})]
    return nbformat.writes(book)


def rows(page):
    """The texts of all rows of all tables."""
    soup = BeautifulSoup(page, "html.parser")
    return [
        [cell.get_text("|", strip=True) for cell in row.find_all(["td", "th"])]
        for row in soup.find_all("tr")
    ]


def row(page, heading, column=1):
    """The first row that begins with ``heading`` and has such a column."""
    return next(r for r in rows(page) if r[0].startswith(heading) and len(r) > column)


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
    on_gpu = (judged(0.38, "measured on Tesla T4"),)
    (folder / "Ada.json").write_text(text(runs=(measured,), machine=GPU, judgements=on_gpu))
    on_cpu = result(judgements=(judged(0.01),)).to_dict()
    (folder / "Bob" / "06_saving.ipynb").write_text(executed(on_cpu))
    outcome = {"number": "07", "status": "failed", "notebook": ""}
    (folder / "Bob" / "07_more.json").write_text(json.dumps(outcome))
    (folder / "Bob" / "06_saving.json").write_text(json.dumps(outcome | {"status": "passed"}))
    (folder / "Bob" / "report.html").write_text("<p>a report</p>")
    (folder / "Cem" / "06.json").write_text(text(judgements=(judged(0.39),)))
    (folder / "Cem" / "07.json").write_text(text(lesson="07"))
    return folder


def test_files_and_folders_are_read_by_participant(sent):
    found = classroom.gather(sent)
    assert {name: sorted(results) for name, results in found.participants.items()} == {
        "Ada": ["06"],
        "Bob": ["06"],
        "Cem": ["06", "07"],
    }
    assert found.left_out == (
        f"Bob/07_more.json: {sent}/Bob/07_more.json is not a result we can read: "
        "`labkit run` says that its lesson failed",
    )


def test_the_page_compares_machines_verdicts_and_peaks(sent):
    page = classroom.page(classroom.gather(sent))
    assert row(page, "Ada", 6)[1:7] == ["06", "Tesla T4", "cuda", "15.0 GiB", "12.0 GiB", "2"]
    found = row(page, CLAIM.says)
    assert found[1] == "✔|2 supported|✘|1 wrong"
    assert found[2:] == [
        "✔|38 %|measured on Tesla T4",
        "✘|1 %|simulated for T4",
        "✔|39 %|simulated for T4",
    ]
    simulated = "12.0 MiB|simulated for T4"
    assert row(page, "baseline")[1:] == ["50 %", "18.0 MiB|measured on Tesla T4"] + [simulated] * 2
    symbols = BeautifulSoup(page, "html.parser").find_all(class_="symbol")
    assert [symbol["aria-label"] for symbol in symbols] == [
        "supported",
        "wrong",
        "supported",
        "wrong",
        "supported",
    ]


def test_only_runs_of_equal_lesson_name_and_parameters_are_set_side_by_side(tmp_path):
    for name, changes in {
        "a": {},
        "b": {"parameters": {"batch_size": 4, "precision": "fp32"}},  # of the lesson
        "c": {"runs": (run(parameters={"batch_size": 9}),)},
        "d": {"runs": (run(name="other"),)},
        "e": {"lesson": "07"},
    }.items():
        (tmp_path / f"{name}.json").write_text(text(**changes))
    assert "no two participants sent the same run" in classroom.page(classroom.gather(tmp_path))
    (tmp_path / "f.json").write_text(text(runs=(run(name="other"), run())))
    page = classroom.page(classroom.gather(tmp_path))
    peak = "12.0 MiB|simulated for T4"
    assert row(page, "baseline") == [
        "baseline|batch_size 8|in a lesson with batch_size 8, precision fp32",
        "equal",
        peak,
        "–",
        "–",
        "–",
        peak,
    ]
    assert row(page, "other")[2:] == ["–", "–", "–", peak, peak]
    oom = OutOfMemory(MIB, 12 * MIB, None, {"weights": 12 * MIB}, 1, "forward", "", "")
    (tmp_path / "f.json").write_text(text(runs=(run(oom=oom),)))
    found = row(classroom.page(classroom.gather(tmp_path)), "baseline")
    assert found[1] == "–", "a failed run does not count as apart"
    assert found[-1].startswith("out of memory at 12.0 MiB")


def test_verdicts_of_the_newest_result_are_judged_again_and_foreign_claims_left_out(tmp_path):
    older = {**judged(0.01), "verdict": "supported", "says": NASTY}
    unknown = {"id": "no-such-claim", "verdict": "wrong"}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.json").write_text(text(judgements=(older, unknown)))
    page = classroom.page(classroom.gather(tmp_path))
    assert row(page, CLAIM.says)[1:] == ["✘|1 wrong", "✘|1 %|simulated for T4"]
    depends = (judged({"batch 1": 0.01, "batch 8": 0.4}),)
    newer = text(judgements=depends, date="2026-02-02T03:04:05+00:00")
    (tmp_path / "a" / "0.json").write_text(newer)
    found = row(classroom.page(classroom.gather(tmp_path)), CLAIM.says)
    assert found[2] == "◆|depends|✘|batch 1: 1 %|✔|batch 8: 40 %|simulated for T4"


def test_anonymous_pages_name_nobody(sent):
    (sent / "Eve Secret.json").write_text('{"Eve Secret": ')
    page = classroom.page(classroom.gather(sent, anonymous=True))
    for name in ("Ada", "Bob", "Cem", "Eve", "Secret"):
        assert name not in page
    assert [f"Participant {i}" in page for i in (1, 3, 4)] == [True, True, False]
    assert "Eve Secret" in classroom.page(classroom.gather(sent))


def test_hostile_names_and_texts_are_escaped(tmp_path):
    hostile = text(
        title="\ud800" + NASTY,
        machine={"kind": NASTY, "name": NASTY, "versions": {"torch": NASTY, "cuda": None}},
        parameters={NASTY: NASTY},
        runs=(run(name=NASTY, device=NASTY, parameters={NASTY: NASTY}),),
        judgements=(judged({NASTY: 0.4}, NASTY),),
    )
    for name in (NASTY.replace("/", ""), b"\xff\xfe".decode("utf-8", "surrogateescape")):
        (tmp_path / f"{name}.json").write_text(hostile)
    soup = BeautifulSoup(classroom.page(classroom.gather(tmp_path)), "html.parser")
    assert not soup.find_all(["script", "img"])
    assert soup.find("meta", {"http-equiv": "Content-Security-Policy"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not a result we can read"),
        (b"\xff\xfe\xff", "is not a result we can read"),
        (text(runs=(run(reserved_bytes=1),)).encode(), "run 1 (baseline): it reserved"),
        (b"\0" * (LARGEST_FILE_BYTES + 1), "larger than 20.0 MiB"),
    ],
    ids=["json", "bytes", "impossible", "large"],
)
def test_a_broken_file_is_named_with_its_reason_and_the_others_are_read(tmp_path, content, words):
    (tmp_path / "bad.json").write_bytes(content)
    (tmp_path / "good.json").write_text(text())
    found = classroom.gather(tmp_path)
    assert {name: len(results) for name, results in found.participants.items()} == {
        "bad": 0,
        "good": 1,
    }
    [sentence] = found.left_out
    assert sentence.startswith("bad.json: ")
    assert words in sentence
    assert sentence in BeautifulSoup(classroom.page(found), "html.parser").get_text()


def test_other_kinds_of_files_are_left_out(tmp_path):
    (tmp_path / "good.json").write_text(text())
    (tmp_path / "link.json").symlink_to(tmp_path / "good.json")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "work.zip").write_bytes(b"PK")
    (tmp_path / "fresh.ipynb").write_text(nbformat.writes(notebook("pass")))
    assert classroom.gather(tmp_path).left_out == (
        "fresh.ipynb: it shows no result: lab.result(...) did not run",
        "link.json: it is not a regular file",
        "pipe.json: it is not a regular file",
        "work.zip: it ends in neither .json nor .ipynb",
    )


# --- the command -------------------------------------------------------------------------------


def command(*arguments):
    return main.main(["class", *map(str, arguments)])


def test_the_command_writes_the_page_and_says_where(sent, tmp_path, capsys):
    out = sent / "page.html"
    for _ in range(2):  # the page of the first time is not a result
        assert command(sent, "--out", out) == 0
    assert "Ada" in out.read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert printed.startswith("Participants: 3; results: 4; lessons: 2; files left out: 1.\n")
    assert str(out) in printed
    assert command(sent, "--anonymous", "--out", tmp_path / "new" / "page.html") == 0
    assert "Ada" not in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.json").write_text("{")
    assert command(tmp_path / "none", "--out", tmp_path / "c.html") == 1, "no result could be read"


def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "ada.json").write_text(text(machine=MACHINE))
    for arguments, words in (
        (("none",), "there is no folder none"),
        (("ada.json",), "there is no folder ada.json"),
        (("empty",), "empty holds nothing to compare"),
        ((".", "--out", "ada.json"), "must name a file that ends in .html"),
    ):
        assert command(*arguments) == 2
        assert words in capsys.readouterr().err
    assert (tmp_path / "ada.json").read_text() == text(machine=MACHINE)
    assert not (tmp_path / "class.html").exists()

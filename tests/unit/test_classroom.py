"""`labkit class`: what participants sent, gathered and shown; nothing in their files trusted."""

import argparse
import io
import json
import os
import re
import stat
import zipfile
from html.parser import HTMLParser

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lesson_files import MACHINE, notebook, result, run
from nbformat.v4 import new_output

from labkit import claims, classroom, cli_class, session
from labkit.classroom import files as classroom_files
from labkit.classroom import page as classroom_page
from labkit.classroom.files import LINK, SPECIAL, clean
from labkit.memory import MIB, InputError, OutOfMemory
from labkit.results import LARGEST_FILE_BYTES, RESULT_MIME

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
    return session.judgement_record(claims.judge(CLAIM.id, measured, mode))


def text(**changes):
    return json.dumps(result(**changes).to_dict())


def zipped(members):
    """A zip of ``{name or ZipInfo: text}``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content, compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def executed(record):
    book = notebook("pass")
    book.cells[3].outputs = [new_output("display_data", data={RESULT_MIME: record})]
    return nbformat.writes(book)


def person(found, name):
    [one] = [p for p in found.participants if p.name == name]
    return one


def reasons(found):
    return [note.reason for p in found.participants for note in p.left_out] + [
        note.reason for note in found.left_out
    ]


class Elements(HTMLParser):
    """Tags with their attributes, cells of tables, and text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.words, self.rows = [], [], []
        self.cell = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cell = False

    def handle_data(self, data):
        self.words.append(data)
        if self.cell:
            self.rows[-1][-1] += data

    def row(self, heading, *, column=1):
        """The first row that begins with ``heading`` and has that many columns."""
        return next(r for r in self.rows if r[0].startswith(heading) and len(r) > column)


HARMLESS = {
    "html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "h3", "p",
    "div", "table", "caption", "thead", "tbody", "tr", "th", "td", "ul", "li", "span", "small",
    "bdi", "br",
}  # fmt: skip


def hold_harmless(page):
    """Whatever was sent: no tag or attribute but ours, nothing fetched, a policy that says so."""
    elements = Elements(page)
    assert {tag for tag, _ in elements.tags} <= HARMLESS
    names = {name for _, attributes in elements.tags for name in attributes}
    assert not {n for n in names if n.startswith("on")} | ({"src", "href", "style"} & names)
    [policy] = [a["content"] for _, a in elements.tags if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b-\u200f\x00-\x08\ud800-\udfff]", page)
    return elements


# --- good files --------------------------------------------------------------------------------


@pytest.fixture
def sent(tmp_path):
    """Three participants: a result on a GPU, a folder of `labkit run`, a zip of two lessons."""
    folder = tmp_path / "sent"
    (folder / "Bob").mkdir(parents=True)
    on_gpu = {"machine": GPU, "judgements": (judged(0.38, "measured on Tesla T4"),)}
    measured = run(mode="measured", device="Tesla T4", peak_bytes=18 * MIB, step_peaks_bytes=(),
                   by_category={"weights": 18 * MIB})  # fmt: skip
    ada = text(runs=(measured,), **on_gpu)
    (folder / "Ada.json").write_text(ada, encoding="utf-8-sig")  # as some editors save it
    on_cpu = result(judgements=(judged(0.01),)).to_dict()
    (folder / "Bob" / "06_saving.ipynb").write_text(executed(on_cpu))
    outcome = {"number": "07", "status": "failed", "fingerprint": "f", "notebook": ""}
    (folder / "Bob" / "07_more.json").write_text(json.dumps(outcome))
    (folder / "Bob" / "06_saving.log").write_text("a log")
    (folder / "Bob" / "report.html").write_text("<p>a report</p>")
    members = {"course/06.json": text(judgements=(judged(0.39),)), "07.json": text(lesson="07"),
               "__MACOSX/._06.json": "junk", "course/report.html": "<p>"}  # fmt: skip
    (folder / "Cem.zip").write_bytes(zipped(members))
    return folder


def test_files_folders_and_zips_are_read_by_participant(sent):
    found = classroom.gather(sent)
    assert [p.name for p in found.participants] == ["Ada", "Bob", "Cem"]
    assert [[r.lesson for r in p.records] for p in found.participants] == [
        ["06"],
        ["06"],
        ["06", "07"],
    ]
    assert person(found, "Bob").unfinished == ("07 failed",)
    assert reasons(found) == []
    [machine] = person(found, "Ada").machines
    assert (machine.kind, machine.name, machine.capacity_bytes) == ("cuda", "Tesla T4", 15 << 30)
    assert machine.versions[:3] == ("3.12.1", "2.10.0+cu128", "12.8")


def test_the_page_compares_machines_verdicts_and_peaks(sent):
    page = classroom_page.page(classroom.gather(sent))
    elements = hold_harmless(page)
    assert elements.row("Ada", column=6)[1:5] == ["Tesla T4", "cuda", "15.0 GiB", "12.0 GiB"]
    assert elements.row("Bob", column=3)[1:3] == ["06", "07 failed"]
    row = elements.row(CLAIM.says)
    assert "2 supported" in row[1]
    assert "1 wrong" in row[1]
    assert ["38 %" in row[2], "1 %" in row[3], "39 %" in row[4]] == [True, True, True]
    assert "measured on Tesla T4" in row[2]
    labels = [a["aria-label"] for _, a in elements.tags if a.get("role") == "img"]
    assert labels.count("supported") == 1 + 2 + 1 + 1  # the key, two cells, the tally, the list
    peaks = elements.row("baseline")
    assert peaks[1:] == ["50 %", "18.0 MiBmeasured on Tesla T4", *["12.0 MiBsimulated for T4"] * 2]
    assert "Where verdicts differ" in page


def test_everything_that_has_a_colour_has_a_symbol_and_a_word(sent):
    page = classroom_page.page(classroom.gather(sent))
    for badge in re.findall(r'<span class="badge[^>]*>[^<]*</span>', page):
        assert re.fullmatch(
            r'<span class="badge (\w+)" role="img" aria-label="([\w ]+)" title="\2">\S</span>',
            badge,
        )


def test_only_runs_of_equal_lesson_name_and_parameters_are_set_side_by_side(tmp_path):
    for name, changes in {
        "a": {},
        "b": {"parameters": {"batch_size": 4, "precision": "fp32"}},  # of the lesson
        "c": {"runs": (run(parameters={"batch_size": 9}),)},
        "d": {"runs": (run(name="other"),)},
        "e": {"lesson": "07"},
    }.items():
        (tmp_path / f"{name}.json").write_text(text(**changes))
    assert "No two participants sent the same run" in classroom_page.page(
        classroom.gather(tmp_path)
    )
    (tmp_path / "f.json").write_text(text(runs=(run(name="other"), run())))
    page = classroom_page.page(classroom.gather(tmp_path))
    rows = Elements(page).rows
    assert [row for row in rows if row[0].startswith("baseline")] == [
        [
            "baselinebatch_size 8",
            "equal",
            "12.0 MiBsimulated for T4",
            "–",
            "12.0 MiBsimulated for T4",
        ]
    ]
    assert [row[2:] for row in rows if row[0].startswith("other")] == [
        ["–", *["12.0 MiBsimulated for T4"] * 2]
    ]


def test_what_is_the_same_for_all_is_shown_once(tmp_path):
    for name in ("Ada", "Bob", "Cem"):
        (tmp_path / f"{name}.json").write_text(text(judgements=(judged(0.39),)))
    elements = Elements(classroom_page.page(classroom.gather(tmp_path)))
    assert elements.row("Ada, Bob, Cem", column=6)[1] == MACHINE["name"]
    assert elements.row("Run") == ["Run", "Apart", "All 3"]
    assert elements.row("baseline")[1:] == ["equal", "12.0 MiBsimulated for T4"]
    assert elements.row("Claim", column=2)[2:] == ["All 3"]
    assert len(elements.row(CLAIM.says)) == 3
    larger = run(peak_bytes=13 * MIB, by_category={"weights": 13 * MIB}, step_peaks_bytes=())
    (tmp_path / "Dee.json").write_text(text(machine=GPU, runs=(larger,)))
    elements = Elements(classroom_page.page(classroom.gather(tmp_path)))
    assert elements.row("Dee", column=6)[1] == GPU["name"]
    assert elements.row("Run")[2:] == ["Ada", "Bob", "Cem", "Dee"]


def test_runs_that_ran_out_of_memory_say_so_and_do_not_count_as_apart(tmp_path):
    oom = OutOfMemory(MIB, 12 * MIB, None, {"weights": 12 * MIB}, 1, "forward", "", "")
    (tmp_path / "a.json").write_text(text())
    (tmp_path / "b.json").write_text(text(runs=(run(oom=oom),)))
    row = Elements(classroom_page.page(classroom.gather(tmp_path))).row("baseline")
    assert row[1] == "–"
    assert row[3].startswith("out of memory at 12.0 MiB")


def test_the_newest_result_of_a_lesson_counts_and_a_copy_is_no_news(tmp_path):
    (tmp_path / "a").mkdir()
    for name, date in (
        ("1", "2026-01-02"),
        ("2", "2026-01-03T00:00:00+00:00"),
        ("3", "2026-01-01"),
    ):
        (tmp_path / "a" / f"{name}.json").write_text(text(date=date, title=name))
    (tmp_path / "a" / "4.json").write_bytes((tmp_path / "a" / "2.json").read_bytes())
    [one] = classroom.gather(tmp_path).participants
    assert [record.title for record in one.records] == ["2"]
    assert [(n.file, n.reason) for n in one.left_out] == [
        ("1.json", "there is a newer result of lesson 06"),
        ("3.json", "there is a newer result of lesson 06"),
    ]


# --- names -------------------------------------------------------------------------------------


def test_two_participants_of_one_name_stay_two(tmp_path):
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "x.json").write_text(text(title="folder"))
    (tmp_path / "ada.json").write_text(text(title="file"))
    (tmp_path / "ADA (2).json").write_text(text(title="other"))
    found = classroom.gather(tmp_path)
    assert {p.name: p.records[0].title for p in found.participants} == {
        "ADA (2)": "other", "ada": "folder", "ada (3)": "file",
    }  # fmt: skip


def test_hostile_names_and_texts_are_cleaned_shortened_and_escaped(tmp_path):
    nasty = NASTY.replace("/", "\u2215")
    for name in (nasty, "gpj\u202eexe", "\u200b", b"\xff\xfe".decode("utf-8", "surrogateescape")):
        (tmp_path / f"{name}.json").write_text(
            text(
                title="\ud800\u202e" + NASTY,
                machine={"kind": NASTY, "name": "x" * 200, "cores": True, "capacity_bytes": -1,
                         "versions": {"torch": NASTY, "cuda": None, NASTY: NASTY}},
                parameters={NASTY: "\u202e" + NASTY * 1000},
                runs=(run(name=NASTY, device=NASTY, parameters={NASTY: "y" * 10**5}),),
                judgements=({"id": CLAIM.id, "verdict": "wrong", "mode": NASTY * 1000,
                             "measured": {NASTY * 10 + str(i): 0.4 for i in range(99)}},
                            {"id": NASTY, "verdict": "wrong"}),
            )
        )  # fmt: skip
    found = classroom.gather(tmp_path)
    assert {p.name for p in found.participants} == {
        clean(nasty, 60),
        "gpjexe",
        "unnamed",
        "unnamed (2)",
    }
    page = classroom_page.page(found)
    hold_harmless(page)
    page.encode("utf-8")
    assert "&lt;script&gt;" in page
    assert len(page) < 60_000
    computer = found.participants[0].machines[0]
    assert (len(computer.name), computer.cores, computer.capacity_bytes) == (60, None, None)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("x" * 10**5, "x" * 79 + "…"),
        ("a\n\tb\x00\x1b[31mc", "a b [31mc"),
        ("right\u202eto\u2067left", "righttoleft"),
        ("a" + "\u0301" * 50, "á\u0301\u0301"),
        ("\u200b" * 10**5 + "late", "…"),
        ("Zoë דנה 李", "Zoë דנה 李"),
    ],
)
def test_clean(raw, shown):
    assert clean(raw) == shown


@given(st.text(), st.integers(1, 90))
def test_clean_text_is_one_short_line_that_can_be_written(raw, most):
    shown = clean(raw, most)
    assert len(shown) <= most
    assert shown.encode("utf-8").decode() == shown
    assert shown.isprintable()


def test_anonymous_pages_name_nobody(sent):
    (sent / "Eve Secret.json").write_text('{"Eve Secret": ')
    (sent / "Eve Secret.txt").write_text("hello")
    (sent / "Eve Secret.zip").write_bytes(zipped({"Eve Secret/06.json": text(date="Eve Secret")}))
    page = classroom_page.page(classroom.gather(sent, anonymous=True))
    for name in ("Ada", "Bob", "Cem", "Eve", "Secret"):
        assert name not in page
    assert [f"Participant {i}" in page for i in (1, 5, 6)] == [True, True, False]
    assert "It is not a valid result." in page
    assert "Eve Secret" in classroom_page.page(classroom.gather(sent))


# --- broken and hostile files ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 10**5, "not JSON"),
        (b'{"lesson": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"\xff\xfe\xff", "not text in UTF-8"),
        (b"[]", "neither a result nor a notebook"),
        (b"{}", "neither a result nor a notebook"),
        (b'{"cells": 5}', "shows no result"),
        (b'{"cells": [5, {"outputs": [6, {"data": 7}]}]}', "shows no result"),
        (text(lesson="98").encode(), "the course has no lesson 98"),
        (text(date="2026-13-01").encode(), "not a valid result"),
        (text(runs=(run(reserved_bytes=1),)).encode(), "its run 1 says cannot be: it reserved"),
        (text(runs=(run(),) * 201).encode(), "more than 200 runs"),
        (text(judgements=({"id": "x", "verdict": "wrong"},) * 101).encode(), "more than 100"),
        (b"\0" * (LARGEST_FILE_BYTES + 1), "larger than 20.0 MiB"),
    ],
)
def test_a_broken_file_is_named_with_its_reason_and_the_others_are_read(tmp_path, content, words):
    (tmp_path / "bad.json").write_bytes(content)
    (tmp_path / "good.json").write_text(text())
    found = classroom.gather(tmp_path)
    assert [len(p.records) for p in found.participants] == [0, 1]
    [note] = person(found, "bad").left_out
    assert words in note.reason
    assert note.file == "bad.json"
    row = hold_harmless(classroom_page.page(found)).row("bad.json")
    assert row[1] == "bad"
    assert row[2].endswith(".")


def test_who_sends_no_result_is_told_so(tmp_path):
    (tmp_path / "nothing.zip").write_bytes(zipped({}))
    (tmp_path / "junk.zip").write_bytes(zipped({"__MACOSX/._06.json": "", "report.html": "<p>"}))
    (tmp_path / "reported").mkdir()
    (tmp_path / "reported" / "report.html").write_text("<p>")
    (tmp_path / "fresh.ipynb").write_text(nbformat.writes(notebook("pass")))
    (tmp_path / "passed.json").write_text(
        json.dumps({"number": "06", "status": "passed", "fingerprint": "f", "notebook": ""})
    )
    (tmp_path / "Eve report.HTML").write_text("<p>")
    (page := tmp_path / "page.html").write_text("<p>")
    found = classroom.gather(tmp_path, page=page)
    notes = {p.name: [(n.file, n.reason) for n in p.left_out] for p in found.participants}
    unsaved = (
        "it is a notebook that shows no result; its last cell was not run, or it was not saved"
    )
    assert notes == {
        "fresh": [("fresh.ipynb", unsaved)],
        **{name: [(file, "it holds no result")] for name, file in (
            ("nothing", "nothing.zip"), ("junk", "junk.zip"), ("reported", "reported"),
            ("passed", "passed.json"))},
    }  # fmt: skip
    assert found.left_out == (("Eve report.HTML", classroom_files.REPORT, ""),)


def test_a_notebook_with_two_results_is_left_out(tmp_path):
    book = json.loads(executed(result().to_dict()))
    book["cells"] *= 2
    (tmp_path / "a.ipynb").write_text(json.dumps(book))
    assert "shows 2 results" in reasons(classroom.gather(tmp_path))[0]


def test_verdicts_are_not_believed(tmp_path):
    record = {**judged(0.01), "verdict": "supported", "says": NASTY}
    other = next(c for c in claims.all_claims().values() if c.lesson != "06")
    foreign = session.judgement_record(claims.judge(other.id, None))
    (tmp_path / "a.json").write_text(text(judgements=(record, record, foreign)))
    [one] = classroom.gather(tmp_path).participants
    assert {i: str(j.verdict) for i, j in one.records[0].judgements.items()} == {CLAIM.id: "wrong"}
    assert [note.reason.split()[-3:] for note in one.left_out] == [
        ["which", "is", "shown"], ["first", "is", "shown"], ["others", "are", "shown"],
    ]  # fmt: skip


@pytest.mark.parametrize("mode", [5, ["measured"], {"a": 1}])
def test_a_judgement_of_no_known_mode_leaves_its_file_out(tmp_path, mode):
    entry = {"id": CLAIM.id, "verdict": "wrong", "measured": 0.4, "mode": mode}
    (tmp_path / "a.json").write_text(json.dumps({**result().to_dict(), "judgements": [entry]}))
    assert reasons(classroom.gather(tmp_path)) == ["it is not a valid result"]


@pytest.mark.parametrize("mode", ["measured", "simulated", "recorded", "", None])
@pytest.mark.parametrize("measured", [1e308, float("inf"), "0.4", {}, {"a": True}, True, -0.0])
def test_any_plain_measured_value_is_judged_or_not_testable(tmp_path, measured, mode):
    entry = {"id": CLAIM.id, "verdict": "wrong", "measured": measured, "mode": mode}
    record = {**result().to_dict(), "judgements": [entry]}
    (tmp_path / "a.json").write_text(json.dumps(record))
    found = classroom.gather(tmp_path)
    assert list(found.participants[0].records[0].judgements) == [CLAIM.id]
    assert len(classroom_page.page(found)) < 20_000


@pytest.mark.parametrize(
    "measured",
    [10**4000, [0.4], {"a": {"b": 1}}, {"a": [1]}],
    ids=["long", "list", "objects", "lists"],
)
def test_a_judgement_of_no_plain_value_leaves_its_file_out(tmp_path, measured):
    entry = {"id": CLAIM.id, "verdict": "wrong", "measured": measured, "mode": "measured"}
    (tmp_path / "a.json").write_text(json.dumps({**result().to_dict(), "judgements": [entry]}))
    assert reasons(classroom.gather(tmp_path)) == ["it is not a valid result"]


def test_links_pipes_and_folders_that_look_like_files(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text(text(title="secret"))
    folder = tmp_path / "sent"
    (folder / "x.json" / "y.json").mkdir(parents=True)
    (folder / "x.json" / "y.json" / "z.json").write_text(text())
    (folder / "link.json").symlink_to(secret)
    (folder / "linked").symlink_to(tmp_path)
    (folder / "x.json" / "inner.json").symlink_to(secret)
    (folder / "x.json" / "again").symlink_to(folder)
    os.mkfifo(folder / "pipe.json")
    os.mkfifo(folder / "x.json" / "pipe.json")
    found = classroom.gather(folder)
    assert [(p.name, len(p.records)) for p in found.participants] == [("x.json", 1)]
    assert sorted(found.participants[0].left_out) == [
        ("again", LINK, ""), ("inner.json", LINK, ""), ("pipe.json", SPECIAL, ""),
    ]  # fmt: skip
    assert sorted(found.left_out) == [
        ("link.json", LINK, ""), ("linked", LINK, ""), ("pipe.json", SPECIAL, ""),
    ]  # fmt: skip
    assert "secret" not in classroom_page.page(found)


def test_a_pipe_that_takes_a_files_place_does_not_hold_us_up(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "a.json")
    monkeypatch.setattr(classroom_files, "_unusable", lambda path: "")
    reader = classroom_files.Reader(tmp_path / "a.json")
    assert list(reader) == []
    assert [note.reason for note in reader.left_out] == [SPECIAL]


def test_folders_too_deep_and_too_full_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(classroom_files, "MOST_ENTRIES", 30)
    (deep := tmp_path / "deep" / "/".join("abcdefghij")).mkdir(parents=True)
    (deep / "x.json").write_text(text())
    (tmp_path / "full").mkdir()
    for i in range(40):
        (tmp_path / "full" / f"{i:02}.json").write_text("{}")
    found = classroom.gather(tmp_path)
    assert [n.reason for n in person(found, "deep").left_out] == [
        "it lies more than 8 folders deep"
    ]
    notes = person(found, "full").left_out
    assert len(notes) == 21
    assert notes[-1].reason == "10 more were left out"  # 29 of the files, and that there were more
    monkeypatch.setattr(classroom_files, "MOST_AT_THE_TOP", 1)
    [note] = classroom.gather(tmp_path).left_out
    assert note.reason == "of more than 1 files the rest is not read"


def test_at_most_so_many_participants(tmp_path, monkeypatch):
    monkeypatch.setattr(classroom_files, "MOST_PARTICIPANTS", 3)
    for i in range(5):
        (tmp_path / f"{i}.json").write_text(text())
    found = classroom.gather(tmp_path)
    assert len(found.participants) == 3
    assert [(n.file, n.reason) for n in found.left_out] == [
        ("3.json", "3 came before it"), ("4.json", "3 came before it"),
    ]  # fmt: skip


# --- zips --------------------------------------------------------------------------------------


def member(name, mode=0, **fields):
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    for field, value in fields.items():
        setattr(info, field, value)
    return info


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../../evil.json", "leads out of the zip"),
        ("a/../../evil.json", "leads out of the zip"),
        ("..\\evil.json", "leads out of the zip"),
        ("/etc/evil.json", "leads out of the zip"),
        ("C:\\evil.json", "leads out of the zip"),
        ("inner.zip", "a zip in a zip"),
        ("program.exe", "none of .json"),
        (member("link.json", stat.S_IFLNK | 0o777), "links are not followed"),
        (member("pipe.json", stat.S_IFIFO | 0o600), "neither a file nor a folder"),
    ],
)
def test_a_member_that_is_no_plain_file_is_left_out(tmp_path, name, words):
    (tmp_path / "a.zip").write_bytes(zipped({name: text(), "good.json": text()}))
    [one] = classroom.gather(tmp_path).participants
    assert len(one.records) == 1
    [note] = one.left_out
    assert words in note.reason
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_a_zip_bomb_is_neither_unpacked_nor_counted_on(tmp_path):
    bomb = zipped({"bomb.json": b"0" * (LARGEST_FILE_BYTES + 1), "good.json": text()})
    (tmp_path / "a.zip").write_bytes(bomb)
    # The same, but its directory says that it is small.
    size = (LARGEST_FILE_BYTES + 1).to_bytes(4, "little")
    (tmp_path / "b.zip").write_bytes(bomb.replace(size, (9).to_bytes(4, "little")))
    found = classroom.gather(tmp_path)
    assert [len(p.records) for p in found.participants] == [1, 1]
    [said], [lied] = (p.left_out for p in found.participants)
    assert said == ("a.zip: bomb.json", "it is larger than 20.0 MiB", "")
    assert lied.reason == "it is damaged in the zip"


def test_bytes_of_all_members_together_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(classroom_files, "MOST_PARTICIPANT_BYTES", 12_000)
    members = {f"{i:03}.json": " " * 3000 for i in range(20)}
    (tmp_path / "a.zip").write_bytes(zipped(members))
    [one] = classroom.gather(tmp_path).participants
    assert [note.reason[:13] for note in one.left_out] == ["it is not JSO"] * 3 + ["with all befo"]


def test_a_zip_of_too_many_members_is_not_opened(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(zipfile, "ZipFile", lambda *a, _make=zipfile.ZipFile: opened.append(a))
    data = b"PK\x01\x02" * (classroom_files.MOST_ENTRIES + 1)
    (tmp_path / "a.zip").write_bytes(data)
    assert reasons(classroom.gather(tmp_path)) == ["it holds more than 1000 files"]
    assert opened == []


def test_encrypted_and_otherwise_compressed_members_are_left_out(tmp_path):
    data = bytearray(zipped({"a.json": text()}))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(signature) + offset] |= 1
    (tmp_path / "a.zip").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("b.json", text())
    assert reasons(classroom.gather(tmp_path)) == [
        "it is encrypted",
        "it is compressed in a way that is not read here",
    ]


# --- anything at all ---------------------------------------------------------------------------

ZIP = zipped({"06.json": text(), "b/07.ipynb": executed(result(lesson="07").to_dict())})
flips = st.lists(st.tuples(st.integers(0, len(ZIP) - 1), st.integers(0, 255)), max_size=8)


def survives(folder, name, data):
    for old in folder.iterdir():
        old.unlink()
    (folder / name).write_bytes(data)
    for anonymous in (False, True):
        found = classroom.gather(folder, anonymous=anonymous)
        hold_harmless(classroom_page.page(found))
        [one] = found.participants
        assert one.records or one.unfinished or one.left_out


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("any")


@given(st.sampled_from(["a.json", "a.ipynb", "a.zip"]), st.binary(max_size=200))
def test_any_bytes_are_read_or_named(scratch, name, data):
    survives(scratch, name, data)


@given(flips, st.integers(0, len(ZIP)))
def test_any_damage_to_a_zip_is_survived(scratch, changes, length):
    data = bytearray(ZIP)
    for place, value in changes:
        data[place] = value
    survives(scratch, "a.zip", bytes(data))
    survives(scratch, "a.zip", bytes(data[:length]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
full = result(machine=GPU, judgements=(judged({"a": 0.4, "b": 0.1}),)).to_dict()
places = [(key,) for key in full] + [
    *(("machine", key) for key in GPU),
    *(("runs", 0, key) for key in full["runs"][0]),
    *(("judgements", 0, key) for key in full["judgements"][0]),
    ("machine", "versions", "torch"),
    ("judgements", 0, "measured", "a"),
]


@given(st.sampled_from(places), json_values, st.booleans())
def test_any_json_in_any_field_is_read_or_named(scratch, place, value, in_notebook):
    record = json.loads(json.dumps(full))
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    if in_notebook:
        record = {"cells": [{"outputs": [{"data": {RESULT_MIME: record}}]}]}
    survives(scratch, "a.json", json.dumps(record).encode())


# --- the command -------------------------------------------------------------------------------


def command(*arguments):
    parser = argparse.ArgumentParser()
    cli_class.add_command(parser.add_subparsers())
    options = parser.parse_args(["class", *map(str, arguments)])
    return options.action(options)


def test_the_command_writes_the_page_and_says_where(sent, tmp_path, capsys):
    out = tmp_path / "new" / "page.html"
    assert command(sent, "--out", out) == 0
    assert "Ada" in out.read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert printed.startswith("3 participants, 4 results of 2 lessons, 2 kinds of machine")
    assert str(out) in printed
    assert command(sent, "--anonymous", "--out", out) == 0
    assert "Ada" not in out.read_text(encoding="utf-8")


def test_a_page_in_the_folder_is_nobodys_result(sent):
    assert command(sent, "--out", sent / "page.html") == 0
    before = (sent / "page.html").read_text()
    assert command(sent, "--out", sent / "page.html") == 0
    assert (sent / "page.html").read_text() == before


def test_without_any_result_the_page_says_why_and_the_command_is_not_content(tmp_path):
    (tmp_path / "a.json").write_text("{")
    assert command(tmp_path, "--out", tmp_path / "c.html") == 1
    assert "It is not JSON that can be read" in (tmp_path / "c.html").read_text()


def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "ada.json").write_text(text())
    for arguments, words in (
        (("none",), "there is no folder none"),
        (("ada.json",), "there is no folder ada.json"),
        (("empty",), "empty holds nothing to compare"),
        ((".", "--out", "ada.json"), "must name a file that ends in .html"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            command(*arguments)
    assert (tmp_path / "ada.json").read_text() == text()
    assert not (tmp_path / "class.html").exists()


def test_machines_without_details_are_shown(tmp_path):
    (tmp_path / "a.json").write_text(text(machine=MACHINE))
    row = Elements(classroom_page.page(classroom.gather(tmp_path))).row("a", column=6)
    assert row[1:6] == ["Test CPU", "cpu", "–", "–", "–"]

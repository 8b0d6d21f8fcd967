"""What others may send us: every reader takes it or refuses it in a sentence, and runs nothing."""

import ast
import contextlib
import copy
import hashlib
import importlib.util
import io
import json
import os
import pickle
import pickletools
import re
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from bs4 import BeautifulSoup, Comment
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_server.auth.identity import PasswordIdentityProvider
from lesson_files import MACHINE, notebook, result, run
from nbformat.v4 import new_markdown_cell, new_output
from papermill.translators import papermill_translators

import labkit as lab
from labkit import (
    accuracy,
    claims,
    drift,
    register,
    report,
    safe_html,
    session,
    snapshot,
    train_script,
)
from labkit.check import WIDGET_STATE, check_notebook
from labkit.hardware import Machine
from labkit.headline_records import Entry, Headline, Job
from labkit.lessons import (
    Parameter,
    check_parameters,
    check_value,
    declared_parameters,
    lesson_at,
    read_notebook,
    title_of,
)
from labkit.memory import GIB, InputError, OutOfMemory
from labkit.model_source import find_config
from labkit.outcomes import Outcome
from labkit.readable import NO_ALT
from labkit.recipes import Recipe
from labkit.results import RESULT_MIME, Result
from labkit.safe_html import sanitise
from labkit.show.cards import claim_card, exercise_card, machine_card, message_card
from labkit.show.rich import grid
from labkit.snapshot import read_snapshot

ROOT = Path(__file__).resolve().parents[2]
DATE = "2026-01-02T03:04:05+00:00"

# --- records: a sound one, changed anywhere -------------------------------------------------------

HUGE = (10**400, -(10**400), 10**4299, 1 << 90, 1e308, float("nan"), float("-inf"))
hostile = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(HUGE)
    | st.sampled_from(["", "\0", "\ud800", "<script>", "x" * 10_000, "../../etc/passwd", "nan"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def places(record, place=()):
    """The paths of all values in a record of lists and objects, its own first."""
    yield place
    if isinstance(record, dict | list):
        for key, item in record.items() if isinstance(record, dict) else enumerate(record):
            yield from places(item, (*place, key))


@st.composite
def changed(draw, record):
    """``record``, with up to three of its values replaced, removed, or joined by others."""
    record = copy.deepcopy(record)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([p for p in places(record) if p]))
        inner = record
        for key in way:
            inner = inner[key]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
        if action == "replace":
            inner[last] = draw(hostile)
        elif action == "remove":
            del inner[last]
        elif isinstance(inner, dict):
            inner[draw(st.text(max_size=5))] = draw(hostile)
        else:
            inner.append(draw(hostile))
        if not record:
            break
    return record


def sound_record():
    numbers = {"batch 8": 0.5, "batch 9": 2}
    judged = [claims.judge(c.id, c.expected if c.unit == "yes_no" else numbers)
              for c in list(claims.all_claims().values())[:4]]  # fmt: skip
    lost = OutOfMemory(GIB, 5, 4, {"weights": 5}, 1, "forward", "layers.0", "mm")
    runs = (
        run(mode="measured", losses=(1.0, 2.0), step_seconds=(0.1, 0.2), reserved_bytes=GIB,
            capacity_bytes=GIB, flops=5),
        run(peak_bytes=5, by_category={"weights": 5}, step_peaks_bytes=(), oom=lost),
    )  # fmt: skip
    found = result(runs=runs, judgements=tuple(session.judgement_record(each) for each in judged))
    return json.loads(json.dumps(found.to_dict()))


def read_or_refused(read, *given):
    """What ``read`` makes of it; None if it refuses it in a short sentence."""
    try:
        return read(*given)
    except InputError as error:
        sentence = str(error)
    assert 0 < len(sentence) < 1500
    return None


def used(found):
    """What people do with a result: say it, judge it again, compare it, show it, store it."""
    assert isinstance(str(found), str)
    for each in found.runs:
        assert isinstance(f"{each} {each.label} {each.fits} {each.oom}", str)
    found.broken_invariants()
    drift.drift("06", drift.figures(found), [])
    report.verdict_table([found])
    json.dumps(found.to_dict(), allow_nan=False)


@given(changed(sound_record()))
def test_a_result_changed_anywhere_is_read_or_refused_and_what_is_read_can_be_used(record):
    found = read_or_refused(Result.from_dict, record)
    if found is not None:
        used(found)


def headline_record():
    plain = Recipe(batch_size=1, seq_len=8)
    job = Job(name="stack", shows="It fits.", model="nobody's", recipes=(("plain", plain),))
    real = run(mode="measured", losses=(1.0,), step_seconds=(0.1,), reserved_bytes=GIB)
    entry = Entry("plain", plain, real, run(), tried=((1, True),))
    return json.loads(json.dumps(Headline(job, (entry,), MACHINE, 1.0, DATE).to_dict()))


@given(changed(headline_record()))
def test_a_headline_changed_anywhere_is_read_or_refused(record):
    found = read_or_refused(Headline.from_dict, record)
    if found is not None:
        drift.drift("stack", drift.figures(found), [])
        assert isinstance(f"{found.factors} {found.entries[0].oom}", str)
        json.dumps(found.to_dict(), allow_nan=False)


def accuracy_record():
    rows = (accuracy.Row("a", 5, 5, 6, 7, 8), accuracy.Row("b", None, None, 6, group="set-ups"))
    return json.loads(json.dumps(accuracy.AccuracyTable(rows, MACHINE, DATE).to_dict()))


@given(changed(accuracy_record()))
def test_an_accuracy_table_changed_anywhere_is_read_or_refused(record):
    found = read_or_refused(accuracy.AccuracyTable.from_dict, record)
    if found is not None:
        drift.drift("accuracy", drift.figures(found), [])
        json.dumps(found.to_dict())


@given(changed({"schema": 1, "files": {"06.json": {"made_by": "a", "sha256": "b"}}}))
def test_a_register_changed_anywhere_is_read_or_begun_anew(tmp_path_factory, record):
    folder = tmp_path_factory.mktemp("gpu")
    (folder / register.FILE).write_text(json.dumps(record))
    told = []
    holder = register.Register(folder, told.append)
    assert not holder.holds("06.json", "a")
    assert all(line.endswith("All is measured again.") for line in told)


class NoNumber:
    def __repr__(self):
        raise RuntimeError

    def item(self):
        return self


NO_NUMBERS = {"long": 10**5000, "longer": [10**5000], "odd": NoNumber(), "text": "5",
              "complex": 5j, "object": object(), "bytes": b"5"}  # fmt: skip


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_is_no_number_is_never_judged_and_never_raises(value):
    number, sentence = claims.plain_value(value)
    assert number is None
    assert sentence.endswith(".")
    assert len(sentence) < 200


@given(st.sampled_from(sorted(claims.all_claims())), hostile, hostile)
def test_anything_measured_gets_a_verdict(claim, measured, mode):
    mode = mode if isinstance(mode, str) else None
    judged = claims.judge(claim, measured, mode)
    json.dumps(session.judgement_record(judged), allow_nan=False)


# --- HTML: read as a browser reads it -------------------------------------------------------------


RUNS_OR_FETCHES = {
    "script", "style", "link", "meta", "base", "iframe", "frame", "object", "embed", "applet",
    "form", "input", "button", "textarea", "select", "svg", "audio", "video", "source", "track",
    "picture", "template", "noscript", "xmp", "plaintext", "title", "annotation-xml", "mglyph",
    "malignmark", "maction", "body", "html", "head",
}  # fmt: skip


def is_still(fragment):
    """Whether nothing runs and nothing is fetched in what a browser makes of ``fragment``."""
    soup = BeautifulSoup(f"<!DOCTYPE html><body><div>{fragment}", "html5lib")
    if soup.find_all(string=lambda text: isinstance(text, Comment)):
        return False
    return all(
        each.name not in RUNS_OR_FETCHES and all(is_still_attribute(each.name, *pair) for pair in
                                                 each.attrs.items())
        for each in soup.body.div.find_all(True)
    )  # fmt: skip


def is_still_attribute(element, name, value):
    value = " ".join(value) if isinstance(value, list) else value
    address = re.sub(r"[\x00-\x20]", "", value).lower()  # a browser skips these too
    if name.startswith("on") or address.startswith(("javascript:", "vbscript:")):
        return False
    if name == "src":
        return element == "img" and address.startswith("data:image/")
    if name == "href":
        return element == "a" and not address.startswith("data:")
    if name == "style":
        return not re.search(r"\\|@|/\*|url|image|src|element|cross-fade|paint", value.lower())
    return name in LEFT or name.startswith("aria-")


LEFT = {
    "abbr", "accent", "accentunder", "align", "alt", "border", "class", "colspan",
    "columnalign", "columnlines", "columnspacing", "datetime", "depth", "dir", "display",
    "displaystyle", "fence", "form", "headers", "height", "id", "lang", "linethickness",
    "lspace", "mathvariant", "maxsize", "minsize", "open", "rel", "reversed", "role",
    "rowlines", "rowspacing", "rowspan", "rspace", "scope", "scriptlevel", "separator", "span",
    "start", "stretchy", "tabindex", "title", "type", "valign", "width",
}  # fmt: skip

ATTACKS = r"""
<svg><style><img src=x onerror=hit=1></style></svg>
%%
<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=hit=1&gt;">
%%
<noscript><p title="</noscript><img src=x onerror=hit=1>">
%%
<template><img src=x onerror=hit=1></template>
%%
<textarea><p title="</textarea><img src=x onerror=hit=1>"></textarea>
%%
<!--><img src=x onerror=hit=1>-->
%%
<!-- --!><img src=x onerror=hit=1> -->
%%
<![CDATA[><img src=x onerror=hit=1>]]>
%%
<?xml ><img src=x onerror=hit=1>?>
%%
<xmp><p title="</xmp><img src=x onerror=hit=1>"></xmp>
%%
<style><a title="</style><img src=x onerror=hit=1>"></style>
%%
<title><a title="</title><img src=x onerror=hit=1>"></title>
%%
<svg><a xlink:href="javascript:hit=1"><text>x</text></a><animate attributeName=href values=javascript:hit=1 /></svg>
%%
<svg><use href="https://x.org/a.svg#a"/></svg><svg><image href="https://x.org/i.png" width=9 height=9 /></svg>
%%
<input type=image src=https://x.org/a.png><button formaction=https://x.org>x</button>
%%
<p style="background:u\72l(https://x.org/c.png)">x</p>
%%
<p style="background:image-set('https://x.org/c.png' 1x)">x</p>
%%
<p style="background:url(data:x),url/**/(https://x.org/z.png),url('https://x.org/y)">x</p>
%%
<style>@\69mport 'https://x.org/e.css'; a{}</style>
%%
<style>p{background:image-set("https://x.org/f.png" 1x)}</style><p>x
%%
<style>@import/**/"https://x.org/g.css</style>
%%
<style>p{background: u\rl(https://x.org/h.png)}</style><p>x
%%
<iframe srcdoc="<script>parent.hit=1</script>"></iframe>
%%
<a ping=https://x.org href=#>x</a><a href="data:text/html,<script>hit=1</script>">y</a>
%%
<form><math><mtext></form><form><mglyph><svg><mtext><style><path id="</style><img onerror=hit=1 src>">
%%
<audio src=https://x.org/a.mp3></audio><video><source src=https://x.org/a.mp4><track src=https://x.org/t.vtt></video><picture><source srcset=https://x.org/p.png><img src=data:,></picture>
%%
<table background=https://x.org/t.png><td background=https://x.org/td.png>x</table><body background=https://x.org/b.png>
%%
<svg><set attributeName=onmouseover to=hit=1 /></svg><svg><script>hit=1</script></svg><svg><script href=https://x.org/s.js /></svg>
%%
<svg><filter id=f><feImage href="https://x.org/fe.png"/></filter><rect filter="url(https://x.org/f.svg#f)" fill="url(https://x.org/g.svg#g)" width=9 height=9 /></svg>
%%
<math><annotation-xml encoding="text/html"><img src=x onerror=hit=1></annotation-xml></math>
%%
<svg></p><style><a id="</style><img src=1 onerror=hit=1>">
%%
<img src="data:image/png;base64,AAAA" srcset="https://x.org/set.png 2x" imagesrcset="https://x.org/s2.png">
%%
<details open ontoggle=hit=1><summary>x</summary></details>
%%
<plaintext><script>hit=1</script>
%%
<select><style></select><img src=x onerror=hit=1></style></select>
""".strip().split("\n%%\n")  # noqa: E501


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_what_was_seen_in_the_wild_is_still(number):
    assert not is_still(ATTACKS[number])
    assert is_still(sanitise(ATTACKS[number]))


PIECES = st.sampled_from(
    [piece for attack in ATTACKS for piece in re.split(r"(?=<)|(?<=>)|(?= )", attack)]
)


@given(st.lists(PIECES | st.text("<>/!-=\"'&;#x0\n [](?svgmathstyle", max_size=8), max_size=20))
def test_nothing_made_of_their_pieces_gets_through(pieces):
    clean = sanitise("".join(pieces))
    assert is_still(clean)
    assert sanitise(clean) == clean


DETAILS = "<details><summary>a</summary>b</details>"


def test_what_lessons_show_stays_as_it_is():
    card = message_card("Say <b>.", title="note", code="x < 1").html
    formula = report.mathml(r"\frac{a_i}{\sqrt{b}} \cdot 2", "inline")
    for shown in (
        card,
        formula,
        '<img alt="a" src="data:image/png;base64,AAAA">',
        '<a href="07_more.ipynb">next</a>',
        DETAILS,
    ):
        clean = sanitise(shown)
        assert (
            BeautifulSoup(clean, "html5lib").get_text()
            == BeautifulSoup(shown, "html5lib").get_text()
        )
        assert clean.count("<") == shown.count("<")
        assert clean.count("style=") == shown.count("style=")
    assert 'src="data:image/png;base64,AAAA"' in sanitise('<img src="data:image/png;base64,AAAA">')
    assert 'href="07_more.ipynb"' in sanitise('<a href="07_more.ipynb">next</a>')


def test_a_page_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(safe_html, "MOST_BYTES", 10)
    with pytest.raises(InputError, match="more than 10 B"):
        sanitise("<p>" * 4)


# --- parameters of a lesson: papermill writes them into a cell as code ----------------------------

ODD_TEXTS = (
    "'", '"', '"""', "\\", "'); import os; os.system('x') #", "a\nimport os", "a\r\nb", "\u2028x",
    "__import__('os').system('x')", "{0}", "%s", "\0", "\x85", "'\\'", "\\N{DASH}", "1_0", "\uff11",
    "[1] + [2]", "[" * 900, "-" * 900 + "1", "[1e999]", "{1: 2}", "[b'x']", "[1j]", "['\\ud800']",
    "\ud800", "9" * 900, "1e400", "nan", "-inf", "None", "true", "[__import__('os')]",
)  # fmt: skip
KINDS = {"int": 1, "int | None": 1, "float": 1.0, "bool": True, "str": "a", "list": [1],
         "dict": {"a": 1}, "list[str]": ["a"], "tuple": (1,), "set": {1}}  # fmt: skip


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(ODD_TEXTS) | st.text() | st.text("[]{}'1,-"))
def test_no_value_of_a_parameter_becomes_code(kind, text):
    """What papermill would write is one assignment of a literal, and it is the value again."""
    given = Parameter(kind, KINDS[kind], ())
    read = read_or_refused(lambda: [check_value("x", text, given)])
    if read is None:
        return
    [value] = json.loads(json.dumps(read))  # so it goes to the process that runs papermill
    code = papermill_translators.find_translator("python3", "python").codify({"x": value})
    code.encode()
    [assigned] = ast.parse(code).body
    assert isinstance(assigned, ast.Assign)
    assert ast.unparse(assigned.targets) == "x"
    assert ast.literal_eval(assigned.value) == value


@given(st.text())
def test_no_name_of_a_parameter_becomes_code(name):
    declared = {"batch_size": Parameter("int", 8, ())}
    known = read_or_refused(check_parameters, [(name, "1")], declared, "06")
    assert known is None or set(known) == {"batch_size"}


# --- notebooks: a sound one, changed anywhere, is read, checked and shown -------------------------


def executed_notebook():
    """As papermill leaves a lesson, with a widget that held a picture."""
    book = notebook("print(1)")
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.execution_count = 1
            cell.metadata["papermill"] = {"status": "completed"}
            cell.metadata["execution"] = {"shell.execute_reply": DATE}
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "box"}, "text/plain": "HBox"}
    shown = {"text/html": "<b>1</b>", "image/png": "AAAA", "image/svg+xml": "<svg/>"}
    book.cells[0].attachments = {"a.png": {"image/png": "AAAA"}}
    book.cells[2].outputs = [
        new_output("stream", name="stdout", text="1"),
        new_output("display_data", data=view),
        new_output("display_data", data=shown, metadata={"image/png": {"width": 5}}),
        new_output("error", ename="E", evalue="e", traceback=["t"]),
    ]
    book.cells[3].outputs = [new_output("display_data", data={RESULT_MIME: result().to_dict()})]
    held = [new_output("stream", name="stdout", text="inside")]
    state = {"box": {"state": {"children": ["IPY_MODEL_out"]}}, "out": {"state": {"outputs": held}}}
    book.metadata["widgets"] = {WIDGET_STATE: {"state": state}}
    return json.loads(nbformat.writes(book))


@pytest.mark.parametrize("value", [None, 1, ["a", 1], {"a": "b"}])
def test_what_is_shown_is_text(tmp_path, value):
    path = tmp_path / "06_any.ipynb"
    for where in ("output", "attachment", "widget"):
        record = executed_notebook()
        state = record["metadata"]["widgets"][WIDGET_STATE]["state"]["out"]["state"]
        odd = {"output_type": "display_data", "metadata": {}, "data": {"text/html": value}}
        if where == "output":
            record["cells"][2]["outputs"].append(odd)
        elif where == "attachment":
            record["cells"][0]["attachments"]["b.png"] = {"image/png": value}
        else:
            state["outputs"].append(odd)
        path.write_text(json.dumps(record))
        book = read_or_refused(read_notebook, path)
        assert (book is None) == (where != "widget")
        if book is not None:  # a widget's state has no schema: what is none is left out
            assert not any("widget" in problem for problem in check_notebook(book, lesson="06"))


def test_notes_of_a_picture_may_be_anything(tmp_path):
    path = tmp_path / "06_any.ipynb"
    record = executed_notebook()
    odd = {
        "output_type": "display_data",
        "metadata": {"image/png": "a"},
        "data": {"image/png": "A"},
    }
    record["cells"][2]["outputs"].append(odd)
    path.write_text(json.dumps(record))
    assert any(NO_ALT in problem for problem in check_notebook(read_notebook(path), lesson="06"))


@settings(max_examples=30)  # each is validated and rendered
@given(changed(executed_notebook()))
def test_a_notebook_changed_anywhere_is_refused_or_checked_and_shown(tmp_path_factory, record):
    path = tmp_path_factory.getbasetemp() / "06_any.ipynb"
    path.write_text(json.dumps(record))
    book = read_or_refused(read_notebook, path)
    if book is None:
        return
    assert all(isinstance(problem, str) for problem in check_notebook(book, lesson="06"))
    declared_parameters(book)
    title_of(book, lesson_at(path))
    with contextlib.suppress(InputError):
        assert is_still(report.render(book))


# --- snapshots: small files that unfold into large ones -------------------------------------------


def unfolding(levels):
    """A pickle of lists, each of which holds the one before it ten times."""
    inner = []
    for _ in range(levels):
        inner = [inner] * 10
    return pickle.dumps({"segments": [], "device_traces": inner}, 4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (unfolding(30), "parts when written out"),
        (b"\x80\x04}(\x8c\x08segments]\x8c\x0ddevice_traces]\x94h\x00au.", "contains itself"),
        (
            b"\x80\x04}\x94(\x8c\x08segments]\x8c\x0ddevice_traces]\x8c\x01ah\x00u.",
            "contains itself",
        ),
    ],
    ids=["laughs", "list", "dict"],
)
def test_a_snapshot_that_unfolds_without_end_is_refused(tmp_path, content, words):
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_snapshot(path)


def test_parts_that_events_share_are_no_offence(tmp_path):
    path = tmp_path / "s.pickle"
    path.write_bytes(unfolding(3))
    assert len(read_snapshot(path)["device_traces"]) == 10


INSTRUCTIONS = [code.code.encode("latin-1") for code in pickletools.opcodes]


@given(st.lists(st.sampled_from(INSTRUCTIONS) | st.binary(max_size=3), max_size=30))
def test_any_instructions_are_read_or_refused(tmp_path_factory, codes):
    path = tmp_path_factory.getbasetemp() / "any.pickle"
    path.write_bytes(b"\x80\x04" + b"".join(codes) + b".")
    with contextlib.suppress(InputError):
        read_snapshot(path)


def test_only_instructions_for_plain_data_are_known():
    """Whatever looks a name up or calls something would have to be added on purpose."""
    known = {*snapshot._SCALARS, *snapshot._CONSTANTS, *snapshot._NOTHING_TO_DO}
    known |= {*snapshot._BUILDERS, "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET"}
    names = {code.name for code in pickletools.opcodes}
    assert known < names
    assert not known & {"GLOBAL", "STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "REDUCE",
                        "BUILD", "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"}  # fmt: skip


# --- cards, tables: any text in, no new element out -----------------------------------------------

MARKUP = (
    st.text("<>&\"'/=ab \n;:(){}!-", max_size=60) | st.sampled_from(ATTACKS) | st.text(max_size=20)
)


def shape(fragment):
    """The elements and their attributes, without what is written between them."""
    soup = BeautifulSoup(fragment, "html5lib")
    return [(each.name, sorted(each.attrs)) for each in soup.find_all(True) if each.name != "br"]


def shown_by(texts):
    """The HTML of every card and table that is made of other people's names and words."""
    a, b, c = texts
    claim = next(iter(claims.all_claims()))
    judged = claims.judge(claim, {a: 0.5, f"{a}2": 0.7}, b)
    found = {"gpu": a, "verdict": "supported", "measured": {b: 1.0}, "versions": {"torch": c},
             "date": DATE}  # fmt: skip
    outcome = SimpleNamespace(id=a, status="correct", message=b)
    here = Machine("cpu", a, None, b, {"torch": c}, True, 1, None, False)
    yield claim_card(judged, [found]).html
    yield machine_card(here, simulated_for=b).html
    yield exercise_card(outcome).html
    yield message_card(a, title=b, code=c).html
    yield grid([a or "-", "b"], [[b, c]], caption=c).html
    named = Outcome("06", a, b, "failed", (c,), 1.0)
    yield report.lesson_table([named])
    record = {"id": a, "verdict": "wrong", "measured": {b: 1.0}, "unit": c, "says": a}
    yield report.verdict_table([result(judgements=(record,))])


@settings(max_examples=40)
@given(st.tuples(MARKUP, MARKUP, MARKUP))
def test_other_peoples_words_are_text_on_every_card_and_table(texts):
    plain = [re.sub(r"[<>&\"'=/]", "x", text) for text in texts]
    with contextlib.redirect_stdout(io.StringIO()):
        for hostile_html, plain_html in zip(shown_by(texts), shown_by(plain), strict=True):
            assert shape(hostile_html) == shape(plain_html)


# --- a real browser opens what a hostile lesson left ----------------------------------------------

WITNESS = (
    '<img src=\'data:image/svg+xml,<svg xmlns="http://www.w3.org/2000/svg" onload="hit=1"/>\'>'
)


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None or importlib.util.find_spec("playwright") is None:
        assert "CI" not in os.environ, "chromium and playwright must be there"
        pytest.skip("there is no chromium with playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


def opened(browser, path):
    """Whether a script of the page ran, and the addresses that the page asked for."""
    page, asked = browser.new_page(), []
    page.route("**/*", lambda route: route.continue_() if route.request.url == path.as_uri()
               else (asked.append(route.request.url), route.abort()))  # fmt: skip
    page.goto(path.as_uri())
    page.wait_for_timeout(300)
    ran = page.evaluate("typeof hit !== 'undefined'")
    page.close()
    return ran, [url for url in asked if not url.startswith("data:")]


@pytest.mark.browser
def test_a_browser_runs_and_fetches_nothing_of_a_hostile_lesson(browser, tmp_path):
    book = notebook("pass")
    attacks = [*ATTACKS, WITNESS]
    book.cells[2].outputs = [new_output("display_data", data={"text/html": a}) for a in attacks]
    book.cells += [new_markdown_cell(attack) for attack in attacks]
    for number, cell in enumerate(book.cells):
        cell["id"] = f"06-{number}"
    nbformat.write(book, tmp_path / "06_saving.ipynb")
    outcome = Outcome("06", "06_saving", ATTACKS[0], "failed", tuple(ATTACKS), 1.0,
                      notebook="06_saving.ipynb")  # fmt: skip
    path = report.report(tmp_path, [outcome])
    assert opened(browser, path) == (False, [])
    bare = tmp_path / "bare.html"  # the same without what the page forbids its browser
    text = path.read_text(encoding="utf-8")
    assert safe_html.POLICY in text
    bare.write_text(text.replace(safe_html.POLICY, ""), encoding="utf-8")
    assert opened(browser, bare) == (False, [])
    bare.write_text("".join(ATTACKS), encoding="utf-8")
    ran, asked = opened(browser, bare)
    assert ran
    assert asked


# --- models of others -----------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300,
         "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip


def test_weights_beside_a_config_are_never_opened(tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "touched"), "w")

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name in ("pytorch_model.bin", "model.safetensors", "training_args.bin", "tokenizer.json"):
        (tmp_path / name).write_bytes(pickle.dumps(Evil()))
    name, config = find_config(tmp_path)
    assert (name, config.hidden_size) == (tmp_path.name, 32)
    assert lab.model(config, device="meta").num_parameters() > 0
    assert not (tmp_path / "touched").exists()


def test_a_config_of_a_gigabyte_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 1 << 30)
    tracemalloc.start()
    with pytest.raises(InputError, match="no model's config has"):
        find_config(tmp_path)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_bytes < 50 << 20


def test_a_link_to_another_file_tells_nothing_of_it(tmp_path):
    (tmp_path / "secret").write_text("correct horse battery staple")
    (tmp_path / "config.json").symlink_to(tmp_path / "secret")
    for name in (tmp_path, tmp_path / "x" / ".." / "config.json", "../../../../etc/passwd", "../x"):
        with pytest.raises(InputError) as caught:
            find_config(name)
        assert not re.search("horse|root:", str(caught.value))


def source(path):
    """The text of a module, or of the cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(
        re.sub(r"^( *)[%!].*", r"\1pass", "".join(c["source"]), flags=re.M) for c in cells
    )


def calls(text):
    """The calls in a text: the function's name with its module's, its keywords."""
    nodes, modules = list(ast.walk(ast.parse(text))), {}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            modules |= {each.asname or each.name: package + each.name for each in node.names}
    for node in nodes:
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            keywords = {key.arg: ast.unparse(key.value) for key in node.keywords}
            yield modules.get(first, first) + dot + rest, keywords


def unpickles(function, keywords):
    """Whether a call runs what a pickle says."""
    module, _, last = function.rpartition(".")
    if last in ("load", "loads"):
        if module == "torch":
            return keywords.get("weights_only", "True") != "True"
        return "pickle" in module or module.startswith("torch.distributed.checkpoint")
    return last in ("Unpickler", "read_pickle")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle\npickle.load(file)", True),
        ("from pickle import loads as read\nread(x)", True),
        ("from pickle import Unpickler\nUnpickler(x)", True),
        ("import torch.distributed.checkpoint as dcp\ndcp.load({}, checkpoint_id=x)", True),
        ("from torch.distributed import checkpoint\ncheckpoint.load({}, checkpoint_id=x)", True),
        ("import torch\ntorch.load(x, weights_only=False)", True),
        ("import torch\ntorch.load(x, weights_only=True)\ntorch.load(x)", False),
        ("import json\njson.load(file)", False),
    ],
)
def test_what_unpickles_is_told_by_any_name(text, found):
    assert any(unpickles(*call) for call in calls(text)) == found


@pytest.mark.parametrize("folder", ["labkit", "notebooks", "benchmarks", "workshop", "site", ".ci"])
def test_no_code_of_others_is_ever_asked_for(folder):
    files = [f for end in ("py", "ipynb") for f in (ROOT / folder).rglob(f"*.{end}")]
    files = [f for f in files if "checkpoints" not in f.parent.name]
    assert files
    unpickling = set()
    for path in files:
        for call in calls(source(path)):
            assert "trust_remote_code" not in call[1], path
            if unpickles(*call):
                unpickling.add(path.name)
    # Lesson 02 shows what a pickle does; 18 goes on after a checkpoint. Both made theirs just then.
    lessons = {"02_profiling.ipynb", "18_fsdp.ipynb"}
    assert unpickling == (lessons if folder == "notebooks" else set())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_loads_its_own_checkpoint_and_no_other_pickle(tmp_path, ranks):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    text = train_script.script(Recipe(batch_size=1, seq_len=8, ranks=ranks), model=str(tmp_path))
    unpickling = [function for function, keywords in calls(text) if unpickles(function, keywords)]
    assert unpickling == ["torch.distributed.checkpoint.load"] * (ranks > 1)
    heading = ast.get_docstring(ast.parse(text))
    assert ("A checkpoint folder is a program" in heading) == (ranks > 1)


# --- scripts that are written for people ----------------------------------------------------------


@settings(max_examples=25)
@given(
    st.text("\"'\\{}()#;$`%&|!<> ab", min_size=1, max_size=20).filter(str.strip), st.integers(1, 2)
)
def test_no_name_of_a_model_becomes_code_in_a_script(tmp_path_factory, name, ranks):
    base = tmp_path_factory.mktemp("models")
    for folder in (base / name, base / "plain"):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA))
    recipe = Recipe(batch_size=1, seq_len=8, ranks=ranks)
    made = ast.parse(train_script.script(recipe, model=str(base / name), gpu=name))
    plain = ast.parse(train_script.script(recipe, model=str(base / "plain"), gpu="plain"))
    assert [type(node) for node in ast.walk(made)] == [type(node) for node in ast.walk(plain)]
    texts = {node.value for node in ast.walk(made) if isinstance(node, ast.Constant)}
    assert str(base / name) in texts


# --- the servers that the Makefile starts ---------------------------------------------------------


def recipe_of(target):
    return subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True,
                          check=True, timeout=60).stdout  # fmt: skip


def test_jupyterlab_listens_to_this_machine_only_and_keeps_its_token():
    [line] = [each for each in recipe_of("lab").splitlines() if "jupyter lab" in each]
    assert "--ServerApp.ip=127.0.0.1" in line
    assert not re.search("token|password|origin|disable_check_xsrf|allow_remote", line)
    assert len(PasswordIdentityProvider().token) >= 40  # what the server does unless told otherwise


def test_the_calculator_listens_to_this_machine_only_and_has_a_token():
    [line] = [each for each in recipe_of("app").splitlines() if "voila" in each and "ipynb" in each]
    assert "--Voila.config_file_paths=page" in line
    settings_of = json.loads((ROOT / "page" / "voila.json").read_text(encoding="utf-8"))
    assert settings_of["Voila"]["ip"] == "127.0.0.1"
    assert settings_of["Voila"]["auto_token"] is True
    assert settings_of["VoilaConfiguration"]["strip_sources"] is True
    assert settings_of["VoilaConfiguration"]["show_tracebacks"] is False


# --- what `make .venv` installs -------------------------------------------------------------------


def test_make_installs_by_hash():
    """Every package but torch, whose builds differ, and labkit itself, which lies here."""
    command = ["make", "-n", "-B", ".venv", "CONSTRAINTS=constraints.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if "pip install" in line]
    lines = [line for line in lines if "apt-get" not in line]
    other = [line for line in lines if "--require-hashes --no-deps" not in line]
    assert len(lines) - len(other) >= 2
    assert [line.split("--quiet ")[1].split()[0] for line in other] == ['"$(grep', "--no-deps"]
    assert other[1].endswith("--no-deps -e .")


LOCKED = sorted((ROOT / ".ci" / "locked").glob("*.txt"))
HASHED = re.compile(
    r"([a-z0-9-]+)==([0-9][0-9a-z.]*)( ; [^\\]+)? \\\n"  # name, version, marker
    r"((?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)"
)


def locked(path):
    """(name, version, marker) of each entry; anything else in the file fails."""
    text = "".join(line for line in path.open(encoding="utf-8") if not line.startswith("#"))
    assert HASHED.sub("", text) == "", f"{path.name} holds a line without a hash"
    return [(name, version, marker.strip()) for name, version, marker, _ in HASHED.findall(text)]


def test_locks_and_constraints_give_the_same_versions():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert [path.name for path in LOCKED] == ["course.txt", "deepspeed.txt", "more.txt"]
    held = {}
    for path in LOCKED:
        for name, version, marker in locked(path):
            held.setdefault(name, set()).add(version)
            assert pins.get(name, version) == version, name
            assert name in pins or marker, (
                f"{name} is in no constraint, and not of one system alone"
            )
    assert all(len(versions) == 1 for versions in held.values())
    assert set(pins) - set(held) == {"torch"}


@pytest.mark.parametrize("tampered", [False, True])
def test_pip_refuses_a_file_with_another_hash(tmp_path, tampered):
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing.py", "")
        info = "thing-1.0.dist-info/"
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        archive.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(info + "RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes() + b"x" * tampered).hexdigest()
    lock = tmp_path / "lock.txt"
    lock.write_text(f"thing==1.0 \\\n    --hash=sha256:{digest}\n")
    command = [sys.executable, "-m", "pip", "install", "--require-hashes", "--no-deps", "-r", lock,
               "--no-index", "--find-links", tmp_path, "--target", tmp_path / "out"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (tmp_path / "out" / "thing.py").exists() is not tampered
    assert ("DO NOT MATCH THE HASHES" in done.stderr) is tampered


# --- SECURITY.md ----------------------------------------------------------------------------------


def test_each_test_that_security_md_names_is_there():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 10
    for path, function in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert f"def {function}(" in source, (path, function)
    for sentence in re.findall(r"^- (.*?)(?=^- |^#|\Z)", text.partition("## What")[2], re.M | re.S):
        assert "`tests/" in sentence, sentence

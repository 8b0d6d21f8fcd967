"""What others may send us: every reader takes it or refuses it in a sentence, and runs nothing."""

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from attacks import ATTACKS
from bs4 import BeautifulSoup, Comment
from hypothesis import given, settings
from hypothesis import strategies as st
from lesson_files import read_or_refused, result
from papermill.translators import papermill_translators

from gpumem.estimation import script
from gpumem.estimation.recipe import Recipe
from gpumem.figures.cards import message_card
from gpumem.figures.html_pages import grid
from gpumem.hardware.this_machine import Machine
from labkit.course import report
from labkit.course.html_parts import sanitise
from labkit.course.outcomes import Outcome
from labkit.exercises.engine import exercise_card
from labkit.lesson import claims
from labkit.lesson.claim_cards import claim_card, machine_card
from labkit.lesson.notebooks import Parameter, check_value

ROOT = Path(__file__).resolve().parents[2]

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
    elements = soup.body.div.find_all(True)
    if any(each.name in RUNS_OR_FETCHES for each in elements):
        return False
    attributes = [(each.name, *pair) for each in elements for pair in each.attrs.items()]
    return all(is_still_attribute(*attribute) for attribute in attributes)


FETCHING = {
    "action", "background", "data", "formaction", "imagesrcset", "manifest", "ping", "poster",
    "srcdoc", "srcset", "values", "xlink:href",
}  # fmt: skip


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
    return name not in FETCHING


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack[:30])
def test_known_attacks_are_made_safe(attack):
    assert not is_still(attack)
    assert is_still(sanitise(attack))


PIECES = st.sampled_from(
    [piece for attack in ATTACKS for piece in re.split(r"(?=<)|(?<=>)|(?= )", attack)]
)


@given(st.lists(PIECES | st.text("<>/!-=\"'&;#x0\n [](?svgmathstyle", max_size=8), max_size=20))
def test_nothing_made_of_their_pieces_gets_through(pieces):
    clean = sanitise("".join(pieces))
    assert is_still(clean)
    assert sanitise(clean) == clean


def test_what_lessons_show_stays_as_it_is():
    for shown in (
        message_card("Say <b>.", title="note", code="x < 1").html,
        report.mathml(r"\frac{a_i}{\sqrt{b}} \cdot 2", "inline"),
        '<img alt="a" src="data:image/png;base64,AAAA">',
        "<details><summary>a</summary>b</details>",
    ):
        clean = sanitise(shown)
        assert BeautifulSoup(clean, "html5lib").text == BeautifulSoup(shown, "html5lib").text
        assert clean.count("<") == shown.count("<")
        assert clean.count("style=") == shown.count("style=")
    assert 'src="data:image/png;base64,AAAA"' in sanitise('<img src="data:image/png;base64,AAAA">')
    assert 'href="07_more.ipynb"' in sanitise('<a href="07_more.ipynb">next</a>')


# --- parameters of a lesson: papermill writes them into a cell as code ----------------------------

ODD_TEXTS = (
    "'", '"""', "\\", "'); import os; os.system('x') #", "a\nimport os", "\u2028x", "{0}", "%s",
    "\0", "'\\'", "\\N{DASH}", "1_0", "\uff11", "\ud800", "9" * 900, "1e400", "nan", "-inf", "None",
)  # fmt: skip
KINDS = {"int": 1, "float": 1.0, "bool": True, "str": "a", "list": None}


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(ODD_TEXTS) | st.text() | st.text("{}'1.,-"))
def test_no_value_of_a_parameter_becomes_code(kind, text):
    """What papermill would write is one assignment of a literal, and it is the value again."""
    read = read_or_refused(lambda: [check_value("x", text, Parameter(kind, KINDS[kind], ()))])
    if read is None:
        return
    [value] = json.loads(json.dumps(read))  # so it goes to the process that runs papermill
    code = papermill_translators.find_translator("python3", "python").codify({"x": value})
    code.encode()
    [assigned] = ast.parse(code).body
    assert isinstance(assigned, ast.Assign)
    assert ast.unparse(assigned.targets) == "x"
    assert ast.literal_eval(assigned.value) == value


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
    outcome = SimpleNamespace(id=a, status="correct", message=b)
    here = Machine("cpu", a, None, b, {"torch": c}, True, 1, None, False)
    yield claim_card(judged, [a, c]).html
    yield machine_card(here, for_a_gpu=b).html
    yield exercise_card(outcome).html
    yield message_card(a, title=b, code=c).html
    yield grid([a or "-", "b"], [[b, c]], caption=c).html
    named = Outcome("06", a, b, "failed", (c,), 1.0)
    yield report.page(a, {"id": (b, c)}, lessons=[(named, b)])
    record = {"id": a, "verdict": "wrong", "measured": {b: 1.0}, "unit": c, "says": a}
    yield report.verdict_table([result(judgements=(record,))])


@settings(max_examples=40)
@given(st.tuples(MARKUP, MARKUP, MARKUP))
def test_other_peoples_words_are_text_on_every_card_and_table(texts):
    plain = [re.sub(r"[<>&\"'=/]", "x", text) for text in texts]
    with contextlib.redirect_stdout(io.StringIO()):
        for hostile_html, plain_html in zip(shown_by(texts), shown_by(plain), strict=True):
            assert shape(hostile_html) == shape(plain_html)


# --- models of others -----------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300,
         "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip


PICKLES = re.compile(
    r"pickle\.loads?\(|\bUnpickler\b|read_pickle|weights_only=False|(?:dcp|checkpoint)\.load\("
)


FOLDERS = ("gpumem", "phantom_gpu", "labkit", "notebooks", "benchmarks", "workshop", "site", ".ci")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_code_of_others_is_ever_asked_for(folder):
    files = [f for end in ("py", "ipynb", "j2") for f in (ROOT / folder).rglob(f"*.{end}")]
    sources = {f.name: f.read_text(encoding="utf-8") for f in files if ".ipynb_" not in str(f)}
    assert sources
    asking = [name for name, text in sources.items() if "trust_remote_code=True" in text]
    unpickling = {name for name, text in sources.items() if PICKLES.search(text)}
    assert asking == []
    expected = {
        # A launcher and its ranks write to a private folder; a script goes on after its own
        # checkpoint.
        "gpumem": {"launch.py", "rank.py", "train_sharded.py.j2"},
        # A script on a phantom GPU leaves its report in a private folder.
        "phantom_gpu": {"run_script.py"},
    }
    assert unpickling == expected.get(folder, set())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_loads_its_own_checkpoint_and_no_other_pickle(tmp_path, ranks):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    text = script.script(Recipe(batch_size=1, seq_len=8, ranks=ranks), model=str(tmp_path))
    assert len(PICKLES.findall(text)) == (1 if ranks > 1 else 0)
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
    made = ast.parse(script.script(recipe, model=str(base / name), gpu=name))
    plain = ast.parse(script.script(recipe, model=str(base / "plain"), gpu="plain"))
    assert [type(node) for node in ast.walk(made)] == [type(node) for node in ast.walk(plain)]
    texts = {node.value for node in ast.walk(made) if isinstance(node, ast.Constant)}
    assert str(base / name) in texts

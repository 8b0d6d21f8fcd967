"""The workshop kit: sums of minutes, lessons, headings and figures that exist, links, slides."""

import copy
import json
import re
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup
from nbconvert.exporters import SlidesExporter
from traitlets.config import PyFileConfigLoader

ROOT = Path(__file__).resolve().parents[2]
WORKSHOP = ROOT / "workshop"
SYLLABI = {2: "syllabus-2h.md", 4: "syllabus-4h.md", 8: "syllabus-8h.md"}
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)", re.DOTALL)
LESSON = re.compile(r"\[(\d\d)[^\]]*\]\(\.\./(notebooks/\d\d_\w+\.ipynb)\)")
QUOTED = re.compile(r'"([^"]+)"')
PAUSES = ("break", "lunch")


def rows(page, columns):
    """The cells of each row of the tables with that many columns, headers and rules left out."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [n for n, row in enumerate(cells) if set("".join(row)) <= set("-: ")]
    left_out = {*rules, *(n - 1 for n in rules)}
    return [row for n, row in enumerate(cells) if n not in left_out and len(row) == columns]


def source(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def lesson(number):
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    return path


def minutes_promised():
    """What each lesson's own title cell says it takes."""
    found = {}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
        found[path.name[:2]] = int(re.search(r"(\d+) min", "".join(first["source"]))[1])
    return found


@pytest.mark.parametrize(("hours", "name"), SYLLABI.items())
def test_a_syllabus(hours, name):
    """Minutes add up, nobody sits longer than 80, lessons get their time, headings exist."""
    page = (WORKSHOP / name).read_text(encoding="utf-8")
    promised, lessons, elapsed, sitting = minutes_promised(), [], 0, 0
    for begin, minutes, what, part in rows(page, 4):
        assert begin == f"{elapsed // 60}:{elapsed % 60:02d}", what
        elapsed += int(minutes)
        sitting = 0 if what in PAUSES else sitting + int(minutes)
        assert sitting <= 80, what
        found = LESSON.search(what)
        if found is None:
            assert not re.match(r"\[?\d", what), f"{what}: no link to the lesson"
            continue
        number, path = found.groups()
        lessons.append(number)
        if part == "all":
            assert int(minutes) >= promised[number], (number, minutes)
        text = source(ROOT / path)
        for quoted in QUOTED.findall(part):
            heading = re.search(rf"^#+ {re.escape(quoted)}$", text, re.MULTILINE)
            assert heading or f'title="{quoted}"' in text, (number, quoted)
    assert elapsed == 60 * hours
    assert len(lessons) == len(set(lessons)) >= 4
    # The cells of a part use names that skipped ones define.
    assert "Execute all cells above a part too, from the top" in " ".join(page.split())


def test_notes_on_every_lesson():
    page = (WORKSHOP / "instructor-notes.md").read_text(encoding="utf-8")
    promised = minutes_promised()
    table = rows(page, 5)
    assert [LESSON.search(row[0])[1] for row in table] == sorted(promised)
    for name, minutes, seconds, figure, together in table:
        number = LESSON.search(name)[1]
        assert int(minutes) == promised[number]
        assert 0 < int(seconds.rstrip("*")) < 60 * promised[number]
        text = source(lesson(number))
        [title] = QUOTED.findall(figure)
        assert title in text, (number, title)
        assert re.search(rf"^## {together.capitalize()}:", text, re.MULTILINE), (number, together)
    sections = re.split(r"^## (?=\d\d )", page, flags=re.MULTILINE)[1:]
    assert [section[:2] for section in sections] == sorted(promised)
    for section in sections:
        for what in ("Surprise:", "Ask:", "Stuck:", "Technically:"):
            assert section.count(f"**{what}**") == 1, (section[:2], what)


def test_notes_name_the_articles():
    page = (WORKSHOP / "instructor-notes.md").read_text(encoding="utf-8")
    claims = tomllib.loads((ROOT / "labkit" / "course" / "claims.toml").read_text(encoding="utf-8"))
    assert re.findall(r"^- ([A-Z]): (.+)$", page, re.MULTILINE) == [*claims["sources"].items()]


def test_values_for_kubernetes():
    values = yaml.safe_load((WORKSHOP / "jupyterhub-values.yaml").read_text(encoding="utf-8"))
    user = values["singleuser"]
    assert "dummy" not in json.dumps(values), "a class's values must not invite everybody"
    [default] = [profile for profile in user["profileList"] if profile.get("default")]
    assert "kubespawner_override" not in default, "the default takes nobody's GPU"
    assert (ROOT / user["defaultUrl"].removeprefix("/lab/tree/gpu-memory-lab/")).is_file()
    assert user["extraEnv"]["OMP_NUM_THREADS"] == str(user["cpu"]["limit"])


def test_a_hub_of_ones_own_is_closed_until_it_is_opened(monkeypatch, tmp_path):
    def config():
        return PyFileConfigLoader("jupyterhub_config.py", path=str(WORKSHOP)).load_config()

    for name in ("CLASS_FOLDER", "CLASS_GIB", "LABKIT_CACHE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLASS_PASSWORD", "long enough")
    found = config()
    assert found.JupyterHub.ip == "127.0.0.1"
    assert found.JupyterHub.authenticator_class == "shared-password"
    assert found.SharedPasswordAuthenticator.user_password == "long enough"
    assert (tmp_path / "class").stat().st_mode & 0o777 == 0o700
    pattern = re.compile(found.Authenticator.username_pattern)  # asked with `match`
    assert all(map(pattern.match, ("ada", "a" * 31, "ada-l_2")))
    assert not any(map(pattern.match, ("a" * 32, "ada;rm", "ada\n", "2ada", "..", "ada/..")))
    for name, value in (("CLASS_GIB", "2.5"), ("CLASS_PASSWORD", "short")):
        monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit, match=f"Set {name} to"):
            config()


def test_the_proxy_has_the_version_that_is_tested():
    page = (WORKSHOP / "jupyterhub.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [tested] = re.findall(r"^PROXY_VERSION := (\S+)$", makefile, re.MULTILINE)
    assert re.findall(r"configurable-http-proxy(\S*)", page) == [f"@{tested}"]


# --- slides -------------------------------------------------------------------------------------

PICTURE = {
    "text/html": '<img alt="A mountain" src="data:image/png;base64,AA=="><div>its table</div>'
}
UNMADE = {"text/html": "<div>Type one</div>", "text/plain": "[i no prediction made]\n"}


@pytest.fixture(scope="module")
def config():
    return PyFileConfigLoader("slides_config.py", path=str(WORKSHOP)).load_config()


@pytest.fixture(scope="module")
def start():
    """Lesson 00 with the outputs of an experiment, a plot and claims, as if it had run."""
    book = nbformat.read(lesson("00"), as_version=4)
    first_of(book, "plot").outputs = [shown(PICTURE), printed("Highest point: 12")]
    first_of(book, "experiment").outputs = [
        shown({"text/html": '<img alt="A valley" src="data:,">'}),
        printed("9.8 times the weights"),
    ]
    verdicts = [shown({"text/html": f"<div>verdict {n}</div>"}) for n in range(2)]
    claim = nbformat.v4.new_code_cell("lab.claim(x)", outputs=[*verdicts, shown(UNMADE)])
    claim.metadata["tags"] = ["claim"]
    book.cells.append(claim)
    return book


@pytest.fixture(scope="module")
def deck(config, start):
    html, _ = SlidesExporter(config=config).from_notebook_node(copy.deepcopy(start))
    return BeautifulSoup(html, "html.parser")


def first_of(book, tag):
    return next(c for c in book.cells if c.cell_type == "code" and tag in c.metadata.tags)


def shown(data):
    return nbformat.v4.new_output("display_data", data=data)


def printed(text):
    return nbformat.v4.new_output("stream", text=text)


def seen(deck):
    """The words that an audience reads, notes left out."""
    deck = copy.copy(deck)
    for aside in deck.select("aside.notes"):
        aside.decompose()
    return " ".join(deck.select_one(".slides").get_text().split())


def test_a_slide_to_the_right_for_each_heading_that_is_shown(start, deck):
    kept = [
        c.source
        for c in start.cells
        if c.cell_type == "markdown"
        and c.metadata.tags[0] not in ("setup", "explore", "exercise", "reading")
    ]
    headings = re.findall(r"^##? (.+)$", "\n".join(kept), re.MULTILINE)
    outer = deck.select(".slides > section")
    assert [section.select_one("h1, h2").get_text() for section in outer] == headings
    assert len(headings) > 5
    assert all(section.select("section") for section in outer)


def test_paragraphs_are_for_the_speaker_and_what_nobody_can_use_is_left_out(deck):
    spoken = " ".join(" ".join(aside.get_text() for aside in deck.select("aside.notes")).split())
    assert "Forward climbs. Each layer leaves activations" in spoken
    assert "Forward climbs" not in seen(deck)
    assert "optimizer state: AdamW stores two running averages" in seen(deck)
    for absent in ("Exercise 1", "pip install", "lab.explore(", "lab.result(", "lab.predict("):
        assert absent not in deck.get_text()
    assert "run = lab.run(train" in seen(deck)
    assert "From an empty GPU" not in deck.get_text(), "a figure that was not drawn"


def test_a_question_has_a_slide_of_its_own(deck):
    questions = deck.select(".slides h3")
    for heading, text, before in zip(
        questions,
        ("Peak of the first training step?", "Second peak minus first peak?"),
        (["Your first prediction"], []),
        strict=True,
    ):
        cells = heading.find_parent("section").find_all("div", "jp-Cell", recursive=False)
        texts = [cell.get_text().strip() for cell in cells]
        assert texts == [*before, text], "the answer is elsewhere"


def test_every_lesson_that_asks_for_a_number_has_its_question(config):
    """Questions are read from the code, which may be written in several ways."""
    [cut_up] = config.SlidesExporter.preprocessors
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        asked = sum(
            c.source.count("lab.predict(")
            for c in book.cells
            if c.cell_type == "code" and "predict" in c.metadata.tags
        )
        made, _ = cut_up().preprocess(book, {})
        found = [c.source for c in made.cells if re.match(r"### .+\?$", c.source)]
        assert len(found) == asked, path.name
        nbformat.validate(made)


def test_figures_and_verdicts_get_slides_without_the_code_that_made_them(start, deck):
    for picture, tag in (("A mountain", "plot"), ("A valley", "experiment")):
        slide = deck.select_one(f"img[alt='{picture}']").find_parent("section")
        assert first_of(start, tag).source.splitlines()[0] not in slide.get_text()
        assert ("Highest point: 12" in slide.get_text()) == (tag == "plot")
    assert "9.8 times the weights" in seen(deck)
    texts = [section.get_text() for section in deck.select(".slides > section > section")]
    assert [sum(f"verdict {n}" in text for text in texts) for n in range(2)] == [1, 1]
    assert not any("verdict 0" in text and "verdict 1" in text for text in texts)
    assert not any("Type one" in text for text in texts), "a prediction that nobody made"


def test_headings_in_code_are_none(config):
    text = "# a\n\nText.\n\n```\n# b\n\n- c\n```\n\n### c\nmore"
    cell = nbformat.v4.new_markdown_cell(text, metadata={"tags": ["idea"]})
    [cut_up] = config.SlidesExporter.preprocessors
    made, _ = cut_up().preprocess(nbformat.v4.new_notebook(cells=[cell]), {})
    shown = [(part.metadata["slideshow"]["slide_type"], part.source) for part in made.cells]
    assert shown == [
        ("slide", "# a\n\n```\n# b\n\n- c\n```"),
        ("notes", "# a\n\nText.\n\n```\n# b\n\n- c\n```"),
        ("subslide", "### c"),
        ("notes", "### c\nmore"),
    ]

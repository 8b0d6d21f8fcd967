"""The workshop kit: lessons and headings that exist, a hub, slides."""

import copy
import json
import re
from pathlib import Path

import nbformat
import pytest
import yaml
from bs4 import BeautifulSoup
from nbconvert.exporters import SlidesExporter
from traitlets.config import PyFileConfigLoader

ROOT = Path(__file__).resolve().parents[2]
WORKSHOP = ROOT / "workshop"
LESSON = re.compile(r"\[\d\d[^\]]*\]\(\.\./(notebooks/\d\d_\w+\.ipynb)\)")


def source(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells)


def lesson(number):
    [path] = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    return path


@pytest.mark.parametrize("page", sorted(WORKSHOP.glob("*.md")), ids=lambda page: page.stem)
def test_lessons_with_the_headings_and_figures_that_a_table_names_exist(page):
    for line in page.read_text(encoding="utf-8").splitlines():
        found = LESSON.search(line)
        if not found or not line.startswith("|"):
            continue
        for heading_or_title in re.findall(r'"([^"]+)"', line):
            assert heading_or_title in source(ROOT / found[1])


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

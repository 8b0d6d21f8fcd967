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
PAGES = sorted(WORKSHOP.glob("*.md"))
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


def prose(page):
    """A page without its code blocks."""
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


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


def anchor(heading):
    """As GitHub makes it: small letters, spaces to hyphens, no other punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_tables_are_read():
    page = "| a | b |\n|---|---|\n| 1 | 2 |\n\n| c | d | e |\n|---|---|---|\n| 3 | 4 | 5 |\n"
    assert rows(page, 2) == [["1", "2"]]
    assert rows(page, 3) == [["3", "4", "5"]]
    assert anchor("Sharing GPUs") == "sharing-gpus"


@pytest.mark.parametrize(("hours", "name"), SYLLABI.items())
def test_minutes_add_up(hours, name):
    table = rows((WORKSHOP / name).read_text(encoding="utf-8"), 4)
    elapsed = 0
    for begin, minutes, what, _ in table:
        assert begin == f"{elapsed // 60}:{elapsed % 60:02d}", what
        elapsed += int(minutes)
    assert elapsed == 60 * hours


@pytest.mark.parametrize("name", SYLLABI.values())
def test_lessons_of_a_syllabus(name):
    promised, seen = minutes_promised(), []
    for _, minutes, what, part in rows((WORKSHOP / name).read_text(encoding="utf-8"), 4):
        found = LESSON.search(what)
        if found is None:
            assert not re.match(r"\[?\d", what), f"{what}: no link to the lesson"
            continue
        number, path = found.groups()
        seen.append(number)
        assert Path(path).name.startswith(number)
        if part == "all":
            assert int(minutes) >= promised[number], (number, minutes)
    assert len(seen) == len(set(seen)) >= 4


@pytest.mark.parametrize("name", SYLLABI.values())
def test_headings_of_a_syllabus(name):
    for _, _, what, part in rows((WORKSHOP / name).read_text(encoding="utf-8"), 4):
        if found := LESSON.search(what):
            text = source(ROOT / found[2])
            for quoted in QUOTED.findall(part):
                heading = re.search(rf"^#+ {re.escape(quoted)}$", text, re.MULTILINE)
                assert heading or f'title="{quoted}"' in text, (found[1], quoted)


@pytest.mark.parametrize("name", SYLLABI.values())
def test_a_syllabus_says_to_execute_what_it_skips(name):
    """The cells of a part use names that skipped ones define."""
    text = " ".join((WORKSHOP / name).read_text(encoding="utf-8").split())
    assert "Execute all cells above a part too, from the top" in text


@pytest.mark.parametrize("name", SYLLABI.values())
def test_there_are_pauses(name):
    """Nobody sits for longer than 80 minutes."""
    since = 0
    for _, minutes, what, _ in rows((WORKSHOP / name).read_text(encoding="utf-8"), 4):
        since = 0 if what in PAUSES else since + int(minutes)
        assert since <= 80, what


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
    claims = tomllib.loads((ROOT / "labkit" / "claims.toml").read_text(encoding="utf-8"))
    assert re.findall(r"^- ([A-Z]): (.+)$", page, re.MULTILINE) == [*claims["sources"].items()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for text, target in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        name, _, place = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_relative_to(ROOT), target
        assert path.exists(), (text, target)
        if place:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert place in map(anchor, headings), target


def test_every_file_is_named_in_the_readme():
    text = (WORKSHOP / "README.md").read_text(encoding="utf-8")
    there = {path.name for path in WORKSHOP.iterdir() if path.is_file()} - {"README.md"}
    assert there == {target for _, target in LINK.findall(text) if "/" not in target and
                     "#" not in target}  # fmt: skip


def test_values_for_kubernetes():
    values = yaml.safe_load((WORKSHOP / "jupyterhub-values.yaml").read_text(encoding="utf-8"))
    user, page = values["singleuser"], (WORKSHOP / "jupyterhub.md").read_text(encoding="utf-8")
    assert isinstance(user["image"]["tag"], str)
    assert user["image"]["tag"] != "latest"
    assert user["cpu"]["guarantee"] <= user["cpu"]["limit"]
    size = {key: int(value.removesuffix("G")) for key, value in user["memory"].items()}
    assert size["guarantee"] <= size["limit"]
    assert "dummy" not in json.dumps(values), "a class's values must not invite everybody"
    profiles = user["profileList"]
    assert [profile.get("default", False) for profile in profiles].count(True) == 1
    default = next(profile for profile in profiles if profile.get("default"))
    assert "kubespawner_override" not in default, "the default takes nobody's GPU"
    for profile in profiles:
        given = profile.get("kubespawner_override", {})
        assert set(given) <= {"mem_guarantee", "mem_limit", "extra_resource_limits"}
        for resource, amount in given.get("extra_resource_limits", {}).items():
            assert re.fullmatch(r"nvidia\.com/(gpu|gpu\.shared|mig-\dg\.\d+gb)", resource)
            assert amount == "1"
    notebook = user["defaultUrl"].removeprefix("/lab/tree/gpu-memory-lab/")
    assert (ROOT / notebook).is_file()
    command = user["lifecycleHooks"]["postStart"]["exec"]["command"]
    assert command[:2] == ["sh", "-c"]
    assert command[2].endswith("gpu-memory-lab || true")
    assert user["extraEnv"]["LABKIT_CACHE"] in page
    assert user["extraEnv"]["OMP_NUM_THREADS"] == str(user["cpu"]["limit"])
    [volume], [mount] = (user["storage"][k].values() for k in ("extraVolumes", "extraVolumeMounts"))
    assert volume["name"] == mount["name"]


@pytest.fixture
def hub_config(monkeypatch, tmp_path):
    """The configuration of a hub of one's own, with nothing but a password set."""
    for name in ("CLASS_FOLDER", "CLASS_GIB", "LABKIT_CACHE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLASS_PASSWORD", "long enough")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "class").mkdir(mode=0o755)
    return lambda: PyFileConfigLoader("jupyterhub_config.py", path=str(WORKSHOP)).load_config()


def test_a_hub_of_ones_own_is_closed_until_it_is_opened(hub_config, monkeypatch, tmp_path):
    config = hub_config()
    assert config.JupyterHub.ip == "127.0.0.1"
    assert config.JupyterHub.authenticator_class == "shared-password"
    assert config.SharedPasswordAuthenticator.user_password == "long enough"
    assert "admin_password" not in config.SharedPasswordAuthenticator
    assert (tmp_path / "class").stat().st_mode & 0o777 == 0o700
    for password in ("", "short"):
        monkeypatch.setenv("CLASS_PASSWORD", password)
        with pytest.raises(SystemExit, match="Set CLASS_PASSWORD"):
            hub_config()


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("ada", True),
        ("a" * 31, True),
        ("ada-l_2", True),
        ("a" * 32, False),
        ("ada lovelace", False),
        ("ada;rm", False),
        ("ada\n", False),
        ("2ada", False),
        ("..", False),
        ("ada/..", False),
    ],
)
def test_names_on_a_hub_of_ones_own(hub_config, name, accepted):
    """JupyterHub asks its pattern with `match`, which does not look at the end."""
    pattern = hub_config().Authenticator.username_pattern
    assert bool(re.compile(pattern).match(name)) == accepted


@pytest.mark.parametrize("gib", ["2.5", "0", "-1", "eight", "8G"])
def test_a_limit_that_is_no_whole_number_is_refused_in_a_sentence(hub_config, monkeypatch, gib):
    monkeypatch.setenv("CLASS_GIB", gib)
    with pytest.raises(SystemExit, match=f"Set CLASS_GIB to a whole number of GiB.*'{gib}'"):
        hub_config()


def test_the_proxy_has_the_version_that_is_tested():
    page = (WORKSHOP / "jupyterhub.md").read_text(encoding="utf-8")
    tested = re.search(r"^PROXY_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[
        1
    ]
    assert re.findall(r"configurable-http-proxy(\S*)", page) == [f"@{tested}"]


def test_the_page_says_what_a_hub_of_ones_own_sets(hub_config):
    config, page = hub_config(), (WORKSHOP / "jupyterhub.md").read_text(encoding="utf-8")
    table = {row[0]: row[1:] for row in rows(page, 3)}
    assert config.JupyterHub.active_server_limit == 40
    assert "[forty servers]" in table["who"][1]
    gib = int(re.match(r"(\d+) GiB for each process", table["memory"][0])[1])
    assert config.Spawner.cmd[:2] == ["prlimit", f"--data={gib << 30}"]
    assert config.Spawner.environment["OMP_NUM_THREADS"] == "2"
    assert table["threads"][0].startswith("two ")
    assert config.Spawner.environment["LABKIT_CACHE"].endswith("/class/labkit-cache")
    assert "class/labkit-cache" in table["model"][0]
    for name in ("CLASS_PASSWORD", "CLASS_GIB", "jupyterhub -f workshop/jupyterhub_config.py"):
        assert name in page


def test_one_address():
    """Links for the hub, its values and the notebooks' setup cells name one repository."""
    setup = re.search(r"git\+(https://github\.com/[\w.-]+/[\w.-]+?)(?:\.git)?[\"']",
                      source(lesson("00")).replace('\\"', '"'))[1]  # fmt: skip
    quoted = setup.replace(":", "%3A").replace("/", "%2F")
    page = (WORKSHOP / "jupyterhub.md").read_text(encoding="utf-8")
    assert setup in page
    assert f"?repo={quoted}\n" in page
    assert f"gitpuller {setup} main" in (WORKSHOP / "jupyterhub-values.yaml").read_text()
    assert f"git clone {setup} " in (WORKSHOP / "README.md").read_text(encoding="utf-8")


# --- slides -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config():
    return PyFileConfigLoader("slides_config.py", path=str(WORKSHOP)).load_config()


@pytest.fixture(scope="module")
def start():
    return nbformat.read(lesson("00"), as_version=4)


@pytest.fixture(scope="module")
def deck(config, start):
    return slides(config, start)


def slides(config, notebook):
    html, _ = SlidesExporter(config=config).from_notebook_node(notebook)
    return BeautifulSoup(html, "html.parser")


def spoken(deck):
    return " ".join(" ".join(aside.get_text() for aside in deck.select("aside.notes")).split())


def seen(deck):
    """The words that an audience reads, notes left out."""
    deck = copy.copy(deck)
    for aside in deck.select("aside.notes"):
        aside.decompose()
    return " ".join(deck.select_one(".slides").get_text().split())


def cell_of(notebook, tag, number=0):
    cells = [c for c in notebook.cells if c.cell_type == "code" and tag in c.metadata.tags]
    return cells[number]


def executed(start, tag, *outputs):
    """The notebook with outputs in the first cell of a tag; and that cell."""
    ran = nbformat.from_dict(json.loads(json.dumps(start)))
    cell = cell_of(ran, tag)
    cell.outputs = [
        nbformat.v4.new_output("stream", text=output) if isinstance(output, str) else
        nbformat.v4.new_output("display_data", data=output) for output in outputs
    ]  # fmt: skip
    return ran, cell


PICTURE = {
    "text/html": '<img alt="A mountain" src="data:image/png;base64,AA=="><div>its table</div>'
}


def test_a_slide_to_the_right_for_each_heading_that_is_shown(start, deck):
    kept = [c.source for c in start.cells if c.cell_type == "markdown"
            and c.metadata.tags[0] not in ("setup", "explore", "exercise", "reading")]  # fmt: skip
    headings = re.findall(r"^##? (.+)$", "\n".join(kept), re.MULTILINE)
    outer = deck.select(".slides > section")
    assert [section.select_one("h1, h2").get_text() for section in outer] == headings
    assert len(headings) > 5
    assert all(section.select("section") for section in outer)


def test_paragraphs_are_for_the_speaker(deck):
    assert "Forward climbs. Each layer computes something" in spoken(deck)
    assert "Forward climbs" not in seen(deck)
    assert "Somebody tells you that a model" in spoken(deck)
    assert "After this lesson you can read the heartbeat" in seen(deck)
    assert "optimizer state: AdamW remembers two running averages" in seen(deck)


def test_what_slides_leave_out(deck):
    for absent in ("Exercise 1", "pip install", "lab.explore(", "lab.result(", "lab.predict("):
        assert absent not in deck.get_text()
    assert "one_step = lab.run(train" in seen(deck)
    assert "two_steps = lab.run(train" not in deck.get_text(), "a figure that was not drawn"


def test_a_question_has_a_slide_of_its_own(deck):
    questions = [heading.get_text() for heading in deck.select(".slides h3")]
    assert questions == ["Peak of the first training step?", "Second peak minus first peak?"]
    for heading, before in zip(
        deck.select(".slides h3"), ("Your first prediction", ""), strict=True
    ):
        cells = heading.find_parent("section").find_all("div", "jp-Cell", recursive=False)
        texts = [cell.get_text().strip() for cell in cells]
        assert texts == [*filter(None, [before]), heading.get_text()], "the answer is elsewhere"


def test_every_lesson_that_asks_for_a_number_has_its_question(config):
    """Questions are read from the code, which may be written in several ways."""
    [cut_up] = config.SlidesExporter.preprocessors
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        asked = sum(c.source.count("lab.predict(") for c in book.cells
                    if c.cell_type == "code" and "predict" in c.metadata.tags)  # fmt: skip
        made, _ = cut_up().preprocess(book, {})
        found = [c.source for c in made.cells if re.match(r"### .+\?$", c.source)]
        assert len(found) == asked, path.name
        nbformat.validate(made)


def test_figures_stay_and_their_code_goes(config, start):
    ran, plot = executed(start, "plot", PICTURE, "Highest point: 12")
    deck = slides(config, ran)
    slide = deck.select_one("img[alt='A mountain']").find_parent("section")
    assert "Highest point: 12" in slide.get_text()
    assert plot.source.splitlines()[0] not in deck.get_text()


def test_a_figure_of_a_cell_with_code_gets_a_slide_of_its_own(config, start):
    ran, cell = executed(start, "experiment", PICTURE, "9.8 times the weights")
    deck = slides(config, ran)
    figure = deck.select_one("img[alt='A mountain']").find_parent("section")
    assert cell.source.splitlines()[0] not in figure.get_text()
    assert "9.8 times" not in figure.get_text()
    assert "9.8 times the weights" in seen(deck)


def test_each_verdict_has_a_slide_and_an_unmade_prediction_none(config, start):
    book = nbformat.from_dict(json.loads(json.dumps(start)))
    cards = [nbformat.v4.new_output("display_data", data={"text/html": f"<div>verdict {n}</div>"})
             for n in range(2)]  # fmt: skip
    unmade = {"text/html": "<div>Type one</div>", "text/plain": "[i no prediction made]\n"}
    cards.append(nbformat.v4.new_output("display_data", data=unmade))
    claim = nbformat.v4.new_code_cell("lab.claim(x)", outputs=cards, metadata={"tags": ["claim"]})
    book.cells.append(claim)
    texts = [s.get_text() for s in slides(config, book).select(".slides > section > section")]
    assert [sum(f"verdict {n}" in text for text in texts) for n in range(2)] == [1, 1]
    assert not any("verdict 0" in text and "verdict 1" in text for text in texts)
    assert not any("Type one" in text for text in texts)


def test_a_deck_asks_nobody_for_anything(config, start):
    """Scripts and styles lie beside it; pictures and formulas are in it; badges are left out."""
    book = nbformat.from_dict(json.loads(json.dumps(start)))
    badge = "[![Open in Colab](https://example.org/badge.svg)](https://example.org)"
    book.cells[0].source += f"\n\n{badge}\n"
    book.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    deck = slides(config, book)
    for tag in deck.select("script[src], link[href], img[src], iframe, source"):
        address = tag.get("src") or tag.get("href")
        assert address.startswith(("reveal.js/", "data:")), tag
    assert not re.search(r"@import|url\(\s*['\"]?http|\bimport\b.*from", str(deck.select("style")))
    assert not [s for s in deck.select("script:not([src])") if "http" in s.get_text()]
    assert len(deck.select(".slides math")) > 3
    assert "$" not in seen(deck)


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
    nbformat.validate(made)
    assert cell.source == text, "the notebook itself stays"


@pytest.mark.parametrize(
    ("before", "leads"),
    [
        ("Much is said. Two things are special:", "Two things are special:"),
        ("Somebody says so. After this you can", "After this you can"),
        ("All of it was said.", None),
        ("A question?", None),
    ],
)
def test_the_line_that_leads_to_a_list_stays_with_it(config, before, leads):
    [cut_up] = config.SlidesExporter.preprocessors
    cell = nbformat.v4.new_markdown_cell(f"{before}\n\n- a\n- b", metadata={"tags": ["idea"]})
    made, _ = cut_up().preprocess(nbformat.v4.new_notebook(cells=[cell]), {})
    assert made.cells[0].source == (f"{leads}\n\n- a\n- b" if leads else "- a\n- b")

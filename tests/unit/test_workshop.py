"""The workshop kit: sums of minutes, lessons, headings and figures that exist, links, slides."""

import json
import re
from pathlib import Path

import nbformat
import pytest
import yaml
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
        assert (int(minutes) == promised[number]) == (part == "all"), (number, minutes, part)
        assert int(minutes) <= promised[number]
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
def test_there_are_pauses(name):
    """Nobody sits for longer than 100 minutes."""
    since = 0
    for _, minutes, what, _ in rows((WORKSHOP / name).read_text(encoding="utf-8"), 4):
        since = 0 if what in PAUSES else since + int(minutes)
        assert since <= 100, what


def test_notes_on_every_lesson():
    page = (WORKSHOP / "instructor-notes.md").read_text(encoding="utf-8")
    promised = minutes_promised()
    table = rows(page, 4)
    assert [LESSON.search(row[0])[1] for row in table] == sorted(promised)
    for name, minutes, figure, together in table:
        number = LESSON.search(name)[1]
        assert int(minutes) == promised[number]
        text = source(lesson(number))
        [title] = QUOTED.findall(figure)
        assert title in text, (number, title)
        assert re.search(rf"^## {together.capitalize()}:", text, re.MULTILINE), (number, together)
    sections = re.split(r"^## (?=\d\d )", page, flags=re.MULTILINE)[1:]
    assert [section[:2] for section in sections] == sorted(promised)
    for section in sections:
        for what in ("Surprise:", "Ask:", "Stuck:", "Technically:"):
            assert section.count(f"**{what}**") == 1, (section[:2], what)


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
    return html


def test_a_slide_for_each_heading(start, deck):
    kept = [c.source for c in start.cells if c.cell_type == "markdown"
            and c.metadata.tags[0] not in ("setup", "explore", "exercise")]  # fmt: skip
    headings = re.findall(r"^##? .+$", "\n".join(kept), re.MULTILINE)
    outer = re.findall(r"<section\s*>\s*<section\s*>", deck)
    assert len(outer) == len(headings) > 5
    assert deck.count("<section") == deck.count("</section>")


def test_what_slides_leave_out(start, deck):
    for present in ("The idea: four tenants", "Reading the heartbeat", "The heartbeat."):
        assert present in deck
    for absent in ("Exercise 1", "pip install", "lab.explore(", "lab.result("):
        assert absent not in deck
    plot = next(cell for cell in start.cells if "plot" in cell.metadata.tags)
    assert f"cell-id={plot.id}" not in deck, "a figure that was not drawn has no slide"
    experiment = next(cell for cell in start.cells if "experiment" in cell.metadata.tags)
    assert f"cell-id={experiment.id}" in deck


def test_figures_stay_and_their_code_goes(config, start):
    ran = nbformat.from_dict(json.loads(json.dumps(start)))
    plot = next(cell for cell in ran.cells if "plot" in cell.metadata.tags)
    plot.outputs = [nbformat.v4.new_output("stream", text="the figure's table")]
    html = slides(config, ran)
    assert "the figure&#39;s table" in html or "the figure's table" in html
    assert "guess_more.outcome" not in re.sub(r"<[^>]+>", "", html)


def test_headings_in_code_are_none(config):
    text = "# a\n\ntext\n\n```\n# b\n```\n\n### c\nmore"
    cell = nbformat.v4.new_markdown_cell(text, metadata={"tags": ["reading"]})
    [cut_up] = config.SlidesExporter.preprocessors
    made, _ = cut_up().preprocess(nbformat.v4.new_notebook(cells=[cell]), {})
    assert [part.source for part in made.cells] == ["# a\n\ntext\n\n```\n# b\n```", "### c\nmore"]
    kinds = [part.metadata["slideshow"]["slide_type"] for part in made.cells]
    assert kinds == ["slide", "subslide"]
    nbformat.validate(made)
    assert cell.source == text, "the notebook itself stays"

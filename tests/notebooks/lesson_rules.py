"""How a lesson is built: one function per rule, each yielding the problems it finds.

The rules are those of CONTRIBUTING.md: tags and their order, headings, length, parameters, setup,
exercises, claims. Badges and setup cell follow from the repository's address, word for word.
Limits: code is read, not executed. Headings are found by their `#`, outside fenced code.
"""

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbformat import NotebookNode

from labkit.course.lessons import declared_parameters

TAGS = (
    *("title", "promise", "setup", "parameters", "idea", "baseline", "predict", "experiment"),
    *("plot", "reading", "claim", "explore", "exercise", "takeaway", "result"),
)
# A lesson may ask, try and read more than once before it judges its claims.
REPEATED = ("predict", "experiment", "plot", "reading")
# A capstone teaches nothing new: it sets a job.
NOT_IN_CAPSTONES = ("predict", "plot", "reading", "claim", "explore")
PARAMETERS = ("batch_size", "precision", "gpu", "size", "steps", "seed")

CELLS, CAPSTONE_CELLS = (20, 30), (12, 20)
MARKDOWN_SHARE = (0.40, 0.65)
CODE_LINES = 25
EXERCISES, CAPSTONE_EXERCISES = (2, 3), (1, 1)

# Both pictures stand at addresses that the two services give for this use. Where nothing may be
# fetched, the words in their place are the link.
BADGES = """\
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{repository}/blob/main/notebooks/{name})
[![Launch on Binder](https://mybinder.org/badge_logo.svg)]\
(https://mybinder.org/v2/gh/{repository}/main?urlpath=lab%2Ftree%2Fnotebooks%2F{name})"""
# pip keeps what the running kernel has loaded or what is built for its GPU as it is, or stops.
SETUP = """\
# Where labkit is missing, as on Colab, this installs it; PyTorch and the others named here stay as
# they are, and no restart is needed. Where it is installed, on your machine, this changes nothing.
import importlib.util

if importlib.util.find_spec("labkit") is None:
    stays = "torch|torchvision|torchaudio|numpy|pandas|ipython|ipykernel|ipywidgets"
    %pip list --format=freeze | grep -E "^({{stays}})==" > stays.txt
    %pip install -q -c stays.txt "gpu-memory-lab @ git+https://github.com/{repository}"

import torch

import labkit as lab

here = lab.start("{number}")"""

FIGURE_WITH_UNIT = re.compile(r"\d[\d.,]*\s*(?:[KMGT]i?B|bytes)\b")
MINUTES = re.compile(r"\d+\s*min")


@dataclass(frozen=True)
class Problem:
    """One rule that one notebook breaks; `cell` is the cell's id, or empty for the whole file."""

    path: Path
    rule: str
    message: str
    cell: str = ""

    def __str__(self) -> str:
        where = f" [{self.cell}]" if self.cell else ""
        return f"{self.path}{where} {self.rule}: {self.message}"


@dataclass(frozen=True, eq=False)
class Lesson:
    """A parsed notebook. `number` is the two digits its file name begins with."""

    path: Path
    notebook: NotebookNode

    @property
    def number(self) -> str:
        return self.path.name[:2]

    @property
    def is_capstone(self) -> bool:
        return bool(self.notebook.metadata.get("capstone"))

    @property
    def cells(self) -> list[NotebookNode]:
        return self.notebook.cells

    def tagged(self, tag: str, kind: str | None = None) -> list[NotebookNode]:
        """The cells with this tag, of one kind ("code", "markdown") or of both."""
        return [cell for cell in self.cells if tag in tags(cell) and kind in (None, cell.cell_type)]

    def problem(self, rule: str, message: str, cell: NotebookNode | None = None) -> Problem:
        return Problem(self.path, rule, message, cell.get("id", "") if cell else "")


def tags(cell: NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", ()))


def calls(cells: Sequence[NotebookNode], name: str) -> list[str | None]:
    """First argument of each call of `lab.<name>` in code cells; None where it is no plain text."""
    found: list[str | None] = []
    trees = [ast.parse(cell.source) for cell in cells if cell.cell_type == "code"]
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"lab.{name}":
            first = node.args[0] if node.args else None
            constant = isinstance(first, ast.Constant) and isinstance(first.value, str)
            found.append(first.value if constant else None)
    return found


def headings(cell: NotebookNode) -> list[tuple[int, str]]:
    """Level and text of each heading in a Markdown cell, fenced code left out."""
    if cell.cell_type != "markdown":
        return []
    prose = re.sub(r"^(```|~~~).*?^\1", "", cell.source, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^(#{1,6})\s+(.+?)\s*$", prose, flags=re.MULTILINE)
    return [(len(marks), text) for marks, text in found]


def check_ids(lesson: Lesson) -> Iterator[Problem]:
    pattern = re.compile(rf"{lesson.number}-[a-z0-9]+(-[a-z0-9]+)*")
    seen = set()
    for place, cell in enumerate(lesson.cells, start=1):
        name = cell.get("id", "")
        if not pattern.fullmatch(name):
            message = f"cell {place} has id {name!r}; a name like {lesson.number}-setup is needed"
            yield lesson.problem("ids", message)
        if name in seen:
            yield lesson.problem("ids", f"cell {place} has the id of another cell", cell)
        seen.add(name)


def check_tags(lesson: Lesson) -> Iterator[Problem]:
    for cell in lesson.cells:
        if len(tags(cell)) != 1 or tags(cell)[0] not in TAGS:
            message = f"tags {tags(cell)}; exactly one is needed, of: {', '.join(TAGS)}"
            yield lesson.problem("tags", message, cell)
    for tag in TAGS:
        if not lesson.tagged(tag) and not (lesson.is_capstone and tag in NOT_IN_CAPSTONES):
            yield lesson.problem("tags", f"no cell is tagged {tag}")


def check_order(lesson: Lesson) -> Iterator[Problem]:
    known = [cell for cell in lesson.cells if tags(cell) and tags(cell)[0] in TAGS]
    furthest = 0
    for cell in known:
        tag = tags(cell)[0]
        rank = TAGS.index(tag)
        again = tag in REPEATED and TAGS[furthest] in REPEATED
        if rank < furthest and not again:
            yield lesson.problem("order", f"{tag} stands after {TAGS[furthest]}", cell)
        furthest = max(furthest, rank)
    if known and tags(lesson.cells[0]) != ["title"]:
        yield lesson.problem("order", "the first cell is not tagged title", lesson.cells[0])
    if known and tags(lesson.cells[-1]) != ["result"]:
        yield lesson.problem("order", "the last cell is not tagged result", lesson.cells[-1])


def check_size(lesson: Lesson) -> Iterator[Problem]:
    count = len(lesson.cells)
    fewest, most = CAPSTONE_CELLS if lesson.is_capstone else CELLS
    if not fewest <= count <= most:
        yield lesson.problem("size", f"{count} cells; {fewest} to {most} are wanted")
    prose = sum(cell.cell_type == "markdown" for cell in lesson.cells)
    low, high = MARKDOWN_SHARE
    if count and not low <= prose / count <= high:
        message = f"{prose} of {count} cells are Markdown; {low:.0%} to {high:.0%} are wanted"
        yield lesson.problem("size", message)
    for cell in lesson.cells:
        lines = sum(bool(line.strip()) for line in cell.source.splitlines())
        if not lines:
            yield lesson.problem("size", "is empty", cell)
        signatures = re.findall(r"^def \w+\(\n(.*?)^\)", cell.source, re.DOTALL | re.MULTILINE)
        lines -= sum(text.count("\n") for text in signatures)  # a parameter a line reads easily
        if cell.cell_type == "code" and lines > CODE_LINES and tags(cell) != ["setup"]:
            yield lesson.problem("size", f"{lines} lines of code; at most {CODE_LINES}", cell)


def check_headings(lesson: Lesson) -> Iterator[Problem]:
    level = 0
    titles = []
    for cell in lesson.cells:
        for depth, text in headings(cell):
            if depth > level + 1:
                message = f"{text!r} is a heading of level {depth} after one of level {level}"
                yield lesson.problem("headings", message, cell)
            level = depth
            if depth == 1:
                titles.append((cell, text))
    if len(titles) != 1:
        yield lesson.problem("headings", f"{len(titles)} headings of level 1; exactly one")
    for cell, text in titles[:1]:
        if "title" not in tags(cell):
            yield lesson.problem("headings", "the level-1 heading is not in the title cell", cell)
        if not text.endswith("?"):
            yield lesson.problem("headings", f"the title {text!r} is no question", cell)
        if not MINUTES.search(cell.source):
            yield lesson.problem("headings", "the title does not say how many minutes", cell)


def check_parameters(lesson: Lesson) -> Iterator[Problem]:
    cells = lesson.tagged("parameters")
    if len(cells) != 1 or cells[0].cell_type != "code":
        # papermill puts its values after the first cell with the tag, whatever its kind
        message = f"{len(cells)} cells are tagged parameters; one code cell and no other may be"
        yield lesson.problem("parameters", message)
        return
    names = declared_parameters(lesson.notebook)
    if sorted(names) != sorted(PARAMETERS):
        message = (
            f"declares {', '.join(names)}; exactly {', '.join(PARAMETERS)} are needed, "
            "as literals with a type: `steps: int = 3`"
        )
        yield lesson.problem("parameters", message, cells[0])


def check_address(lesson: Lesson, repository: str) -> Iterator[Problem]:
    """Badges and setup cell as the repository's address, owner/name, gives them."""
    wanted = BADGES.format(name=lesson.path.name, repository=repository)
    for cell in lesson.tagged("title")[:1]:
        if f"\n\n{wanted}\n\n" not in cell.source or cell.source.count("[![") != 2:
            yield lesson.problem("badges", f"below the heading must stand:\n{wanted}", cell)
    cells = lesson.tagged("setup", "code")
    if len(cells) != 1:
        yield lesson.problem("setup", f"{len(cells)} code cells are tagged setup; exactly one")
    elif cells[0].source != SETUP.format(number=lesson.number, repository=repository):
        yield lesson.problem("setup", "is not the setup cell of every lesson", cells[0])


def check_exercises(lesson: Lesson) -> Iterator[Problem]:
    sections: list[list[NotebookNode]] = []
    for cell in lesson.tagged("exercise"):
        if headings(cell) or not sections:
            sections.append([])
        sections[-1].append(cell)
    found: list[str | None] = []
    for section in sections:
        ids = calls(section, "exercise")
        found += ids
        if len(ids) != 1:
            message = f"calls lab.exercise {len(ids)} times; each exercise has its own heading"
            yield lesson.problem("exercises", message, section[0])
        if not any(".check(" in cell.source for cell in section if cell.cell_type == "code"):
            yield lesson.problem("exercises", "no code cell calls .check(...)", section[0])
    fewest, most = CAPSTONE_EXERCISES if lesson.is_capstone else EXERCISES
    if not fewest <= len(sections) <= most:
        message = f"{len(sections)} exercises; {fewest} to {most} are wanted"
        yield lesson.problem("exercises", message)
    wanted = [f"{lesson.number}-{place}" for place in range(1, len(found) + 1)]
    if found != wanted:
        yield lesson.problem("exercises", f"ids {found}; {wanted} are wanted")


def check_claims(lesson: Lesson, claims: dict) -> Iterator[Problem]:
    called = {name for name in calls(lesson.tagged("claim", "code"), "claim") if name is not None}
    own = {name for name, entry in claims.items() if entry["lesson"] == lesson.number}
    if own and not called:
        yield lesson.problem("claims", 'no code cell tagged claim calls lab.claim("...", ...)')
    for name in called - own:
        yield lesson.problem("claims", f"{name!r} is no claim of this lesson in claims.toml")


def check_reading(lesson: Lesson) -> Iterator[Problem]:
    for cell in lesson.tagged("reading", "markdown"):
        for figure in FIGURE_WITH_UNIT.findall(cell.source):
            message = f"{figure!r} holds on one machine only; say it in words, or print it"
            yield lesson.problem("reading", message, cell)


RULES = (
    check_ids,
    check_tags,
    check_order,
    check_size,
    check_headings,
    check_parameters,
    check_exercises,
    check_reading,
)

"""The pages of the site: executed lessons, the repository's own Markdown, and tables made here.

Files keep their places in the repository, so that the links between them hold as they are. The home
page is the README. Three pages are written here: the verdicts and the recorded GPUs, from the
functions that fill the report and the cheat sheet, and the public names, from their docstrings.

Limits: a lesson that the run has not executed, or that failed, has no page: links to it lead to the
repository. A notebook of one's own in the run has none either. Lessons are shown in the order of
their numbers.
"""

import posixpath
import re
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import api_page
import nbformat

from gpumem.figures import html_pages
from gpumem.inputs import InputError
from labkit.course import report
from labkit.course.outcomes import Outcome, read_outcomes, stored_result
from labkit.lesson import results
from labkit.lesson.notebooks import read_notebook
from labkit.lesson.results import Result
from labkit.recording import accuracy
from labkit.trial import gather, verdict_table

ROOT = Path(__file__).resolve().parent.parent
#: Where executed lessons lie among the pages.
LESSONS = "notebooks/"
#: What a page can show without running anything.
SHOWN = (
    "text/html",
    "image/png",
    "image/jpeg",
    "image/svg+xml",
    "text/markdown",
    "text/latex",
    "text/plain",
)
DOWNLOADS = "downloads"
PUBLIC_NAMES = "docs/API"
#: Each has a README of its own.
PACKAGES = ("gpumem", "phantom_gpu", "labkit")
NOT_YET = "No GPU has recorded yet: yours can be the first."
#: Packages that decide a figure.
DECISIVE = ("driver", "cuda", "torch", "transformers", "bitsandbytes")
_LANGUAGE = {"name": "python", "pygments_lexer": "ipython3"}
#: For the theme: no list of headings beside this page, whose tables need the room.
_WIDE = "---\nhide-toc: true\n---\n\n"


class Chapter(NamedTuple):
    """A part of the sidebar: its heading and its pages, as (title or "", name) pairs."""

    heading: str
    pages: tuple[tuple[str, str], ...]


def repository() -> str:
    """The repository's address, from ``pyproject.toml``."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["urls"]["Repository"].removesuffix("/")


def write_pages(course: Path, folder: Path) -> list[str]:
    """Write what Sphinx renders into ``folder``.

    Args:
        course: the folder of a `labkit run`.
        folder: a new one, or an empty one.

    Returns:
        The lessons that have a page.

    Raises:
        InputError: ``course`` holds no lesson that passed, or something damaged.
        OSError: ``folder`` cannot be written.
    """
    lessons = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    outcomes = [o for o in read_outcomes(course) if o.passed and o.name in lessons]
    if not outcomes:
        raise InputError(f"no lesson in {course} has passed: `labkit run --out {course}`")
    names = _lesson_names()
    for outcome in outcomes:
        _write_lesson(outcome, names.get(outcome.name, ""), course, folder)
    texts = _texts()
    for name in texts:
        _write_markdown(name, folder)
    for picture in (*ROOT.glob("docs/*.svg"), *ROOT.glob("docs/*.png")):
        _copy(picture, folder / "docs" / picture.name)
    found = [result for outcome in outcomes if (result := stored_result(outcome, course))]
    _write(folder / "verdicts.md", _verdicts(found))
    _write_results(folder)
    _write(folder / f"{PUBLIC_NAMES}.md", api_page.page())
    _write(folder / "index.md", _home(_chapters(outcomes, texts), texts))
    return [outcome.name for outcome in outcomes]


def _texts() -> list[str]:
    """The repository's Markdown files that are pages, by path."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("workshop/*.md")]
    names = [path.relative_to(ROOT).as_posix() for path in sorted(files)]
    others = [f"{folder}/README.md" for folder in ("results", *PACKAGES)]
    return [name for name in names if name != "README.md"] + others


def _chapters(outcomes: Sequence[Outcome], texts: Iterable[str]) -> list[Chapter]:
    names = _lesson_names()
    lessons = [
        (f"{o.number} {names.get(o.name, o.title)}".strip(), LESSONS + o.name) for o in outcomes
    ]
    stems = [name.removesuffix(".md") for name in texts]
    docs = [("", stem) for stem in stems if stem.startswith("docs/") and stem != "docs/LOG"]
    workshop = [("", stem) for stem in stems if stem.startswith("workshop/")]
    workshop.sort(key=lambda page: page[1] != "workshop/README")
    rest = [("", stem) for stem in stems if "/" not in stem]
    packages = [("", f"{package}/README") for package in PACKAGES]
    return [
        Chapter("Lessons", tuple(lessons)),
        Chapter("Findings", (("", "verdicts"), ("", "results/README"))),
        Chapter("Guides", tuple(docs)),
        Chapter("Packages", (*packages, ("", PUBLIC_NAMES))),
        Chapter("Teaching", tuple(workshop)),
        Chapter("The project", (*rest, ("", "docs/LOG"))),
    ]


def _lesson_names() -> dict[str, str]:
    """What the README's table calls each lesson, by the name of its file."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return {
        name: words for words, name in re.findall(r"\[([^\]]+)\]\(notebooks/(\w+)\.ipynb", text)
    }


# --- lessons --------------------------------------------------------------------------------------


def _write_lesson(outcome: Outcome, name: str, course: Path, folder: Path) -> None:
    notebook = read_notebook(course / outcome.notebook)
    report.show_widget_outputs(notebook)
    notebook.metadata = nbformat.from_dict({"language_info": _LANGUAGE})
    # Sidebar and search name a lesson by its technique; its own title is a question.
    title = notebook.cells[0]
    title.source = title.source.replace("# ", f"# {outcome.number} {name}: ", 1)
    for cell in notebook.cells:
        _keep_what_is_shown(cell)
        if cell.cell_type == "markdown":
            cell.source = _to_home(cell.source, f"{LESSONS}{outcome.name}.ipynb")
    source = ROOT / "notebooks" / f"{outcome.name}.ipynb"
    about = nbformat.v4.new_markdown_cell(_about(outcome, stored_result(outcome, course)))
    notebook.cells.insert(1, about)
    _copy(source, folder / DOWNLOADS / source.name)
    path = folder / LESSONS / source.name
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


def _keep_what_is_shown(cell: Any) -> None:
    for output in cell.get("outputs", []):
        if "data" in output:
            output["data"] = {k: value for k, value in output["data"].items() if k in SHOWN}
    if cell.get("outputs"):
        cell.outputs = [o for o in cell.outputs if o.get("data", {"other": "kinds"})]


def _about(outcome: Outcome, result: Result | None) -> str:
    """Where the notebook is, and on what it was executed."""
    name = f"{outcome.name}.ipynb"
    lines = [
        f"[Download this notebook](path:../{DOWNLOADS}/{name}) · "
        f"[Notebook in the repository]({repository()}/blob/main/notebooks/{name})"
    ]
    if result is not None:
        where = _plain(f"{result.where}, {results.versions_text(result.machine)}")
        lines.append(f"Executed {result.date[:10]} on {where}.")
    return "  \n".join(lines)


def _plain(text: str) -> str:
    """``text`` without what Markdown or HTML would read as more than words."""
    return re.sub(r"([\\`*_{}\[\]<>()#!|~$&:])", r"\\\1", text)


# --- Markdown of the repository -------------------------------------------------------------------


def _write_markdown(name: str, folder: Path) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    _write(folder / name, _to_home(text, name))


def _to_home(text: str, name: str) -> str:
    """``text`` of the file ``name``, its links to the README leading to the home page."""
    here = posixpath.dirname(name)

    def home(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, match[1]))
        if path != "README.md":
            return match[0]
        return f"]({posixpath.relpath('index.md', here or '.')}"

    return re.sub(r"\]\(([\w./-]*README\.md)", home, text)


def _home(chapters: Sequence[Chapter], texts: Sequence[str]) -> str:
    """The README, with the contents of the sidebar."""
    listed = {name for chapter in chapters for _, name in chapter.pages}
    if missing := {name.removesuffix(".md") for name in texts} - listed:
        raise InputError(f"no chapter of the site lists {sorted(missing)[0]}")
    parts = [_to_home((ROOT / "README.md").read_text(encoding="utf-8"), "README.md")]
    for chapter in chapters:
        entries = [f"{title} <{name}>" if title else name for title, name in chapter.pages]
        parts.append(
            "\n".join(
                [
                    "```{toctree}",
                    ":hidden:",
                    ":maxdepth: 1",
                    f":caption: {chapter.heading}",
                    "",
                    *entries,
                    "```",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


# --- what is computed -----------------------------------------------------------------------------


def _verdicts(found: Sequence[Result]) -> str:
    """How many claims came out how; all verdicts of this run, then of the GPUs that recorded."""
    counts = verdict_table(gather())
    parts = [
        f"{_WIDE}# All verdicts",
        "Each claim's rule stood before anything was measured; what four articles say is quoted in "
        "the lesson.",
        f"## {counts.heading}",
        _made(counts._repr_html_()),
        "## Executed for this site",
        _made(report.verdict_table(found)),
        "## Recorded on GPUs",
    ]
    recorded = results.all_recorded()
    if not recorded:
        parts.append(f"{NOT_YET} [How to add your GPU](CONTRIBUTING.md#add-your-gpu).")
    for gpu, theirs in recorded.items():
        parts += [f"### {_plain(gpu)}", _made(report.verdict_table(theirs))]
    return "\n\n".join(parts) + "\n"


def _write_results(folder: Path) -> None:
    """The README of the results, with the table of who recorded."""
    path = folder / "results" / "README.md"
    rows = _recorded_gpus()
    columns = ("GPU", "Recorded", "Lessons", "Accuracy matrix", "Versions")
    table = html_pages.table("GPUs recorded", columns, rows) if rows else f"<p>{NOT_YET}</p>"
    head, _, rest = path.read_text(encoding="utf-8").partition("\n\n")
    _write(path, f"{head}\n\n{_made(table)}\n\n{rest}")


def _recorded_gpus() -> list[tuple[str, ...]]:
    """A row for each GPU that has recorded; its versions are those of its newest record."""
    lessons, tables = results.all_recorded(), accuracy.recorded_tables()
    rows = []
    for gpu in {*lessons, *tables}:
        table = tables.get(gpu)
        records = [*lessons.get(gpu, []), *([table] if table else [])]
        records.sort(key=lambda record: record.date)
        first, newest = records[0], records[-1]
        dates = dict.fromkeys([first.date[:10], newest.date[:10]])
        rows.append(
            (
                newest.machine.name,
                " to ".join(dates),
                str(len(lessons.get(gpu, []))),
                f"{len(table.rows)} recipes and set-ups" if table else "–",
                results.versions_text(newest.machine, DECISIVE),
            )
        )
    return sorted(rows)


def _raw(text: str) -> str:
    """A block of HTML in Markdown: one line, so that nothing in it can end the block."""
    return f"````{{raw}} html\n{' '.join(text.splitlines())}\n````"


def _made(table: str) -> str:
    return _raw(f'<div class="made">{table}</div>')


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)

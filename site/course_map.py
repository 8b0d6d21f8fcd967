"""The map of the course, in the README and in lesson 00: `make map`.

Both show each lesson's question and no surprise, which would give its predictions away.
Question and minutes are those of each lesson's title cell. A lesson's short name is written by
hand, in the README.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
README, FIRST = ROOT / "README.md", ROOT / "notebooks" / "00_start_here.ipynb"
CELL, HEADING = "00-takeaway-1", "## A map of the course\n"
BEGIN, END = "<!-- map: begin -->\n", "<!-- map: end -->\n"
WAYS = {
    "One GPU of 8 to 24 GB": "04, 06, 08 and 12, then 14 to 16, then 22, 23 and 26",
    "A 70B model": "06, 08 and 12, then 16, 17, 19 and 20, then 22, 23 and 27",
    "A model that answers": "08, then 25",
    "Two hours to teach": "the [short syllabus]({home}workshop/syllabus-2h.md)",
}


class Row(NamedTuple):
    """What the map says of a lesson."""

    path: str
    question: str
    minutes: str

    @property
    def number(self) -> str:
        return self.path[:2]


def rows() -> Iterator[Row]:
    """Yield each lesson's row, in order."""
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        title = "".join(notebook["cells"][0]["source"])
        yield Row(
            path=path.name,
            question=re.search(r"^# (.+)$", title, re.MULTILINE)[1],
            minutes=re.search(r"^(\d+) min · ", title, re.MULTILINE)[1],
        )


def for_readme(names: dict[str, str]) -> str:
    """Return the README's map."""
    lines = [
        *ways(""),
        "",
        "| # | lesson | question | min |",
        "|---|---|---|--:|",
    ]
    for row in rows():
        link = f"[{names[row.path]}](notebooks/{row.path})"
        lines.append(f"| {row.number} | {link} | {row.question} | {row.minutes} |")
    return "\n".join(lines) + "\n"


def for_lesson(names: dict[str, str], home: str) -> str:
    """Return lesson 00's map; ``home`` is the address of the repository's files."""
    lines = ["", *ways(home), "", "<details><summary>All lessons</summary>", ""]
    lines += ["| lesson | the question |", "|---|---|"]
    for row in rows():
        lines.append(f"| [{row.number} {names[row.path]}]({row.path}) | {row.question} |")
    return "\n".join([*lines, "", "</details>"])


def ways(home: str) -> list[str]:
    """Return which lessons are for whom."""
    start = "You need not read them all. Begin with 00 to 02; then, if you have"
    return [start, "", *(f"- **{who}:** {way.format(home=home)}." for who, way in WAYS.items())]


def short_names(readme: str) -> dict[str, str]:
    """Return the lessons' short names, by file."""
    found = re.findall(r"\[([^]]+)\]\(notebooks/(\w+\.ipynb)\)", readme)
    return {path: name for name, path in found}


def written() -> dict[Path, str]:
    """Return the two files as they should be."""
    readme = README.read_text(encoding="utf-8")
    names = short_names(readme)
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    notebook = json.loads(FIRST.read_text(encoding="utf-8"))
    [cell] = [cell for cell in notebook["cells"] if cell["id"] == CELL]
    home = "https://github.com/gpu-memory-lab/gpu-memory-lab/blob/main/"
    points, _, _ = "".join(cell["source"]).partition(HEADING)
    text = points.rstrip() + "\n\n" + HEADING + for_lesson(names, home)
    cell["source"] = text.splitlines(keepends=True)
    return {
        README: before + BEGIN + for_readme(names) + END + after,
        FIRST: json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
    }


if __name__ == "__main__":
    for file, content in written().items():
        file.write_text(content, encoding="utf-8")

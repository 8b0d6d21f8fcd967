"""A part of a page of docs that a command writes, between two comments."""

from pathlib import Path

from gpumem.files import write_atomic


def write_between(page: Path, mark: str, text: str) -> None:
    """Replace what stands between the comments ``mark: begin`` and ``mark: end`` of a page.

    Raises:
        ValueError: the page lacks one of them.
    """
    begin, end = f"<!-- {mark}: begin -->\n", f"\n<!-- {mark}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page} has no {begin.strip()} and {end.strip()}")
    write_atomic(page, f"{before}{begin}{text}{end}{after}")

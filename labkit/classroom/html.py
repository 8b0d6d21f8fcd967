"""Pieces of the class's page: tables within the keyboard's reach, names, symbols of verdicts.

Limits: cells are HTML already; whoever makes one escapes it.
"""

import html
from collections.abc import Sequence

from labkit.claims import Verdict
from labkit.classroom import Participant
from labkit.show.cards import VERDICTS
from labkit.show.rich import MISSING


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table of cells that are HTML already; the first of each row is its heading."""
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    # What scrolls must be within the keyboard's reach.
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{html.escape(caption)}">'
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def columns(
    people: Sequence[Participant], rows: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> tuple[list[str], list[list[str]]]:
    """Headings and rows with a column per participant, or one for all if their cells are the same.

    Args:
        people: who has a column.
        rows: for each the cells before those columns, and the cells in them.
    """
    same = len(people) > 1 and all(len(set(cells)) == 1 for _, cells in rows)
    headings = [f"All {len(people)}"] if same else [named(person) for person in people]
    return headings, [[*first, *cells[: len(headings)]] for first, cells in rows]


def named(participant: Participant) -> str:
    """A name, its direction of writing kept from what stands around it."""
    return f"<bdi>{html.escape(participant.name)}</bdi>"


def lines(texts: Sequence[str]) -> str:
    """Texts one below the other, escaped; a dash if there are none."""
    return "<br>".join(html.escape(text) for text in texts) or MISSING


def badge(verdict: Verdict) -> str:
    """The verdict's symbol on its colour."""
    return symbol(verdict, f' class="badge {verdict.name.lower()}"')


def symbol(verdict: Verdict, look: str = "") -> str:
    """The verdict's symbol, with its word for who hears the page or points at it."""
    shown = VERDICTS[verdict].symbol
    return f'<span{look} role="img" aria-label="{verdict}" title="{verdict}">{shown}</span>'

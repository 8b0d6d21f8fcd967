"""The page's look-up once more, in Python: what the tests hold ``site/fit/fit.js`` to.

`will_it_fit.table` says why it may look between the points so.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import fit_page

from gpumem.estimation.recipes_to_try import changes
from gpumem.hardware.catalogue import Gpu
from gpumem.hardware.least_seconds import least_seconds
from will_it_fit.table import (
    MORE_RESERVED,
    MORE_SEEN,
    PHASES,
    FitTable,
    Point,
    Row,
    name_of_way,
    row_shape,
    techniques,
)

_WORK = ("flops", "moved")


class Answer(NamedTuple):
    """One way at one batch: the values of a `Point`, and ``allocated``.

    Between points they are on the chord, and ``allocated`` is ``least`` to ``most`` bytes. It is
    ``exact`` at a point, and ``known`` where a point has as many tokens and length does not matter.
    """

    values: Mapping[str, float]
    least: float
    most: float
    exact: bool
    known: bool


def answer(
    rows: Sequence[Row], tokens: Sequence[int], longest: int, batch_size: int, seq_len: int
) -> Answer | None:
    """Look up one way of a model at a batch; None where the table does not reach."""
    if seq_len > longest:
        return None
    found = {name: _at(rows, tokens, name, batch_size, seq_len) for name in Point._fields}
    if None in found.values():
        return None
    total = batch_size * seq_len
    values = {name: between.chord for name, between in found.items()}
    if not rows[0].seq_len:
        values["flops"] = _flops(rows[0], tokens, longest, total, seq_len)
    values["allocated"] = max(values[phase] for phase in PHASES)
    values["reserved"] = max(values["reserved"], values["allocated"])
    shapes = [row_shape(t, row.seq_len, longest) for t in tokens for row in rows]
    exact = (batch_size, seq_len) in shapes
    return Answer(
        values,
        least=max(found[phase].least for phase in PHASES),
        most=max(found[phase].most for phase in PHASES),
        exact=exact,
        known=exact or (not rows[0].seq_len and total in tokens),
    )


class _Range(NamedTuple):
    least: float
    chord: float
    most: float


def _at(
    rows: Sequence[Row], tokens: Sequence[int], name: str, batch_size: int, seq_len: int
) -> _Range | None:
    """Return one value of a way: first along the tokens of each row, then along the lengths."""

    def along(row: Row, total: int) -> _Range | None:
        there = [(t, p) for t, p in zip(tokens, row.points, strict=True) if p is not None]
        return _between([(t, _Range(*[getattr(p, name)] * 3)) for t, p in there], total)

    if not rows[0].seq_len:
        return along(rows[0], batch_size * seq_len)
    as_many_tokens = [(row.seq_len, along(row, batch_size * seq_len)) for row in rows]
    reached = [(length, found) for length, found in as_many_tokens if found]
    # Below the first length a text takes no more; with an image in each row it does.
    if reached and seq_len < reached[0][0] == tokens[0]:
        level = reached[0][1]
        found = _between([(0, level._replace(least=0)), *reached], seq_len)
        # Work is a straight line along the lengths, which goes on there.
        return found._replace(chord=found.least or level.chord) if name in _WORK else found
    if found := _between(reached, seq_len):
        return found
    # Of the next length they may not be a whole row: compare as many rows.
    as_many_rows = [(row.seq_len, along(row, batch_size * row.seq_len)) for row in rows]
    return _between([(length, found) for length, found in as_many_rows if found], seq_len)


def _between(points: Sequence[tuple[int, _Range]], x: int) -> _Range | None:
    """Return the value at ``x`` of a convex function that grows; ``points`` are sorted.

    It is not above the chord, and not below the chords on either side, drawn on. Where it jumps
    they pass above the chord.
    """
    left, right = [p for p in points if p[0] <= x], [p for p in points if p[0] >= x]
    if not left or not right:
        return None
    (start, a), (stop, b) = left[-1], right[0]
    if start == stop:
        return a

    def line(x1: int, y1: float, x2: int, y2: float) -> float:
        return y1 + (y2 - y1) * (x - x1) / (x2 - x1)

    chord = line(start, a.chord, stop, b.chord)
    least, most = [min(a.least, b.least)], [line(start, a.most, stop, b.most)]
    for beside in (left[-2:], right[1::-1]):
        if len(beside) == 2:
            (x1, beyond), (x2, near) = beside
            least.append(line(x1, beyond.most, x2, near.least))
            most.append(line(x1, beyond.least, x2, near.most))
    return _Range(min(max(least), chord), chord, max(most))


def _flops(row: Row, tokens: Sequence[int], longest: int, total: int, seq_len: int) -> float:
    """Return the operations of a step, ``total * (each + square * seq_len)``, from a row whose
    first two points differ in length."""
    (t1, p1), *others = [(t, p) for t, p in zip(tokens, row.points, strict=True) if p is not None]
    each, length = p1.flops / t1, row_shape(t1, 0, longest)[1]
    for t2, p2 in others[:1]:
        length2 = row_shape(t2, 0, longest)[1]
        if length2 > length:
            square = (p2.flops / t2 - each) / (length2 - length)
            return total * (each + square * (seq_len - length))
    return total * each


# --- what fits ------------------------------------------------------------------------------------

VERDICTS = ("fits", "near", "tight", "no")


class Found(NamedTuple):
    """One way at one batch on one GPU, as a row of the page."""

    name: str
    verdict: str
    answer: Answer
    seconds_per_token: float


def find(
    known: FitTable,
    model: str,
    gpu: Gpu,
    *,
    batch_size: int,
    seq_len: int,
    gpus: int = 1,
    host_memory_bytes: float = math.inf,
) -> list[Found]:
    """Return every way of the table that the page shows, the best first."""
    entry = known.models[model]
    ranked: list[tuple[Any, Found]] = []
    for recipe, rows in zip(known.recipes, entry.ways, strict=True):
        fp16 = recipe.precision == "amp-fp16"
        on_this_gpu = not fp16 if gpu.bf16_native else "bf16" not in recipe.precision
        if not rows or recipe.ranks != gpus or not on_this_gpu:
            continue
        found = answer(rows, known.tokens, entry.longest, batch_size, seq_len)
        if found is None:
            continue
        if model in known.outdated:
            found = found._replace(exact=False, known=False)
        more, limit_bytes = fit_page.more_workspace_bytes(gpu), gpu.budget_bytes
        values = {**found.values}
        values |= {name: values[name] + more for name in ("allocated", "reserved", "floor")}
        more_reserved = MORE_SEEN if found.known else MORE_RESERVED
        if values["allocated"] > limit_bytes or gpus * values["host"] > host_memory_bytes:
            verdict = "no"
        elif values["reserved"] > limit_bytes:
            verdict = "tight"
        else:
            near = values["reserved"] * (1 + more_reserved) > limit_bytes
            verdict = "near" if near else "fits"
        work = {recipe.precision: values["flops"]}
        seconds = least_seconds(gpu, work, values["moved"], values["link"], values["sent"])
        found = found._replace(values=values, least=found.least + more, most=found.most + more)
        row = Found(name_of_way(recipe), verdict, found, seconds / (batch_size * seq_len * gpus))
        ranked.append((recipe, row))
    fitting = [row.seconds_per_token for _, row in ranked if row.verdict in ("fits", "near")]
    slow = fit_page.SLOW * min(fitting, default=math.inf)

    def rank(pair: tuple[Any, Found]) -> tuple:
        recipe, row = pair
        reserved_bytes, verdict = row.answer.values["reserved"], VERDICTS.index(row.verdict)
        if row.verdict not in ("fits", "near"):
            return verdict, reserved_bytes
        tenth = round(math.log(row.seconds_per_token, 1.1))  # bounds that near are equal
        late = row.seconds_per_token >= slow
        added = len(changes(recipe)), tenth, len(techniques(recipe))
        return verdict, late, *added, reserved_bytes

    return [row for _, row in sorted(ranked, key=rank)]

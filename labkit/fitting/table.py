"""A table of what models take, and what can be said between its points.

``results/fits.json.gz`` holds, for every model and every way to train it, steps of 512 to 65,536
tokens (`labkit.fitting.build`). Two facts make so few points enough:

- With a fused attention kernel every tensor of a step is fixed, or grows with the number of tokens,
  however they are divided into rows. Where attention computes its scores in memory, or looks back
  through a window, length matters, and the table has a row of points for each of several lengths.
- What lives at one moment is then nearly a straight line in the number of tokens, and the peak, the
  largest of many lines, nearly convex. Between two points it is not above their chord, and not
  below the chords of the points beside them, drawn on. The same holds along the length.

Operations are ``tokens * (a + b * length)``: two points give a and b. Reserved bytes follow no such
rule, since blocks are found where they are free. They are taken on the chord, as an approximation.

Limits: blocks are rounded, the last chunk of a loss may be nearly empty, and reserved bytes follow
no rule: docs/LOG.md says how far 300 random batches were from what this says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from labkit.course.results import Date
from labkit.plan.recipe import Recipe
from labkit.values import InputError, read_record

TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
#: Points that have more tokens have more rows, of this length or the longest that the model has.
USUAL_LENGTH = 2048
#: In 297 of 300 random batches between points not more than this share was reserved beyond what
#: the chord says (docs/LOG.md, 2026-11-28).
MORE_RESERVED = 0.1
#: No recipe reserved a larger share beyond its simulation: the worst of 60 on an H200 1.17 %, of
#: 457 ways of the table on phantoms 2.54 % (``accuracy.json`` and ``fits.json`` in ``results/``).
MORE_SEEN = 0.026
Bytes = Annotated[int, Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, Meta(gt=0, lt=1 << 50)]
Text = Annotated[str, Meta(min_length=1, max_length=100)]


class Point(NamedTuple):
    """What one step takes of each GPU, in bytes (``flops`` are operations).

    The first four are the most that is allocated in a phase; ``weights`` to ``temporary`` are parts
    of the allocated peak. What is left of it are buffers, workspaces and the rounding of blocks.
    """

    setup: Bytes
    forward: Bytes
    backward: Bytes
    step: Bytes
    reserved: Bytes
    floor: Bytes
    host: Bytes
    weights: Bytes
    gradients: Bytes
    optimizer: Bytes
    activations: Bytes
    temporary: Bytes
    flops: Bytes
    moved: Bytes
    sent: Bytes
    link: Bytes


PHASES = ("setup", "forward", "backward", "step")
_WORK = ("flops", "moved")
PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")


def allocated_of(point: Point) -> int:
    """Return the most that is allocated in the whole step."""
    return max(getattr(point, phase) for phase in PHASES)


class Row(NamedTuple):
    """Points of rows with one length, by the table's numbers of tokens.

    ``seq_len`` 0: it does not matter. None is beyond a point that takes more than any GPU has, or
    less than one row.
    """

    seq_len: Annotated[int, Meta(ge=0, lt=1 << 22)]
    points: tuple[Point | None, ...]


class ModelPoints(NamedTuple):
    """One model; ``ways``: of each way of the table its rows, None if it cannot be trained so.

    No rows at all: the way is newer than the model's other points, and waits to be computed.
    """

    parameters: Count
    longest: Count  # tokens in a row
    ways: tuple[tuple[Row, ...] | None, ...]


@dataclass(frozen=True)
class FitTable:
    """All of it. ``ways`` are recipes, each by the fields in which it is not the default.

    The points of ``outdated`` models follow older rules of labkit than ``versions`` say, and wait
    to be computed again: bytes are about right.
    """

    ways: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1, max_length=1000)]
    models: dict[Text, ModelPoints]
    versions: dict[Text, Text]
    date: Date
    tokens: tuple[Count, ...] = TOKENS
    outdated: tuple[Text, ...] = ()
    schema: Literal[1] = 1

    def __post_init__(self) -> None:
        _ = self.recipes  # raises where one contradicts itself
        if unknown := set(self.outdated) - set(self.models):
            raise InputError(f"outdated, and not there: {', '.join(sorted(unknown))}")
        for name, model in self.models.items():
            if len(model.ways) != len(self.ways):
                raise InputError(f"{name} has {len(model.ways)} of {len(self.ways)} ways")
            if any(len(r.points) != len(self.tokens) for way in model.ways for r in way or ()):
                raise InputError(f"{name} has a row without {len(self.tokens)} points")

    @cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        """The ways, for one sequence of the default length."""
        return tuple(Recipe.from_dict(way) for way in self.ways)

    @classmethod
    def from_dict(cls, record: Any) -> "FitTable":
        """Read what `labkit.fitting.build` wrote; an `InputError` names what is wrong."""
        return read_record(cls, record, "a table of fits")


def row_shape(tokens: int, seq_len: int, longest: int) -> tuple[int, int]:
    """Return rows and their length at a point of a `Row` of ``seq_len``; no rows: no such point."""
    length = seq_len or min(tokens, USUAL_LENGTH, longest)
    return tokens // length, length


# --- between the points ---------------------------------------------------------------------------


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

"""A table of what models take, and what can be said between its points.

``results/fits.json.gz`` holds, for every model and every way to train it, steps of 512 to 65,536
tokens (`labkit.fitting.build`). Two facts make so few points enough:

- With a fused attention kernel every tensor of a step is fixed, or grows with the number of tokens,
  however they are divided into rows. Where attention computes its scores in memory they grow with
  the square of the length, and the table has a row of points for each of several lengths.
- What lives at one moment is then nearly a straight line in the number of tokens, and the peak, the
  largest of many lines, nearly convex. Between two points it is not above their chord, and not
  below the chords of the points beside them, drawn on. The same holds along the length.

Operations are ``tokens * (a + b * length)``: two points give a and b. Reserved bytes follow no such
rule, since blocks are found where they are free. They are taken on the chord, as an approximation.

Limits: blocks are rounded, and what lives at the peak may change between two points, so that the
chord is an approximation. In 90 random batches of three models it was from 3.2 % below to 5.9 %
above what a simulation allocates, in 80 within 1 %; what is reserved was from 15 % more to 6 % less
than the chord says.
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
#: Between points up to this share more was reserved than the chord says (docs/LOG.md).
MORE_RESERVED = 0.2
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
PARTS = ("weights", "gradients", "optimizer", "activations", "temporary")


def allocated_of(point: Point) -> int:
    """Return the most that is allocated in the whole step."""
    return max(getattr(point, phase) for phase in PHASES)


class Row(NamedTuple):
    """Points of rows with one length, by the table's numbers of tokens.

    ``seq_len`` 0: it does not matter. None is more than any GPU has, or less than one row.
    """

    seq_len: Annotated[int, Meta(ge=0, lt=1 << 22)]
    points: tuple[Point | None, ...]


class ModelPoints(NamedTuple):
    """One model; ``ways``: of each way of the table its rows, None if it cannot be trained so."""

    parameters: Count
    longest: Count  # tokens in a row
    ways: tuple[tuple[Row, ...] | None, ...]


@dataclass(frozen=True)
class FitTable:
    """All of it. ``ways`` are recipes, each by the fields in which it is not the default."""

    ways: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1, max_length=1000)]
    models: dict[Text, ModelPoints]
    versions: dict[Text, Text]
    date: Date
    tokens: tuple[Count, ...] = TOKENS
    schema: Literal[1] = 1

    def __post_init__(self) -> None:
        _ = self.recipes  # raises where one contradicts itself
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
    """One way at one batch: the values of a `Point`, and ``allocated``; exact if it is one.

    Between points they are on the chord, and ``allocated`` is ``least`` to ``most`` bytes.
    """

    values: Mapping[str, float]
    least: float
    most: float
    exact: bool


def answer(
    rows: Sequence[Row], tokens: Sequence[int], longest: int, batch_size: int, seq_len: int
) -> Answer | None:
    """Look up one way of a model at a batch; None where the table does not reach."""
    total = batch_size * seq_len
    found = {
        name: _at(rows, tokens, place, total, seq_len) for place, name in enumerate(Point._fields)
    }
    if seq_len > longest or None in found.values():
        return None
    values = {name: between.chord for name, between in found.items()}
    if len(rows) == 1:
        values["flops"] = _flops(rows[0], tokens, longest, total, seq_len)
    values["allocated"] = max(values[phase] for phase in PHASES)
    values["reserved"] = max(values["reserved"], values["allocated"])
    return Answer(
        values,
        least=max(found[phase].least for phase in PHASES),
        most=max(found[phase].most for phase in PHASES),
        exact=any(
            row_shape(t, row.seq_len, longest) == (batch_size, seq_len)
            for t in tokens
            for row in rows
        ),
    )


class _Range(NamedTuple):
    least: float
    chord: float
    most: float


def _at(
    rows: Sequence[Row], tokens: Sequence[int], place: int, total: int, seq_len: int
) -> _Range | None:
    """Return one value of a way: first along the tokens of each row, then along the lengths."""
    along = []
    for row in rows:
        points = [(t, p[place]) for t, p in zip(tokens, row.points, strict=True) if p is not None]
        found = _between([(t, _Range(value, value, value)) for t, value in points], total)
        along.append((row.seq_len, found))
    if len(rows) == 1:
        return along[0][1]
    return _between([(length, found) for length, found in along if found], seq_len)


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

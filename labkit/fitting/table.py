"""A table of what models take, and what can be said between its points.

``results/fits.json.gz`` holds, for every model and every way to train it, steps of 512 to 65,536
tokens (`labkit.fitting.build`). Two facts make so few points enough:

- With a fused attention kernel every tensor of a step is fixed, or grows with the number of tokens,
  however they are divided into rows. Where attention computes its scores in memory they grow with
  the square of the length, and the table has a row of points for each of several lengths.
- What lives at one moment is then nearly a straight line in the number of tokens, and the peak, the
  largest of many lines, nearly convex: the chord between two points is about it or a little above.
  The same holds along the length. (Below 1,024 tokens a chunked loss has one chunk, and grows;
  above it does not. 1,024 is a point of the table.)

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
    """One way at one batch: the values of a `Point`, and ``allocated``; exact if it is one."""

    values: Mapping[str, float]
    exact: bool


def answer(
    rows: Sequence[Row], tokens: Sequence[int], longest: int, batch_size: int, seq_len: int
) -> Answer | None:
    """Look up one way of a model at a batch; None where the table does not reach."""
    total = batch_size * seq_len
    if seq_len > longest:
        return None
    around = _around([row.seq_len for row in rows], seq_len) if len(rows) > 1 else (0, 0)
    if around is None:
        return None
    found = []
    for row in (rows[around[0]], rows[around[1]]):
        there = [i for i, point in enumerate(row.points) if point is not None]
        between = _around([tokens[i] for i in there], total)
        if between is None:
            return None
        left, right = (there[i] for i in between)
        share = _share(tokens[left], tokens[right], total)
        pairs = zip(row.points[left], row.points[right], strict=True)
        found.append([a + share * (b - a) for a, b in pairs])
    share = _share(rows[around[0]].seq_len, rows[around[1]].seq_len, seq_len)
    values = [a + share * (b - a) for a, b in zip(*found, strict=True)]
    values = dict(zip(Point._fields, values, strict=True))
    if len(rows) == 1:
        values["flops"] = _flops(rows[0], tokens, longest, total, seq_len)
    values["allocated"] = max(values[phase] for phase in PHASES)
    values["reserved"] = max(values["reserved"], values["allocated"])
    shapes = [row_shape(t, rows[around[0]].seq_len, longest) for t in tokens]
    return Answer(values, exact=(batch_size, seq_len) in shapes)


def _around(xs: Sequence[int], x: int) -> tuple[int, int] | None:
    """Return the places of the two of ``xs``, sorted, between which ``x`` is."""
    left = [i for i, at in enumerate(xs) if at <= x]
    right = [i for i, at in enumerate(xs) if at >= x]
    return (left[-1], right[0]) if left and right else None


def _share(left: int, right: int, x: int) -> float:
    return (x - left) / (right - left) if right > left else 0.0


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

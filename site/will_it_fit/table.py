"""A table of what models take.

``results/fits.json.gz`` holds, for every model and every way to train it, steps of 512 to 65,536
tokens (`will_it_fit.build`). Two facts make so few points enough:

- With a fused attention kernel every tensor of a step is fixed, or grows with the number of tokens,
  however they are divided into rows. Where attention computes its scores in memory, or looks back
  through a window, length matters, and the table has a row of points for each of several lengths.
- What lives at one moment is then nearly a straight line in the number of tokens, and the peak, the
  largest of many lines, nearly convex. Between two points it is not above their chord, and not
  below the chords of the points beside them, drawn on. The same holds along the length.

Operations are ``tokens * (a + b * length)``: two points give a and b. Reserved bytes follow no such
rule, since blocks are found where they are free. They are taken on the chord, as an approximation.
The page "Will it fit?" (``site/fit/fit.js``) looks things up so.

Answering has few points, and nothing is said between them: of transformers' caches those of
``SHAPES``; of a paged cache four figures, from which vLLM's arithmetic gives any number of users
and any lengths.

Limits: blocks are rounded, the last chunk of a loss may be nearly empty, and reserved bytes follow
no rule: docs/LOG.md says how far 300 random batches were from what this says.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from gpumem.estimation.generation import Serving
from gpumem.estimation.known_techniques import KNOWN
from gpumem.estimation.recipe import Recipe
from gpumem.files import SOURCE, read_file
from gpumem.inputs import InputError, read_record
from gpumem.runs import Bytes

#: The course's own.
FILE = SOURCE / "results" / "fits.json.gz"
TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
#: Points that have more tokens have more rows, of this length or the longest that the model has.
USUAL_LENGTH = 2048
#: In 297 of 300 random batches between points not more than this share was reserved beyond what
#: the chord says (docs/LOG.md, 2026-11-28).
MORE_RESERVED = 0.1
#: No recipe reserved a larger share beyond its simulation: the worst of 60 on an H200 1.17 %, of
#: 457 ways of the table on phantoms 2.54 % (``accuracy.json`` and ``fits.json`` in ``results/``).
MORE_SEEN = 0.026
#: The same where the table has as many tokens in other rows, or the GPU's cuBLAS takes a larger
#: workspace than the one that was simulated: of some 120 random settings the worst reserved 18.3 %
#: more (docs/LOG.md, 2026-12-01).
MORE_UNSURE = 0.2
#: Of answering: how weights are rounded and which cache transformers has; how vLLM rounds weights
#: (to 8 bits only what is stored so); users with tokens of each prompt; and tokens of each answer.
SERVED_KINDS = ((None, "dynamic"), (None, "static"), ("int8", "dynamic"), ("nf4", "dynamic"))
PAGED_WEIGHTS = (None, "nf4")
SHAPES = ((1, 2048), (8, 2048))
NEW_TOKENS = 128
#: GPUs that stand for the kinds that differ in vLLM's rehearsal: one without bfloat16, one whose
#: largest batch is the usual one, one whose is larger.
PAGED_KINDS = (("t4", "fp16"), ("a100-80gb", "bf16"), ("h100", "bf16"))
Count = Annotated[int, Meta(gt=0, lt=1 << 50)]
Place = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1, max_length=100)]
#: In ISO 8601, UTC.
Date = Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}T", max_length=40)]
_PRECISIONS = {"fp32": "FP32", "amp-bf16": "AMP BF16", "amp-fp16": "AMP FP16", "bf16": "BF16"}
_OPTIMIZERS = {
    "adamw": "AdamW",
    "fused-adamw": "fused AdamW",
    "adamw8bit": "8-bit AdamW",
    "adafactor": "Adafactor",
}
_TECHNIQUES = (
    *("checkpointing", "chunked-loss", "step-in-backward"),
    *("offload-activations", "offload-optimizer", "offload-weights"),
)
_ADAPTERS = {None: "LoRA", "nf4": "QLoRA", "nf4-double": "QLoRA, double quantization"}


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


class ServedPoint(NamedTuple):
    """What one batch of conversations takes, in bytes.

    ``weights`` to ``activations`` are parts of the allocated peak; ``first`` and ``last`` are the
    cache's after the first pass and at the end, ``read`` of the weights what a pass reads.
    """

    reserved: Bytes
    allocated: Bytes
    weights: Bytes
    cached: Bytes
    activations: Bytes
    first: Bytes
    last: Bytes
    read: Bytes


class PagedPoint(NamedTuple):
    """What vLLM's arithmetic needs, in bytes: see `gpumem.estimation.paged.Paged`."""

    weights: Bytes
    activations: Bytes
    token: Bytes
    read: Bytes


class ServedModel(NamedTuple):
    """One model: a point for each of `servings`, and of `paged_servings`.

    None where the model cannot do it, or no GPU holds the weights. Points that are missing at the
    end wait to be computed.
    """

    positions: Count
    points: tuple[ServedPoint | None, ...]
    paged: tuple[PagedPoint | None, ...]


@dataclass(frozen=True)
class FitTable:
    """All of it. ``ways`` are recipes, each by the fields in which it is not the default.

    ``outdated`` has, for a model, the numbers of ways whose points follow older rules of labkit
    than ``versions`` say, and wait to be computed again: bytes are about right. ``serving`` has
    what is there so far, by the rules of ``serving_rules``.
    """

    ways: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1, max_length=1000)]
    models: dict[Text, ModelPoints]
    versions: dict[Text, Text]
    date: Date
    tokens: tuple[Count, ...] = TOKENS
    outdated: dict[Text, tuple[Place, ...]] = field(default_factory=dict)
    serving: dict[Text, ServedModel] = field(default_factory=dict)
    serving_rules: str = ""
    schema: Literal[1] = 1

    def __post_init__(self) -> None:
        _ = self.recipes  # raises where one contradicts itself
        for name, numbers in self.outdated.items():
            if name not in self.models or any(n >= len(self.ways) for n in numbers):
                raise InputError(f"outdated, and not there: {name}, ways {numbers}")
        for name, model in self.models.items():
            if len(model.ways) != len(self.ways):
                raise InputError(f"{name} has {len(model.ways)} of {len(self.ways)} ways")
            if any(len(r.points) != len(self.tokens) for way in model.ways for r in way or ()):
                raise InputError(f"{name} has a row without {len(self.tokens)} points")
        for name, served in self.serving.items():
            known = len(served.points) <= len(servings())
            if not known or len(served.paged) != len(paged_servings()):
                raise InputError(f"{name} answers in other ways than the table's")

    @cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        """The ways, for one sequence of the default length."""
        return tuple(Recipe.from_dict(way) for way in self.ways)

    @classmethod
    def from_dict(cls, record: Any) -> "FitTable":
        """Read what `will_it_fit.build` wrote; an `InputError` names what is wrong."""
        return read_record(cls, record, "a table of fits")


def servings() -> list[Serving]:
    """Return how transformers' caches are tried, in the order of a model's points."""
    return [
        Serving(
            quantize=each, cache=cache, users=users, prompt_tokens=tokens, new_tokens=NEW_TOKENS
        )
        for each, cache in SERVED_KINDS
        for users, tokens in SHAPES
    ]


def paged_servings() -> list[tuple[str, Serving]]:
    """Return the GPU and how it answers for each of a model's paged points."""
    return [
        (gpu, Serving(quantize=quantize, cache="paged", precision=precision))
        for quantize in PAGED_WEIGHTS
        for gpu, precision in PAGED_KINDS
    ]


def row_shape(tokens: int, seq_len: int, longest: int) -> tuple[int, int]:
    """Return rows and their length at a point of a `Row` of ``seq_len``; no rows: no such point."""
    length = seq_len or min(tokens, USUAL_LENGTH, longest)
    return tokens // length, length


@cache
def table() -> FitTable:
    """Return the course's own table; an `InputError` says that its file is missing or damaged."""
    return read_file(FILE, FitTable.from_dict, "a table of fits")


def techniques(recipe: Recipe) -> list[str]:
    """Return what a way adds to its kind of training to take less memory."""
    others = {
        "eager attention": recipe.attention == "eager",
        f"FSDP2 over {recipe.ranks}": recipe.ranks > 1,
    }
    names = [KNOWN[technique].name for technique in _TECHNIQUES if KNOWN[technique].is_in(recipe)]
    return names + [name for name, on in others.items() if on]


def name_of_way(recipe: Recipe) -> str:
    """Return how people call a way to train: ``"LoRA, AMP BF16; gradient checkpointing"``."""
    kind = [_ADAPTERS[recipe.quantize] if recipe.lora else "All weights"]
    kind.append(_PRECISIONS[recipe.precision])
    if not recipe.lora:
        kind.append(_OPTIMIZERS[recipe.optimizer])
    return "; ".join(", ".join(words) for words in (kind, techniques(recipe)) if words)

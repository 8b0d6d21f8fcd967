"""formula_estimate(): the memory formula in common use, term by term.

    formula = formula_estimate("Llama-3.1-8B", precision="bf16", batch_size=1, seq_len=8192)
    trace = lab.estimate("Llama-3.1-8B", gpu="a100-80gb", precision="bf16", seq_len=8192)
    rows = formula.beside(trace.run)

What is stored per parameter is counted from the shapes of the model's tensors and is exact. The
activations are the published formula, not corrected: `Envelope.beside` shows where a trace differs.
Terms are summed, as is usual, though some never exist at the same time.

Sources: Adam's two moments per weight, https://arxiv.org/abs/1412.6980; Adafactor's numbers per row
and column, https://arxiv.org/abs/1804.04235; 8-bit optimizers' scale per block,
https://arxiv.org/abs/2110.02861; NF4's blocks, https://arxiv.org/abs/2305.14314; LLM.int8()'s scale
per row, https://arxiv.org/abs/2208.07339; LoRA's adapters, https://arxiv.org/abs/2106.09685;
activations: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.

Limits: one dense decoder on one GPU, without what lives on the host, temporaries, autocast's copies
of the weights, workspaces and the allocator's rounding. bitsandbytes widens the biases of quantized
layers under autocast, which is not counted. Of experts, and of a vision tower, what is stored is
counted, and not what they compute.
"""

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from gpumem.estimation.recipe import ALL_LINEAR, CHUNK_TOKENS, Recipe
from gpumem.estimation.weight_shapes import Shapes, shapes_of
from gpumem.inputs import InputError
from gpumem.models.config import find_config
from gpumem.runs import Run
from gpumem.trace import Category, Storage

BLOCK_4BIT, BLOCK_SCALES, BLOCK_8BIT = 64, 256, 256
#: bitsandbytes keeps the state of smaller tensors in float32, and pages that of larger ones.
LEAST_8BIT, LEAST_PAGED = 4096, 100_000


class Part(enum.StrEnum):
    """The formula's five parts, then what it leaves out."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    LOGITS = "logits and loss"
    COPIES = "autocast's copies of weights"
    TEMPORARY = "temporary"
    REST = "unattributed, rounding"


_STORED = {
    Category.WEIGHTS: Part.WEIGHTS,
    Category.GRADIENTS: Part.GRADIENTS,
    Category.OPTIMIZER: Part.OPTIMIZER,
    Category.BUFFERS: Part.REST,
    Category.UNATTRIBUTED: Part.REST,
}


@dataclass(frozen=True)
class Term:
    """One term: what it is part of, how it is written, its bytes."""

    part: Part
    text: str
    nbytes: int


@dataclass(frozen=True)
class Row:
    """One part: by the formula (None: no such term), at its highest moment, at the trace's peak."""

    part: Part
    formula_bytes: int | None
    highest_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Envelope:
    """The formula for one model and recipe.

    Attributes:
        model, recipe: what is trained, and how.
        symbols: what the letters in the terms stand for, ``{"L": 32, ...}``.
        terms: the terms, to be summed.
        shapes: of the model's weights; a trace is compared by them.
    """

    model: str
    recipe: Recipe
    symbols: Mapping[str, int]
    terms: tuple[Term, ...]
    shapes: frozenset[tuple[int, ...]]

    @property
    def total_bytes(self) -> int:
        return sum(term.nbytes for term in self.terms)

    @property
    def by_part(self) -> dict[Part, int]:
        """Bytes of each part that has a term; sums to ``total_bytes``."""
        found: Counter[Part] = Counter()
        for term in self.terms:
            found[term.part] += term.nbytes
        return dict(found)

    def beside(self, run: Run) -> tuple[Row, ...]:
        """Compare with a run's trace, part by part; ``peak_bytes`` sums to the run's peak."""
        live: Counter[Part] = Counter()
        highest: Counter[Part] = Counter()
        at_peak: Counter[Part] = Counter()
        peak_index = run.trace.peak().index
        parts = [self._part_of(storage) for storage in run.trace.storages]
        for index, _, change_bytes in run.trace.changes():
            part = parts[run.trace.events[index].storage]
            live[part] += change_bytes
            highest[part] = max(highest[part], live[part])
            if index == peak_index:
                at_peak = live.copy()
        # The allocator hands out whole blocks: what they hold beyond the tensors.
        rounding_bytes = run.peak_bytes - sum(at_peak.values())
        at_peak[Part.REST] += rounding_bytes
        highest[Part.REST] += rounding_bytes
        terms = self.by_part
        rows = (Row(p, terms.get(p), highest[p], at_peak[p]) for p in Part)
        return tuple(row for row in rows if row.formula_bytes is not None or row.highest_bytes)

    def _part_of(self, storage: Storage) -> Part:
        if storage.category in _STORED:
            return _STORED[storage.category]
        if len(storage.shape) > 1 and storage.shape[-1] == self.symbols["V"]:
            return Part.LOGITS
        if storage.category is Category.TEMPORARY:
            return Part.TEMPORARY
        copied = storage.operator == "_to_copy" and storage.shape in self.shapes
        return Part.COPIES if copied else Part.ACTIVATIONS


def formula_estimate(model: Any, *, recipe: Recipe | None = None, **fields: Any) -> Envelope:
    """Return the back-of-the-envelope formula for training ``model``.

    Arguments and errors are those of `estimate`; a recipe that stores something on the host is
    refused too.
    """
    recipe = (recipe or Recipe()).but(**fields)
    if recipe.offload != "none":
        raise InputError(
            "the back of the envelope has no term for what lives on the host: leave offload out"
        )
    name, config = find_config(model)
    shapes = shapes_of(config)
    text = config.get_text_config()
    symbols = {
        "P": shapes.parameters,
        "L": text.num_hidden_layers,
        "h": text.hidden_size,
        "a": text.num_attention_heads,
        "V": text.vocab_size,
        "b": recipe.batch_size,
        "s": recipe.seq_len,
    }
    terms = (*_stored(shapes, recipe), *_computed(symbols, recipe))
    return Envelope(name, recipe, symbols, terms, frozenset(shapes.weights.values()))


# --- what is stored per parameter -----------------------------------------------------------------


def _stored(shapes: Shapes, recipe: Recipe) -> list[Term]:
    """Return the terms of weights, gradients and optimizer state."""
    size = recipe.weights_dtype.itemsize
    if recipe.quantize:
        rest = size * (shapes.parameters - shapes.in_linear)
        terms = [Term(Part.WEIGHTS, f"{size} (P − Q)", rest), _quantized(shapes, recipe.quantize)]
    else:
        terms = [Term(Part.WEIGHTS, f"{size} P", size * shapes.parameters)]
    trained, letter = list(shapes.weights.values()), "P"
    if recipe.lora:
        letter, size = "R", 4  # PEFT stores adapters in float32 (`autocast_adapter_dtype`)
        trained = _adapters(shapes, recipe)
        terms.append(Term(Part.WEIGHTS, "4 R", 4 * sum(map(prod, trained))))
    text, count = f"{size} {letter}", sum(map(prod, trained))
    if recipe.optimizer_in_backward:
        text, count = f"{size} × the largest", max(map(prod, trained), default=0)
    terms.append(Term(Part.GRADIENTS, text, size * count))
    return [*terms, _optimizer(trained, size, letter, recipe.optimizer)]


def _adapters(shapes: Shapes, recipe: Recipe) -> list[tuple[int, int]]:
    """Return the shapes of both matrices of each adapter; a target is the end of a layer's name."""
    found = []
    ends = tuple(f".{target}" for target in recipe.lora_targets)
    for name, (rows, columns) in shapes.adapted.items():
        if recipe.lora_targets == ALL_LINEAR or f".{name}".endswith(ends):
            found += [(recipe.lora, columns), (rows, recipe.lora)]
    return found


def _quantized(shapes: Shapes, kind: str) -> Term:
    """Return the packed weights with their scales, and bitsandbytes' small tables of each."""
    if kind == "int8":
        nbytes = sum(rows * columns + 4 * rows for rows, columns in shapes.linear.values())
        return Term(Part.WEIGHTS, "Q + 4 × rows", nbytes)
    nbytes, text = 0, "Q / 2 + 4 Q / 64"
    if kind == "nf4-double":
        text = "Q / 2 + Q / 64 + 4 Q / (64 × 256)"
    for rows, columns in shapes.linear.values():
        scales = ceil(rows * columns / BLOCK_4BIT)
        nbytes += ceil(rows * columns / 2) + 4 * 16
        if kind == "nf4":
            nbytes += 4 * scales
        else:  # the scales' own scales, their table, and their mean
            nbytes += scales + 4 * ceil(scales / BLOCK_SCALES) + 4 * 256 + 4
    return Term(Part.WEIGHTS, text, nbytes)


def _optimizer(trained: list[tuple[int, ...]], size: int, letter: str, kind: str) -> Term:
    if kind in ("adamw", "fused-adamw"):
        nbytes = 2 * size * sum(map(prod, trained))
        return Term(Part.OPTIMIZER, f"2 × {size} {letter}", nbytes)
    if kind == "sgd":
        return Term(Part.OPTIMIZER, "0", 0)
    if kind == "adafactor":
        numbers = 0
        for shape in trained:
            count = prod(shape)
            numbers += count // shape[-1] + count // shape[-2] if len(shape) > 1 else count
        return Term(Part.OPTIMIZER, f"{size} (rows + columns)", size * numbers)
    total = 2 * 4 * 256  # the two tables of the 8-bit data type
    for count in map(prod, trained):
        if count < LEAST_8BIT:
            total += 2 * 4 * count
            continue
        total += 2 * 4 * ceil(count / BLOCK_8BIT)
        if kind == "adamw8bit" or count < LEAST_PAGED:
            total += 2 * count
    text = f"2 × {letter} + 2 × 4 {letter} / 256"
    if kind == "paged-adamw8bit":
        text = f"2 × 4 {letter} / 256, the rest paged"
    return Term(Part.OPTIMIZER, text, total)


# --- what a forward pass keeps --------------------------------------------------------------------


def _computed(symbols: Mapping[str, int], recipe: Recipe) -> list[Term]:
    """Return the published activation formula, and the logits that it counts separately.

    In 16 bits a layer keeps ``s b h (34 + 5 a s / h)``: 16 numbers per token and channel, two
    numbers per score, and dropout's masks, one byte each, which do not grow in float32. A fused
    attention keeps no scores, and a checkpointed layer only its input. Logits are float32.
    Source: sections 4 and 5 of the paper.
    """
    size = 4 if recipe.precision == "fp32" else 2
    tokens = symbols["b"] * symbols["s"]
    per_channel, per_score = 16 * size + 2, 2 * size + 1
    text, per_token = f"{per_channel}", symbols["h"] * per_channel
    if recipe.checkpointing:
        text, per_token = f"{size}", symbols["h"] * size
    elif recipe.attention == "eager":
        text = f"({per_channel} + {per_score} a s / h)"
        per_token += symbols["a"] * symbols["s"] * per_score
    at_once, letters = tokens, "s b"
    if recipe.chunked_loss:
        at_once, letters = min(tokens, CHUNK_TOKENS), f"{CHUNK_TOKENS} tokens ×"
    layers_bytes = symbols["L"] * tokens * per_token
    return [
        Term(Part.ACTIVATIONS, f"L s b h × {text}", layers_bytes),
        Term(Part.LOGITS, f"4 {letters} V", 4 * at_once * symbols["V"]),
    ]

"""envelope(): the memory formula that everybody uses, term by term, with the source of each.

    formula = lab.envelope("Llama-3.1-8B", precision="bf16", batch_size=1, seq_len=8192)
    trace = lab.estimate("Llama-3.1-8B", gpu="a100-80gb", precision="bf16", seq_len=8192)
    rows = formula.beside(trace.run)

What is stored per parameter is counted from the shapes of the model's tensors and is exact. The
activations are the published formula, not mended by what we know better: `Envelope.beside` shows
where a trace differs. Terms are summed, as everybody does, though some never meet.

Limits: one dense decoder on one GPU. There is no term for what lives on the host, and none for
temporaries, autocast's copies of the weights, workspaces or the allocator's rounding.
"""

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.memory import Category, InputError, Run, Storage
from labkit.recipes import ALL_LINEAR, CHUNK_TOKENS, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KORTHIKANTI = "Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198"
ADAM = "Adam keeps two moments for each weight, https://arxiv.org/abs/1412.6980"
SGD = "plain SGD keeps nothing, https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html"
ADAFACTOR = "one number per row and per column, https://arxiv.org/abs/1804.04235"
EIGHT_BIT = "8-bit moments, a scale per block, https://arxiv.org/abs/2110.02861"
QLORA = "NF4 in blocks of 64, https://arxiv.org/abs/2305.14314"
LLM_INT8 = "int8 with a scale per row, https://arxiv.org/abs/2208.07339"
LORA = "r (rows + columns) per adapted matrix, https://arxiv.org/abs/2106.09685"
FORMATS = "the format of PyTorch's tensors, https://docs.pytorch.org/docs/stable/tensors.html"

BLOCK_4BIT, BLOCK_SCALES, BLOCK_8BIT = 64, 256, 256
#: bitsandbytes keeps the state of smaller tensors in float32, and pages that of larger ones.
LEAST_8BIT, LEAST_PAGED = 4096, 100_000


class Part(enum.StrEnum):
    """What formula and trace are compared by: the formula's five parts, then what it lacks."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    LOGITS = "logits and loss"
    COPIES = "autocast's copies of weights"
    TEMPORARY = "working memory"
    REST = "workspaces and rounding"


@dataclass(frozen=True)
class Term:
    """One term: what it is part of, how it is written, its bytes, whether those are exact."""

    part: Part
    text: str
    nbytes: int
    exact: bool
    source: str


class Row(NamedTuple):
    """One part, in bytes: by the formula, at its own highest moment, and at the trace's peak.

    ``formula_bytes`` is None where the formula has no such term.
    """

    part: Part
    formula_bytes: int | None
    highest_bytes: int
    peak_bytes: int

    @property
    def error(self) -> float | None:
        """The formula against the part's highest moment, 0.1 for 10 % too much; None without."""
        if self.formula_bytes is None or not self.highest_bytes:
            return None
        return self.formula_bytes / self.highest_bytes - 1


@dataclass(frozen=True)
class Envelope:
    """The formula for one model and recipe.

    Attributes:
        model: its name.
        recipe: how it is trained.
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
        """Formula and trace, part by part; the column ``peak_bytes`` sums to the run's peak.

        Raises:
            InputError: the run has no trace.
        """
        if run.trace is None:
            raise InputError("to stand beside the formula, a run needs its trace")
        live: Counter[Part] = Counter()
        highest: Counter[Part] = Counter()
        at_peak: dict[Part, int] = {}
        peak_index = run.trace.peak().index
        parts = [self._part_of(storage) for storage in run.trace.storages]
        for index, _, change_bytes in run.trace.changes():
            part = parts[run.trace.events[index].storage]
            live[part] += change_bytes
            highest[part] = max(highest[part], live[part])
            if index == peak_index:
                at_peak = dict(live)
        # The allocator hands out whole blocks: what they hold beyond the tensors.
        rounding_bytes = run.peak_bytes - sum(at_peak.values())
        at_peak[Part.REST] = at_peak.get(Part.REST, 0) + rounding_bytes
        highest[Part.REST] += rounding_bytes
        terms = self.by_part
        rows = (Row(p, terms.get(p), highest[p], at_peak.get(p, 0)) for p in Part)
        return tuple(row for row in rows if row.formula_bytes is not None or row.highest_bytes)

    def _part_of(self, storage: Storage) -> Part:
        stored = {
            Category.WEIGHTS: Part.WEIGHTS, Category.GRADIENTS: Part.GRADIENTS,
            Category.OPTIMIZER: Part.OPTIMIZER, Category.BUFFERS: Part.REST,
            Category.UNATTRIBUTED: Part.REST,
        }  # fmt: skip
        if storage.category in stored:
            return stored[storage.category]
        if len(storage.shape) > 1 and storage.shape[-1] == self.symbols["V"]:
            return Part.LOGITS
        if storage.category is Category.TEMPORARY:
            return Part.TEMPORARY
        copied = storage.operator == "_to_copy" and storage.shape in self.shapes
        return Part.COPIES if copied else Part.ACTIVATIONS


def envelope(model: Any, *, recipe: Recipe | None = None, **fields: Any) -> Envelope:
    """The back-of-the-envelope formula for training ``model``.

    Args:
        model: as for `estimate`: a name, a folder, a hub id when online, a transformers config.
        recipe: how it is trained; by default plain fp32 with AdamW.
        **fields: fields of the recipe to change, ``precision="bf16"``.

    Raises:
        InputError: unknown model or field, a recipe that contradicts itself, or one that keeps
            something on the host.
    """
    from labkit.model_source import find_config

    recipe = (recipe or Recipe()).but(**fields)
    if recipe.offload != "none":
        raise InputError(
            "the back of the envelope has no term for what lives on the host: leave offload out"
        )
    name, config = find_config(model)
    shape = shape_of(config)
    symbols = {
        "P": shape.parameters, "L": config.num_hidden_layers, "h": config.hidden_size,
        "a": config.num_attention_heads, "V": config.vocab_size,
        "b": recipe.batch_size, "s": recipe.seq_len,
    }  # fmt: skip
    terms = (*_stored(shape, recipe), *_computed(symbols, recipe))
    return Envelope(name, recipe, symbols, terms, frozenset(each for _, each in shape.weights))


# --- what is stored per parameter -----------------------------------------------------------------


class Shape(NamedTuple):
    """A model's weights as (name, shape); which matrices are linear layers, as (rows, columns)."""

    weights: tuple[tuple[str, tuple[int, ...]], ...]
    linear: Mapping[str, tuple[int, int]]

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for _, shape in self.weights)


_known: dict[tuple[type, str], Shape] = {}


def shape_of(config: "PreTrainedConfig") -> Shape:
    """The shapes of the model, which is built on ``meta`` once and takes no memory there."""
    key = (type(config), config.to_json_string())
    if key not in _known:
        from labkit.models import model

        if len(_known) >= 64:
            _known.clear()
        built = model(config, device="meta")
        weights = tuple((name, tuple(p.shape)) for name, p in built.named_parameters())
        head, linear = built.get_output_embeddings(), {}
        for name, module in built.named_modules():
            kind = type(module).__name__
            if kind in ("Linear", "Conv1D") and module is not head:
                rows, columns = module.weight.shape
                linear[name] = (columns, rows) if kind == "Conv1D" else (rows, columns)
        _known[key] = Shape(weights, linear)
    return _known[key]


def _stored(shape: Shape, recipe: Recipe) -> list[Term]:
    """Weights, gradients and optimizer state."""
    size = _weight_bytes(recipe)
    packed = sum(prod(each) for each in shape.linear.values()) if recipe.quantize else 0
    terms = [_weights(shape.parameters - packed, size, "P − Q" if packed else "P")]
    if recipe.quantize:
        terms.append(_quantised(shape, recipe.quantize))
    trained, letter = [each for _, each in shape.weights], "P"
    if recipe.lora:
        rank, letter, size = recipe.lora, "R", 4
        found = [each for name, each in shape.linear.items() if _is_target(name, recipe)]
        trained = [pair for rows, columns in found for pair in ((rank, columns), (rows, rank))]
        adapters = sum(map(prod, trained))
        # PEFT keeps adapters in float32, whatever the model's format (`autocast_adapter_dtype`).
        terms.append(Term(Part.WEIGHTS, "4 R", 4 * adapters, True, LORA))
    count = sum(map(prod, trained))
    if recipe.optimizer_in_backward:
        largest = max(map(prod, trained), default=0)
        terms.append(Term(Part.GRADIENTS, f"{size} × the largest", size * largest, False, FORMATS))
    else:
        terms.append(Term(Part.GRADIENTS, f"{size} {letter}", size * count, True, FORMATS))
    return [*terms, _optimizer(trained, size, letter, recipe.optimizer)]


def _weight_bytes(recipe: Recipe) -> int:
    return 2 if recipe.precision == "bf16" else 4


def _weights(count: int, size: int, letter: str) -> Term:
    text = f"{size} ({letter})" if " " in letter else f"{size} {letter}"
    return Term(Part.WEIGHTS, text, size * count, True, FORMATS)


def _is_target(name: str, recipe: Recipe) -> bool:
    """Whether PEFT adapts this layer: a target is the end of its name."""
    if recipe.lora_targets == ALL_LINEAR:
        return True
    return any(name == each or name.endswith(f".{each}") for each in recipe.lora_targets)


def _quantised(shape: Shape, kind: str) -> Term:
    """Packed weights with their scales, and the small tables that bitsandbytes keeps with each."""
    total = 0
    for rows, columns in shape.linear.values():
        count = rows * columns
        scales = ceil(count / BLOCK_4BIT)
        if kind == "int8":
            total += count + 4 * rows
        elif kind == "nf4":
            total += ceil(count / 2) + 4 * scales + 4 * 16
        else:
            total += ceil(count / 2) + scales + 4 * ceil(scales / BLOCK_SCALES)
            total += 4 * 16 + 4 * 256 + 4  # both tables, and the mean of the scales
    text = {
        "int8": "Q + 4 × rows",
        "nf4": "Q / 2 + 4 Q / 64",
        "nf4-double": "Q / 2 + Q / 64 + 4 Q / (64 × 256)",
    }[kind]
    return Term(Part.WEIGHTS, text, total, True, LLM_INT8 if kind == "int8" else QLORA)


def _optimizer(trained: list[tuple[int, ...]], size: int, letter: str, kind: str) -> Term:
    count = sum(map(prod, trained))
    if kind == "adamw":
        return Term(Part.OPTIMIZER, f"2 × {size} {letter}", 2 * size * count, True, ADAM)
    if kind == "sgd":
        return Term(Part.OPTIMIZER, "0", 0, True, SGD)
    if kind == "adafactor":
        numbers = sum(
            prod(s) // s[-1] + prod(s) // s[-2] if len(s) > 1 else prod(s) for s in trained
        )
        return Term(Part.OPTIMIZER, f"{size} (rows + columns)", size * numbers, True, ADAFACTOR)
    total = 2 * 4 * 256  # the two tables of the 8-bit data type
    for each in map(prod, trained):
        if each < LEAST_8BIT:
            total += 2 * 4 * each
            continue
        total += 2 * 4 * ceil(each / BLOCK_8BIT)
        if kind == "adamw8bit" or each < LEAST_PAGED:
            total += 2 * each
    text = f"2 × {letter} + 2 × 4 {letter} / 256"
    if kind == "paged-adamw8bit":
        text = f"2 × 4 {letter} / 256, the rest paged"
    return Term(Part.OPTIMIZER, text, total, True, EIGHT_BIT)


# --- what a forward pass keeps --------------------------------------------------------------------


def _computed(symbols: Mapping[str, int], recipe: Recipe) -> list[Term]:
    """The published activation formula, and the logits that it counts apart.

    In 16 bits a layer keeps ``s b h (34 + 5 a s / h)``: 16 numbers per token and channel, two
    numbers per score, and dropout's masks, one byte each, which do not grow in float32. A fused
    attention keeps no scores, and a checkpointed layer its input only. Logits are float32.
    Source: sections 4 and 5 of the paper.
    """
    size = 4 if recipe.precision == "fp32" else 2
    tokens, layers = symbols["b"] * symbols["s"], symbols["L"]
    per_channel, per_score = 16 * size + 2, 2 * size + 1
    if recipe.checkpointing:
        text, nbytes = f"L s b h × {size}", layers * tokens * symbols["h"] * size
    else:
        text, nbytes = f"L s b h × {per_channel}", layers * tokens * symbols["h"] * per_channel
        if recipe.attention == "eager":
            text = f"L s b h × ({per_channel} + {per_score} a s / h)"
            nbytes += layers * tokens * symbols["a"] * symbols["s"] * per_score
    chunk, letters = tokens, "s b"
    if recipe.chunked_loss:
        chunk, letters = min(tokens, CHUNK_TOKENS), f"{CHUNK_TOKENS} tokens ×"
    return [
        Term(Part.ACTIVATIONS, text, nbytes, False, KORTHIKANTI),
        Term(Part.LOGITS, f"4 {letters} V", 4 * chunk * symbols["V"], False, KORTHIKANTI),
    ]

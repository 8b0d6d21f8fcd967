"""The search behind `labkit.advice`: simulates candidates, and finds the largest batch of each.

A ladder of savers is climbed until a rung lowers the bound no further, or an endless batch would
not lower it by ``WORTH_A_RUNG``. A way that changes more is not tried where one with fewer changes
fits without offloading, nor float32 where anything else fits that trains every weight. The batch is
a power of two, at most ``MOST_BATCH``: memory is close to a straight line in it, two batches
predict the largest that fits, and that one is simulated too.

Limits: what was left out by these rules might have had a lower bound by less than they say.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit import candidates, catalogue
from labkit.candidates import Sizes
from labkit.catalogue import Gpu
from labkit.estimates import Estimate, estimate
from labkit.memory import InputError
from labkit.recipes import MOST_TOKENS, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GROUPS = ("same", "changed")
#: Sequences. What a step costs however many it has is shared by so many that more hardly help.
MOST_BATCH = 32
#: A rung that checkpoints computes at least a fifth more, one that offloads waits for the link.
WORTH_A_RUNG = 0.2


@dataclass(frozen=True)
class Option:
    """One recipe that was simulated.

    Attributes:
        recipe: how to train.
        group: ``"same"`` training as float32 AdamW, by another road, or ``"changed"``.
        changes: what it trains otherwise, a sentence each.
        costs: what it pays without training otherwise, a sentence each.
        needed_bytes: what PyTorch's allocator takes of each card, DDP's buckets included.
        host_bytes: in host memory, for each card.
        fits: whether it fits with the margin.
        flops, moved_bytes, link_bytes: of one step on one card.
        seconds_per_token: at the least; of all cards together. What they send each other can pass
            while they compute, over links that nobody knows here: it is left out.
        sent_bytes: what each card of several that share the model sends in a step.
    """

    recipe: Recipe
    group: str
    changes: tuple[str, ...]
    costs: tuple[str, ...]
    needed_bytes: int
    host_bytes: int
    fits: bool
    flops: int
    moved_bytes: int
    link_bytes: int
    seconds_per_token: float
    sent_bytes: int = 0

    def rank(self) -> tuple:
        """Sorts options: the fewest changes, the lowest bound, the least memory."""
        return (GROUPS.index(self.group), len(self.changes), self.seconds_per_token,
                self.needed_bytes, str(self.recipe))  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy; `Recipe.from_dict` reads its recipe."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["recipe"] = self.recipe.to_dict()
        return plain | {"changes": list(self.changes), "costs": list(self.costs)}


class Search:
    """Climbs the ladders, and keeps what it has simulated."""

    def __init__(
        self, config: "PreTrainedConfig", card: Gpu, gpus: int, seq_len: int, only: str | None,
        margin: float,
    ) -> None:  # fmt: skip
        self.config, self.card, self.gpus, self.seq_len = config, card, gpus, seq_len
        self.only, self.margin = only, margin
        self.sizes: Sizes = candidates.sizes_of(config)
        self.room_bytes = room_bytes(card.budget_bytes, margin)
        self.most_batch = min(MOST_BATCH, 1 << (MOST_TOKENS // seq_len).bit_length() - 1)
        self.options: dict[Recipe, Option] = {}
        self.refused: list[str] = []
        self.ruled_out = 0
        self.found: dict[tuple, int] = {}  # the largest batch on each rung, in the way before
        self.smallest: list[Recipe] = []  # of each way that fits, the rung that checkpoints
        self.smallest_bound: tuple[int, Recipe] | None = None

    @property
    def fitting(self) -> list[Option]:
        return [option for option in self.options.values() if option.fits]

    def all(self) -> None:
        for way in candidates.ways(self.card, self.seq_len, self.only):
            if not self._surpassed(way):
                self._climb(way)
        for changed in (False, True):  # how small each group can be made, for the frontier
            rungs = [rung for rung in self.smallest if bool(candidates.changes(rung)) == changed]
            if rungs:
                self._simulate(min(rungs, key=self._least_bytes))
        if not self.options and self.smallest_bound:
            self._simulate(self.smallest_bound[1])  # to say by how much it misses

    def _surpassed(self, way: Recipe) -> bool:
        """Whether a way that changes less fits without offloading, so that ``way`` is not tried."""
        if way.lora:
            return False
        full = [option for option in self.fitting if option.recipe.lora is None]
        if way.precision == "fp32":
            return bool(full)
        many = len(candidates.changes(way)) + (way.optimizer == "paged-adamw8bit")
        return any(o.recipe.offload == "none" and 0 < len(o.changes) < many for o in full)

    def _climb(self, way: Recipe) -> None:
        plain, *savers = candidates.rungs(way, self.card, self.gpus)
        best: Option | None = None
        for rung in savers:
            if self._ruled_out(rung):
                continue
            kind = rung.checkpointing, rung.offload, rung.ranks
            start = min(2 * best.recipe.batch_size, self.most_batch) if best else 1
            try:
                tried = self._largest_batch(rung, self.found.get(kind, start))
            except InputError as error:
                self.refused.append(f"{rung}: {error}")
                continue
            fits = [option for option in tried if option.fits]
            if not fits:
                continue
            largest = max(fits, key=lambda option: option.recipe.batch_size)
            self.found[kind] = largest.recipe.batch_size
            if best is not None and largest.seconds_per_token >= best.seconds_per_token:
                break
            best = largest
            if left_to_gain(tried) < WORTH_A_RUNG:
                break
        if best is not None:
            self.smallest += [
                rung for rung in savers
                if rung.checkpointing and self._least_bytes(rung) <= self.room_bytes
            ][:1]  # fmt: skip
            free = not best.recipe.checkpointing and best.recipe.offload == "none"
            if free and not self._ruled_out(plain):  # it may do without any saver
                self._simulate(plain.but(batch_size=best.recipe.batch_size))

    def _ruled_out(self, rung: Recipe) -> bool:
        """Whether arithmetic alone shows that ``rung`` cannot fit."""
        least = self._least_bytes(rung)
        if self.smallest_bound is None or least < self.smallest_bound[0]:
            self.smallest_bound = least, rung
        self.ruled_out += least > self.room_bytes
        return least > self.room_bytes

    def _least_bytes(self, rung: Recipe) -> int:
        return candidates.least_bytes(rung, self.sizes, self.gpus)

    def _largest_batch(self, rung: Recipe, start: int) -> list[Option]:
        """The options tried on the way to the largest batch that fits."""
        least_bytes = self._least_bytes(rung)
        tried: dict[int, Option] = {}
        batch: int | None = start
        while batch is not None:
            tried[batch] = self._simulate(rung.but(batch_size=batch))
            needed = {size: option.needed_bytes for size, option in tried.items()}
            batch = next_batch(needed, self.room_bytes, least_bytes, self.most_batch)
        return list(tried.values())

    def _simulate(self, recipe: Recipe) -> Option:
        if recipe not in self.options:
            found = estimate(self.config, gpu=self.card, recipe=recipe)
            self.options[recipe] = self._option(recipe, found)
        return self.options[recipe]

    def _option(self, recipe: Recipe, found: Estimate) -> Option:
        sizes, changes = self.sizes, candidates.changes(recipe, self.sizes)
        needed = found.peak_reserved_bytes + candidates.bucket_bytes(recipe, sizes, self.gpus)
        crossing = candidates.link_bytes(recipe, sizes, bytes_to_host(found))
        flops, moved = found.flops or 0, found.moved_bytes or 0
        return Option(
            recipe=recipe,
            group=GROUPS[bool(changes)],
            changes=changes,
            costs=candidates.costs(recipe, crossing, found.host_bytes, found.sent_bytes),
            needed_bytes=needed,
            host_bytes=found.host_bytes,
            fits=needed <= self.room_bytes,
            flops=flops,
            moved_bytes=moved,
            link_bytes=crossing,
            seconds_per_token=least_seconds(self.card, recipe.precision, flops, moved, crossing)
            / (recipe.tokens * self.gpus),
            sent_bytes=found.sent_bytes,
        )

    def larger_gpu(self) -> str | None:
        """The smallest card of the catalogue that holds the option that takes the least."""
        smallest = min(self.options.values(), key=lambda option: option.needed_bytes)
        for card in catalogue.gpus():
            if card.budget_bytes <= self.card.budget_bytes:
                continue
            try:
                found = estimate(self.config, gpu=card, recipe=smallest.recipe)
            except InputError:  # it cannot run the recipe
                continue
            needed = found.peak_reserved_bytes + candidates.bucket_bytes(
                smallest.recipe, self.sizes, self.gpus
            )
            if found.fits and needed <= room_bytes(card.budget_bytes, self.margin):
                return card.key
        return None


def next_batch(
    needed: Mapping[int, int], room_bytes: int, least_bytes: int, most_batch: int = MOST_BATCH
) -> int | None:
    """The batch to simulate next on the way to the largest that fits; None when it is found.

    Args:
        needed: bytes that each batch tried so far takes; powers of two.
        room_bytes: what may be taken.
        least_bytes: what is taken whatever the batch, at the least.
        most_batch: the largest worth trying, a power of two.
    """
    fit = [batch for batch, nbytes in needed.items() if nbytes <= room_bytes]
    miss = [batch for batch, nbytes in needed.items() if nbytes > room_bytes]
    most = min(miss) // 2 if miss else most_batch
    low = max(fit, default=0)
    if low >= most:
        return None
    (x1, y1), (x2, y2) = [(0, least_bytes), *sorted(needed.items())][-2:]
    slope = max((y2 - y1) / (x2 - x1), 1)
    predicted = x2 + (room_bytes - y2) / slope
    guess = 1 << max(0, math.floor(math.log2(max(predicted, 1))))
    if len(needed) > 1 and low and guess <= low:
        return None  # two batches say that twice the largest does not fit
    return min(max(guess, 2 * low, 1), most)


def left_to_gain(tried: Iterable[Option]) -> float:
    """Which share of the bound even an endless batch would save the largest that fits.

    The bound per token is a straight line in 1 / batch; two batches give it. From one: all of it.
    """
    ordered = sorted(tried, key=lambda option: option.recipe.batch_size)[-2:]
    best = max((o for o in ordered if o.fits), key=lambda o: o.recipe.batch_size, default=None)
    if best is None or len(ordered) < 2:
        return 1.0
    (x1, y1), (x2, y2) = [(1 / o.recipe.batch_size, o.seconds_per_token) for o in ordered]
    return (y1 - y2) / (x1 - x2) / best.recipe.batch_size / best.seconds_per_token


def bytes_to_host(found: Estimate) -> int:
    """Bytes allocated on the host in the last step: with offloaded activations, those sent."""
    trace = found.run.trace
    start = trace.steps()[-1][0]
    return sum(change for index, _, change in trace.changes("cpu") if index >= start and change > 0)


def least_seconds(
    card: Gpu, precision: str, flops: int, moved_bytes: int, crossing_bytes: int
) -> float:
    """What a step takes on ``card`` at the least; without a published rate, its bytes alone."""
    rate = card.fp16_tflops if precision == "amp-fp16" else card.bf16_tflops or card.fp16_tflops
    if rate and precision == "fp32":
        rate /= 2  # TF32's; plain float32 is slower still
    arithmetic = flops / (rate * 1e12) if rate else 0.0
    link = candidates.link_gb_per_s(card)
    crossing = crossing_bytes / (link * 1e9) if link else 0.0
    return max(arithmetic, moved_bytes / (card.bandwidth_gb_per_s * 1e9)) + crossing


def room_bytes(capacity_bytes: int, margin: float) -> int:
    """What a recipe may take of ``capacity_bytes``."""
    return math.floor(capacity_bytes * (1 - margin))

"""The search behind `advice`: simulates recipes, and finds the largest batch of each.

The levels of a configuration are tried until one lowers the bound no further, or an endless batch
would not lower it by ``WORTH_A_LEVEL``. A configuration that changes more is not tried where one
with fewer changes fits without offloading, nor float32 where anything else fits that trains every
weight. The batch is a power of two, at most ``MOST_BATCH``: memory is close to a straight line in
it, two batches predict the largest that fits, and that one is simulated too.

Limits: what was left out by these rules might have had a lower bound by less than they say.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from gpumem.estimation import recipes_to_try
from gpumem.estimation.estimate import Estimate, estimate
from gpumem.estimation.recipe import MOST_TOKENS, Recipe
from gpumem.estimation.weight_shapes import Shapes, shapes_of
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import Gpu
from gpumem.hardware.least_seconds import least_seconds
from gpumem.inputs import InputError
from gpumem.trace import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GROUPS = ("same", "changed")
#: Sequences. What a step costs whatever the batch is shared by this many; more hardly help.
MOST_BATCH = 32
#: A level that checkpoints computes at least a fifth more, one that offloads waits for the link.
WORTH_A_LEVEL = 0.2


@dataclass(frozen=True)
class Option:
    """One recipe that was simulated.

    Attributes:
        group: ``"same"`` training as float32 AdamW by other means, or ``"changed"``.
        changes: what it trains otherwise, a sentence each.
        costs: what it pays without training otherwise, a sentence each.
        needed_bytes: what PyTorch's allocator takes of each GPU, DDP's buckets included.
        host_bytes: in host memory, for each GPU.
        fits: with the margin, and in the host's memory where that was given.
        flops, moved_bytes, link_bytes, sent_bytes: of one step on one GPU.
        seconds_per_token: lower bound, of all GPUs together, without what they send each other.
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

    def sort_key(self) -> tuple:
        """Sort by the fewest changes, the lowest bound, the least memory."""
        return (len(self.changes), self.seconds_per_token, self.needed_bytes, str(self.recipe))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy; `Recipe.from_dict` reads its recipe."""
        return asdict(self) | {"recipe": self.recipe.to_dict()}


@dataclass
class Search:
    """Tries configurations level by level, and stores what it has simulated.

    A recipe leaves the share ``margin`` of each GPU free, and may take ``host_room_bytes`` of the
    host for each.
    """

    config: "PreTrainedConfig"
    gpu: Gpu
    gpus: int
    seq_len: int
    only: str | None
    margin: float
    host_room_bytes: int | None  # None: unlimited
    options: dict[Recipe, Option] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    ruled_out: int = 0
    # The largest batch that fitted each kind of level, in an earlier configuration.
    largest: dict[tuple, int] = field(default_factory=dict)
    # Of each configuration that fits, the first level that checkpoints.
    frugal: list[Recipe] = field(default_factory=list)
    least_of_all: Recipe | None = None

    def __post_init__(self) -> None:
        self.room_bytes = catalogue.room_bytes(self.gpu.budget_bytes, self.margin)
        self.shapes = shapes_of(self.config)
        self.most_batch = MOST_BATCH
        while self.most_batch > 1 and self.most_batch * self.seq_len > MOST_TOKENS:
            self.most_batch //= 2

    def all(self) -> None:
        """Try every configuration that could be the best."""
        for configuration in recipes_to_try.configurations(self.gpu, self.seq_len, self.only):
            if not self._surpassed(configuration):
                self._try_levels(configuration)
        # How small each group can be made, for the frontier.
        same = [level for level in self.frugal if not recipes_to_try.changes(level)]
        changed = [level for level in self.frugal if recipes_to_try.changes(level)]
        for levels in filter(None, (same, changed)):
            self._simulate(min(levels, key=self._least_bytes))
        if not self.options and self.least_of_all:
            self._simulate(self.least_of_all)  # to say by how much it misses

    def _surpassed(self, configuration: Recipe) -> bool:
        """Return whether a configuration that changes less fits without offloading."""
        if configuration.lora:
            return False
        full = [o for o in self.options.values() if o.fits and o.recipe.lora is None]
        if configuration.precision == "fp32":
            return bool(full)
        count = len(recipes_to_try.changes(configuration))
        if configuration.optimizer == "paged-adamw8bit":  # counts as one change more
            count += 1
        return any(o.recipe.offload == "none" and 0 < len(o.changes) < count for o in full)

    def _try_levels(self, configuration: Recipe) -> None:
        plain, *levels = recipes_to_try.levels(configuration, self.gpu, self.gpus)
        best: Option | None = None
        for level in levels:
            if self._ruled_out(level):
                continue
            kind = level.checkpointing, level.offload, level.ranks
            start = min(2 * best.recipe.batch_size, self.most_batch) if best else 1
            try:
                tried = self._largest_batch(level, self.largest.get(kind, start))
            except InputError as error:
                self.refused.append(f"{level}: {error}")
                continue
            fits = [option for option in tried if option.fits]
            if not fits:
                continue
            largest = max(fits, key=lambda option: option.recipe.batch_size)
            self.largest[kind] = largest.recipe.batch_size
            if best is not None and largest.seconds_per_token >= best.seconds_per_token:
                break
            best = largest
            if left_to_gain(tried) < WORTH_A_LEVEL:
                break
        if best is None:
            return
        frugal = [level for level in levels if level.checkpointing]
        frugal = [level for level in frugal if self._least_bytes(level) <= self.room_bytes]
        self.frugal += frugal[:1]
        without_cost = not best.recipe.checkpointing and best.recipe.offload == "none"
        if without_cost and not self._ruled_out(plain):  # it may need no technique at all
            self._simulate(plain.but(batch_size=best.recipe.batch_size))

    def _ruled_out(self, level: Recipe) -> bool:
        """Return whether arithmetic alone shows that ``level`` cannot fit, and count it."""
        least_bytes = self._least_bytes(level)
        if self.least_of_all is None or least_bytes < self._least_bytes(self.least_of_all):
            self.least_of_all = level
        if least_bytes <= self.room_bytes:
            return False
        self.ruled_out += 1
        return True

    def _least_bytes(self, level: Recipe) -> int:
        return recipes_to_try.least_bytes(level, self.shapes, self.gpus)

    def _largest_batch(self, level: Recipe, start: int) -> list[Option]:
        """Return the options tried on the way to the largest batch that fits."""
        options: list[Option] = []
        taken: dict[int, int] = {}
        batch: int | None = start
        while batch is not None:
            option = self._simulate(level.but(batch_size=batch))
            options.append(option)
            taken[batch] = self._taken(option.needed_bytes, option.host_bytes)
            least_bytes = self._least_bytes(level)
            batch = next_batch(taken, self.room_bytes, least_bytes, self.most_batch)
        return options

    def _taken(self, needed_bytes: int, host_bytes: int) -> int:
        """Return the scarcer of both needs, as the same share of the GPU's room."""
        if self.host_room_bytes is None:
            return needed_bytes
        return max(needed_bytes, math.ceil(host_bytes * self.room_bytes / self.host_room_bytes))

    def _simulate(self, recipe: Recipe) -> Option:
        if recipe in self.options:
            return self.options[recipe]
        found = estimate(self.config, gpu=self.gpu, recipe=recipe, loops=False)
        run, needed = found.run, self._needed_bytes(found)
        changes = recipes_to_try.changes(recipe, self.shapes)
        crossing, seconds = link_and_bound(found, self.shapes)
        option = Option(
            recipe=found.recipe,  # the model may have one attention only
            group="changed" if changes else "same",
            changes=changes,
            costs=recipes_to_try.costs(recipe, crossing, run.sent_bytes),
            needed_bytes=needed,
            host_bytes=run.host_bytes,
            fits=self._taken(needed, run.host_bytes) <= self.room_bytes,
            flops=run.flops,
            moved_bytes=run.moved_bytes,
            link_bytes=crossing,
            seconds_per_token=seconds / (recipe.tokens * self.gpus),
            sent_bytes=run.sent_bytes,
        )
        self.options[recipe] = option
        return option

    def _needed_bytes(self, found: Estimate) -> int:
        buckets = recipes_to_try.bucket_bytes(found.recipe, self.shapes, self.gpus)
        return found.peak_reserved_bytes + buckets

    def larger_gpu(self, recipe: Recipe) -> str | None:
        """Return the smallest larger GPU of the catalogue that holds ``recipe``; None if none."""
        for gpu in catalogue.larger_gpus(self.gpu):
            room_bytes = catalogue.room_bytes(gpu.budget_bytes, self.margin)
            if room_bytes < self._least_bytes(recipe):
                continue
            try:
                found = estimate(self.config, gpu=gpu, recipe=recipe, loops=False)
            except InputError:  # it cannot run the recipe
                continue
            if found.fits and self._needed_bytes(found) <= room_bytes:
                return gpu.key
        return None


def next_batch(
    needed: Mapping[int, int], room_bytes: int, least_bytes: int, most_batch: int = MOST_BATCH
) -> int | None:
    """Return the batch to simulate next on the way to the largest that fits; None when it is found.

    ``needed`` has the bytes that each batch tried so far takes, ``least_bytes`` is a lower bound
    for any batch. Batches are powers of two.
    """
    fit = [batch for batch, nbytes in needed.items() if nbytes <= room_bytes]
    miss = [batch for batch, nbytes in needed.items() if nbytes > room_bytes]
    most = min(miss) // 2 if miss else most_batch
    low = max(fit, default=0)
    if low >= most:
        return None
    points = [(0, least_bytes), *sorted(needed.items())]
    (batch1, bytes1), (batch2, bytes2) = points[-2:]
    bytes_per_batch = max((bytes2 - bytes1) / (batch2 - batch1), 1)
    predicted = max(batch2 + (room_bytes - bytes2) / bytes_per_batch, 1)
    guess = 2 ** math.floor(math.log2(predicted))
    if len(needed) > 1 and low and guess <= low:
        return None  # two batches say that twice the largest does not fit
    return min(max(guess, 2 * low, 1), most)


def left_to_gain(tried: Iterable[Option]) -> float:
    """Return the share of the bound that an endless batch would save the largest that fits.

    The bound per token is a straight line in 1 / batch; two batches give it. From one: all of it.
    """
    ordered = sorted(tried, key=lambda option: option.recipe.batch_size)[-2:]
    fitting = [option for option in ordered if option.fits]
    if not fitting or len(ordered) < 2:
        return 1.0
    best = fitting[-1]
    (x1, y1), (x2, y2) = [(1 / o.recipe.batch_size, o.seconds_per_token) for o in ordered]
    return (y1 - y2) / (x1 - x2) / best.recipe.batch_size / best.seconds_per_token


def link_and_bound(found: Estimate, shapes: Shapes) -> tuple[int, float]:
    """Return the bytes that cross between host and GPU in a step, and a step's least seconds: those
    of the listed GPU nearest to it where nothing is known of its speed."""
    run, recipe = found.run, found.recipe
    crossing = recipes_to_try.link_bytes(recipe, shapes, bytes_to_host(run.trace))
    flops = {recipe.precision: run.flops}
    gpu = catalogue.rated(found.gpu)
    return crossing, least_seconds(gpu, flops, run.moved_bytes, crossing, run.sent_bytes)


def bytes_to_host(trace: Trace) -> int:
    """Return the bytes allocated on the host in the last step: offloaded activations."""
    start = trace.steps()[-1][0]
    return sum(change for index, _, change in trace.changes("cpu") if index >= start and change > 0)

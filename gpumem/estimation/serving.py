"""serve(): what answering takes on a GPU, without the GPU.

    lab.serve("Llama-3.1-8B", gpu="rtx-4090", users=4, prompt_tokens=2048, new_tokens=512)

transformers' own ``generate`` runs on fake tensors: all users' prompts in one batch, then a token
for each of them in every pass. Few layers and few passes are traced, repeated to the model's depth
and the conversation's length, and replayed through PyTorch's allocator.

Limits: those of `simulate` and of `gpumem.fake_cuda.pass_extension`. Prompts have one length, but
for what ``padded=True`` says of their mask, and no answer ends early. A static cache is taken
without ``torch.compile``, whose CUDA graphs keep memory of their own. What cuDNN's attention takes
for itself (GPUs with compute capability 9 and 10) is not known. ``cache="paged"`` is vLLM's
arithmetic: `gpumem.estimation.paged`.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from gpumem.allocator.attention_workspaces import divides_keys, keys_in_block
from gpumem.allocator.replay import Player
from gpumem.allocator.workspaces import with_workspaces
from gpumem.estimation.estimate import (
    assumed_gpu,
    memory_lines,
    part_lines,
    repeated_layers,
    verdict,
)
from gpumem.estimation.generation import MOST, MOST_TOKENS, Serving, answering
from gpumem.estimation.model_building import possible_for
from gpumem.estimation.paged import (
    Paged,
    answers,
    batch_of,
    has_windows,
    positions_of,
    refuse_other_caches,
)
from gpumem.estimation.training import import_libraries
from gpumem.fake_cuda.cuda_names import GPU_DEVICE
from gpumem.fake_cuda.pass_extension import FIRST, Decoding, Role, living_before
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError
from gpumem.models.catalogue import image_tokens
from gpumem.models.config import find_generator
from gpumem.out_of_memory import SimulatedOutOfMemory
from gpumem.simulation import Log, recording
from gpumem.torch_release import following, torch_release
from gpumem.trace import ROUNDING, Category, Storage, Trace
from gpumem.units import as_printed

#: What a replay serves in some minutes.
MOST_CHANGES = 40_000_000
LOADING, PREFILL, LOGITS, DECODE = "loading", "prefill", "prefill, its logits", "decode"
CACHE = str(Category.CACHE)
#: Where a search for what fits begins, whatever was asked for before.
_START = {"users": 1, "prompt_tokens": 2048}
_LASTING = (Category.WEIGHTS, Category.BUFFERS)


@dataclass(frozen=True)
class Served:
    """What one batch of conversations takes on one GPU.

    Attributes:
        model, gpu, serving: what was asked for.
        peak_allocated_bytes: most bytes in blocks that tensors and workspaces use.
        peak_reserved_bytes: most bytes that PyTorch's allocator takes: this must fit.
        parts: what the allocated peak is made of, by name; sums to it. Of a dynamic cache it has
            the copy of one layer's that is being made longer.
        peak_in: where it lies: ``"prefill"``, ``"prefill, its logits"`` or ``"decode"``.
        peak_pass: in which forward pass, from 1; each gives every user a token.
        cache_bytes: the cache's at the end, of all users.
        cache_bytes_per_token: what a token more of one user adds to it; to a window that is full,
            nothing.
        read_bytes: what a pass reads at least of the weights.
        pass_allocated_bytes, pass_reserved_bytes: the most of each pass.
        failed_in: the pass whose request the GPU could not serve; None if all were.
        torch: the release of PyTorch whose rules it follows.
        assumed: why this GPU was taken, in a sentence; None if it was named.
    """

    model: str
    gpu: Gpu
    serving: Serving
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    parts: Mapping[str, int]
    peak_in: str
    peak_pass: int
    cache_bytes: int
    cache_bytes_per_token: int
    first_cache_bytes: int = field(repr=False)
    weights_bytes: int
    read_bytes: int
    pass_allocated_bytes: tuple[int, ...] = field(repr=False)
    pass_reserved_bytes: tuple[int, ...] = field(repr=False)
    failed_in: int | None
    torch: str
    assumed: str | None = None
    config: Any = field(default=None, repr=False, compare=False)
    seconds_to_estimate: float = field(default=0.0, compare=False)

    @property
    def capacity_bytes(self) -> int:
        """What the GPU leaves the allocator, the CUDA context set aside."""
        return self.gpu.budget_bytes

    @property
    def fits(self) -> bool:
        """Whether the GPU serves every request."""
        return self.failed_in is None

    def most_users(self) -> int:
        """Return how many users' conversations of this length fit together: one more does not. 0:
        not even one. Several numbers of users are replayed for it, which takes some time."""
        most = MOST_TOKENS // self.serving.prompt_tokens
        return self._boundary("users", most)

    def longest_prompt_tokens(self) -> int:
        """Return the longest prompt with which as many users, and as many new tokens, fit: one
        token more does not, or is more than the model knows positions. 0: no prompt does. Takes
        as long as `most_users`."""
        known = positions_of(self.config) or MOST_TOKENS
        most = min(known - self.serving.new_tokens + 1, MOST_TOKENS // self.serving.users)
        return self._boundary("prompt_tokens", most, least=image_tokens(self.config) + 1)

    @property
    def bound_tokens_per_second(self) -> float | None:
        """No GPU of this bandwidth makes more tokens a second, of all users together, after the
        first: each pass reads the weights, and what is cached, once. None where the bandwidth is
        unknown or one token is all. An upper bound, never a time."""
        if self.gpu.bandwidth_gb_per_s is None or self.serving.new_tokens == 1:
            return None
        cached_bytes = (self.first_cache_bytes + self.cache_bytes) / 2
        seconds = (self.read_bytes + cached_bytes) / (self.gpu.bandwidth_gb_per_s * 1e9)
        return self.serving.users / seconds

    def _boundary(self, name: str, most: int, least: int = 1) -> int:
        """Return a value of a field that fits, from ``least`` to ``most``, where the next does not;
        0 if none does.

        Some larger one may fit again: it depends on how requests meet the blocks that are free.

        A guess is where the bytes reserved for the last two values would meet the capacity; every
        third is in the middle of what is left.
        """
        most = min(most, MOST[name])
        fitting, failing = least - 1, most + 1
        now, last = min(max(_START[name], least), most), (0, self.weights_bytes)
        guesses = 0
        while failing - fitting > 1:
            found = self._with(name, now)
            guesses += 1
            if found.fits:
                fitting = now
            else:
                failing = now
            slope = (found.peak_reserved_bytes - last[1]) / (now - last[0])
            last = now, found.peak_reserved_bytes
            guess = (fitting + failing) // 2
            if guesses % 3 and slope > 0:
                guess = now + int((self.capacity_bytes - found.peak_reserved_bytes) / slope)
            now = min(max(guess, fitting + 1), failing - 1)
        return fitting if fitting >= least else 0

    def _with(self, name: str, value: int) -> "Served":
        if getattr(self.serving, name) == value:
            return self
        changed = self.serving.but(**{name: value})
        with following(None if self.torch == torch_release() else self.torch):
            return _served(self.model, self.config, changed, self.gpu)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return {
            "model": self.model,
            "gpu": self.gpu.key,
            "gpu_assumed": self.assumed,
            "torch": self.torch,
            "serving": self.serving.to_dict(),
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "parts": dict(self.parts),
            "peak_in": self.peak_in,
            "peak_pass": self.peak_pass,
            "cache_bytes": self.cache_bytes,
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "weights_bytes": self.weights_bytes,
            "capacity_bytes": self.capacity_bytes,
            "fits": self.fits,
            "failed_in": self.failed_in,
            "bound_tokens_per_second": self.bound_tokens_per_second,
            "seconds_to_estimate": round(self.seconds_to_estimate, 3),
        }

    _repr_pretty_ = as_printed

    def __str__(self) -> str:
        """Write the verdict first, then what it rests on; the users that fit are looked for."""
        where = f"{self.peak_in}, pass {self.peak_pass} of {self.serving.new_tokens}"
        lines = [
            f"{self.model} on {self.gpu.name}: {verdict(self)}",
            *(f"  {line}" for line in (self.serving, self.assumed) if line),
            "",
            *memory_lines(self, ("KV cache", self.cache_bytes, "at the end, of all users")),
            "",
            f"  At the allocated peak ({where}):",
            *part_lines(self.parts),
            "",
            *answers(self),
        ]
        lines.append(f"  The allocator's rules are those of PyTorch {self.torch}.")
        return "\n".join(lines)


def serve(
    model: Any,
    *,
    gpu: str | Gpu | None = None,
    serving: Serving | None = None,
    torch: str | None = None,
    **changes: Any,
) -> Served | Paged:
    """Return what answering with ``model`` takes on ``gpu``.

    Args:
        model: a model of the table, a folder with a ``config.json``, a hub id when online, a
            transformers config.
        gpu: a name from the catalogue; by default as for `estimate`.
        serving: how it answers; by default one user's 2048 + 512 tokens in bf16.
        torch: the release of PyTorch that will run, as "2.10"; by default the installed one.
        **changes: fields of ``serving`` to change, ``users=16``.

    Raises:
        InputError: unknown model, GPU, field or release, a `Serving` that contradicts itself, or
            one that the GPU or the model cannot do.
    """
    started = time.perf_counter()
    serving = (serving or Serving()).but(**changes)
    assumed = None
    if gpu is None:
        gpu, assumed = assumed_gpu(serving)
    gpu = catalogue.gpu(gpu)
    serving.check(gpu)
    name, config = find_generator(model)
    serving = possible_for(config, serving)
    import_libraries(serving)
    with following(torch):
        found = (_paged if serving.cache == "paged" else _served)(name, config, serving, gpu)
    seconds = time.perf_counter() - started
    return replace(found, assumed=assumed, seconds_to_estimate=seconds)


# --- traces ---------------------------------------------------------------------------------------


class _Enough(BaseException):
    """The passes that are wanted have been traced."""


def passes_log(
    name: str, config: Any, serving: Serving, gpu: Gpu, skipped: int, count: int, layers: int | None
) -> Log:
    """Return the log of the first ``count`` forward passes of ``generate``, each a step.

    The prompts are ``skipped`` tokens longer. Errors as for `serve`.
    """
    begun, traces = 0, []
    new_tokens = serving.new_tokens - skipped
    if serving.cache != "static":
        new_tokens = max(new_tokens, count + 1)  # traced beyond the end, to see what repeats
    with recording(gpu) as tracker:
        answer = answering(name, config, serving, GPU_DEVICE, layers)

        def begins(*_: Any) -> None:
            nonlocal begun
            if begun:
                tracker.end_step()
            if begun == count:
                traces.append(tracker.trace())
                raise _Enough
            begun += 1

        answer.model.register_forward_pre_hook(begins)
        try:
            answer(skipped, new_tokens)
            tracker.end_step()
            traces.append(tracker.trace())
        except _Enough:
            pass
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise InputError(
                f"{name} asks for a value to go on ({error.func}), and a simulation has none: run "
                "your script with `labkit phantom`"
            ) from None
    return Log({}, traces[0], tracker.step_work)


def decoding_of(name: str, config: Any, serving: Serving, gpu: Gpu) -> Decoding:
    """Return all passes of a batch of conversations."""

    def trace_at(skipped: int, count: int) -> Trace:
        def log_of(config: Any, layers: int | None) -> Log:
            return passes_log(name, config, serving, gpu, skipped, count, layers)

        repeated = repeated_layers(config, log_of)
        log = repeated[0] if repeated else log_of(config, None)
        return with_workspaces(log.trace, gpu)

    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    static = serving.cache == "static"
    # Pass n reads prompt_tokens + n - 1 tokens. With each block of keys flash may take another way.
    lengths = range(serving.prompt_tokens, serving.seq_len + 1)
    blocks = [n for n in lengths if n % keys_in_block(size) == 0]
    divided = not static and divides_keys(serving.users * heads, gpu)
    edges = [n - serving.prompt_tokens + 1 for n in blocks if divided]
    return Decoding(trace_at, serving.new_tokens, edges, fixed=static)


# --- the replay -----------------------------------------------------------------------------------


@dataclass
class _Played:
    """What the allocator did with all passes."""

    peak_bytes: int = 0
    peak: tuple[int, int] = (0, 0)  # the pass, and the change in it; (0, 0): before them
    reserved_bytes: int = 0
    failed_in: int | None = None
    setup: Mapping[Category, int] = field(default_factory=dict)  # made of what, at its own peak
    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)


def _play(decoding: Decoding, budget_bytes: int) -> _Played:
    trace, played = decoding.setup, _Played()
    player = Player(trace, budget_bytes, expandable_segments=False)
    for index in range(trace.step_starts[0]):
        if trace.storages[trace.events[index].storage].device == trace.device:
            player.play(index)
    allocator = player.allocator
    if player.failure:
        played.failed_in = 0
    played.peak_bytes, played.setup = allocator.peak_allocated_bytes, player.at_peak
    held = {role: player.handle(number) for number, role in living_before(trace).items()}
    free, handles = allocator.free, []

    def allocate(nbytes: int) -> int:
        try:
            return allocator.allocate(nbytes)
        except SimulatedOutOfMemory:
            played.failed_in, allocator.budget_bytes = number, None
            return allocator.allocate(nbytes)

    for number, stretch in decoding.passes():
        sizes = stretch.sizes(number)
        handles = [0] * len(sizes)
        top = allocator.peak_allocated_bytes = allocator.allocated_bytes
        for position, change in enumerate(stretch.passed.changes):
            if type(change) is not int:
                free(held.pop(change))
            elif change < 0:
                free(handles[~change])
            else:
                handles[change] = allocate(sizes[change])
                if allocator.allocated_bytes > top:
                    top = allocator.allocated_bytes
                    if top > played.peak_bytes:
                        played.peak_bytes, played.peak = top, (number, position)
        held |= {role: handles[own] for role, own in stretch.passed.left.items()}
        played.allocated.append(top)
        played.reserved.append(allocator.peak_reserved_bytes)
    played.reserved_bytes = allocator.peak_reserved_bytes
    return played


# --- what it is made of ---------------------------------------------------------------------------


class _Alive:
    """What is alive when a pass begins, by role, with its bytes."""

    def __init__(self, decoding: Decoding, number: int) -> None:
        setup = decoding.setup
        self.storages: dict[Role, tuple[Storage, int]] = {}
        self.cached: set[Role] = set()
        for index, role in living_before(setup).items():
            self.storages[role] = setup.storages[index], setup.storages[index].nbytes
        for stretch in decoding.stretches:
            if stretch.first >= number:
                break
            for change in stretch.passed.changes:
                if type(change) is not int:
                    self.storages.pop(change, None)
            sizes = stretch.sizes(min(stretch.last, number - 1))
            for role, own in stretch.passed.left.items():
                self.storages[role] = stretch.passed.storages[own], sizes[own]
                if is_cached(stretch.passed.storages[own]):
                    self.cached.add(role)

    def cache_bytes(self) -> int:
        return sum(self.storages[role][1] for role in self.cached if role in self.storages)


def is_cached(storage: Storage) -> bool:
    """Return whether what a pass leaves belongs to the cache: a module made it, and no sampler."""
    return bool(storage.module) and storage.category is Category.TEMPORARY


def _part(storage: Storage, cached: bool) -> str:
    if cached:
        return CACHE
    if storage.category in _LASTING:
        return str(Category.WEIGHTS)
    if storage.category is Category.UNATTRIBUTED:
        return str(Category.WORKSPACES)
    return str(Category.ACTIVATIONS)


def _parts(decoding: Decoding, played: _Played) -> dict[str, int]:
    """Return what the allocated peak is made of."""
    number, position = played.peak
    live: Counter[str] = Counter()
    if not number:
        for category, nbytes in played.setup.items():
            workspace = category is Category.UNATTRIBUTED
            live[ROUNDING if workspace else str(Category.WEIGHTS)] += nbytes
        return dict(live)
    alive = _Alive(decoding, number)
    for role, (storage, nbytes) in alive.storages.items():
        live[_part(storage, role in alive.cached)] += nbytes
    stretch = next(s for s in decoding.stretches if s.first <= number <= s.last)
    passed, sizes = stretch.passed, stretch.sizes(number)
    left = set(passed.left.values())
    for change in passed.changes[: position + 1]:
        if type(change) is not int:
            storage, nbytes = alive.storages[change]
            live[_part(storage, change in alive.cached)] -= nbytes
        else:
            own = max(change, ~change)
            storage = passed.storages[own]
            cached = own in left and is_cached(storage)
            live[_part(storage, cached)] += sizes[own] if change >= 0 else -sizes[own]
    live[ROUNDING] = played.peak_bytes - live.total()
    order = (str(Category.WEIGHTS), CACHE, str(Category.ACTIVATIONS), str(Category.WORKSPACES))
    return {name: live[name] for name in (*order, ROUNDING) if live[name]}


def _place(decoding: Decoding, played: _Played) -> str:
    """Return in what the allocated peak lies."""
    number, position = played.peak
    if number != 1:
        return DECODE if number else LOADING
    passed = decoding.stretches[0].passed
    output = next(s.module for s in reversed(passed.storages) if s.module)  # the last that ran
    change = passed.changes[position]
    at = passed.storages[max(change, ~change)]
    return LOGITS if at.module in ("", output) else PREFILL


def _read_bytes(config: Any, weights: list[tuple[Storage, int]]) -> int:
    """Return the bytes of ``weights`` that a pass reads at least: of experts those of one token,
    and of two tables of the vocabulary's size the output's."""
    text = config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    read, tables = 0, []
    for storage, nbytes in weights:
        if len(storage.shape) == 3:
            nbytes = nbytes * min(chosen, storage.shape[0]) // storage.shape[0]
        if storage.shape == (text.vocab_size, text.hidden_size):
            tables.append(nbytes)
        read += nbytes
    return read - (tables[0] if len(tables) > 1 else 0)


def _cache_bytes(
    name: str, config: Any, serving: Serving, gpu: Gpu, decoding: Decoding | None = None
) -> int:
    """Return the bytes of the cache when all tokens are there."""
    if serving.cache != "static":
        decoding = decoding or decoding_of(name, config, serving, gpu)
        return _Alive(decoding, serving.new_tokens + 1).cache_bytes()
    # It has its size from the first pass on, and the last one ends without it.
    if serving.new_tokens == 1 and serving.prompt_tokens > 1:
        serving, decoding = serving.but(prompt_tokens=serving.prompt_tokens - 1, new_tokens=2), None
    decoding = decoding or decoding_of(name, config, serving, gpu)
    return _Alive(decoding, serving.new_tokens).cache_bytes()


def _served(name: str, config: Any, serving: Serving, gpu: Gpu) -> Served:
    decoding = decoding_of(name, config, serving, gpu)
    changes = sum(len(stretch.passed.changes) for _, stretch in decoding.passes())
    if changes > MOST_CHANGES:
        raise InputError(
            f"{serving.new_tokens} passes of this model take and free memory {changes:,} times, "
            f"and a replay serves {MOST_CHANGES:,}: ask for fewer new_tokens, or cache='paged'"
        )
    played = _play(decoding, gpu.budget_bytes)
    weights = [
        pair for pair in _Alive(decoding, 1).storages.values() if pair[0].category in _LASTING
    ]
    first_bytes = _Alive(decoding, 2).cache_bytes()
    cache_bytes = _cache_bytes(name, config, serving, gpu, decoding)
    if serving.cache != "static" and serving.new_tokens >= FIRST + 1:  # passes like each other
        before_bytes = _Alive(decoding, serving.new_tokens).cache_bytes()
        per_token = (cache_bytes - before_bytes) // serving.users
    elif has_windows(config):
        longer = serving.but(prompt_tokens=serving.prompt_tokens + 1)
        more_bytes = _cache_bytes(name, config, longer, gpu) - cache_bytes
        per_token = more_bytes // serving.users
    else:
        per_token = cache_bytes // (serving.users * serving.seq_len)
    if serving.cache == "static":
        token_bytes = cache_bytes // (serving.users * serving.seq_len)
        first_bytes = token_bytes * serving.users * serving.prompt_tokens
    return Served(
        model=name,
        gpu=gpu,
        serving=serving,
        peak_allocated_bytes=played.peak_bytes,
        peak_reserved_bytes=played.reserved_bytes,
        parts=_parts(decoding, played),
        peak_in=_place(decoding, played),
        peak_pass=played.peak[0],
        cache_bytes=cache_bytes,
        cache_bytes_per_token=per_token,
        first_cache_bytes=first_bytes,
        weights_bytes=sum(nbytes for _, nbytes in weights),
        read_bytes=_read_bytes(config, weights),
        pass_allocated_bytes=tuple(played.allocated),
        pass_reserved_bytes=tuple(played.reserved),
        failed_in=played.failed_in,
        torch=torch_release(),
        config=config,
    )


def _paged(name: str, config: Any, serving: Serving, gpu: Gpu) -> Paged:
    """Return what vLLM's cache holds: a rehearsal of its largest batch is simulated."""
    refuse_other_caches(name, config)
    tokens, conversations = batch_of(gpu)
    text = config.get_text_config()
    known = positions_of(config) or serving.seq_len + 1
    if serving.seq_len + 1 > known:  # vLLM counts the last token, too
        raise InputError(f"{name} knows {known} positions, and {serving.seq_len + 1} are asked for")
    rows = -(-tokens // min(tokens, known))
    rehearsal = serving.but(
        users=rows, prompt_tokens=tokens // rows, new_tokens=1, cache="dynamic", kv_dtype=None
    )
    decoding = decoding_of(name, config, rehearsal, gpu)
    passed, alive = decoding.stretches[0].passed, _Alive(decoding, 1)
    weights = [pair for pair in alive.storages.values() if pair[0].category in _LASTING]
    cached = {own for own in passed.left.values() if is_cached(passed.storages[own])}
    sizes, live, most = passed.sizes, 0, 0
    for change in passed.changes:
        if type(change) is int and max(change, ~change) not in cached:
            live += sizes[change] if change >= 0 else -sizes[~change]
            most = max(most, live)
    item_bytes = serving.weights_dtype.itemsize
    hidden_bytes = tokens * text.hidden_size * item_bytes
    logits_bytes = min(conversations, tokens) * text.vocab_size * (item_bytes + 4)
    per_token = sum(sizes[own] for own in cached) // (rows * (tokens // rows))
    return Paged(
        model=name,
        gpu=gpu,
        serving=serving,
        weights_bytes=sum(nbytes for _, nbytes in weights),
        activations_bytes=max(most, hidden_bytes + logits_bytes),
        cache_bytes_per_token=per_token // item_bytes if serving.kv_dtype else per_token,
        read_bytes=_read_bytes(config, weights),
        torch=torch_release(),
        config=config,
    )

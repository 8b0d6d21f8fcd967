"""What one process on a phantom GPU has to report: what held its memory, and how it ended.

`watch_script` makes it in the process, `labkit phantom` reads, judges and prints it there
where no PyTorch is loaded.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpumem.estimation.known_techniques import Effect
from gpumem.trace import WITHOUT_GRADIENTS, Phase, Timeline

#: Kinds of places; the model itself is one, before its first training pass, and each of its passes
#: is one where a loop keeps what it returns.
ARGUMENTS, LOADED, MOVED, CUDA, OPTIMIZER, LOADER, DDP = (
    "arguments", "loaded", "moved", "cuda", "optimizer", "loader", "ddp",
)  # fmt: skip
ACCELERATOR, LIGHTNING, TRL, MODEL, ENVIRONMENT, PASS, BACKWARD = (
    "accelerator", "lightning", "trl", "model", "environment", "pass", "backward",
)  # fmt: skip

ENDED_WELL = ("finished", "stopped")

#: Names of models, in this process: whose weights were not read, and whose tokenizers were stood
#: in for.
NOT_READ: list[str] = []
STOOD_IN: list[str] = []
#: Folders into which this process saved tensors of a phantom GPU.
SAVED_IN: list[str] = []


@dataclass(frozen=True)
class When:
    """Training step (0: before the first, or outside any), phase, module and line of code."""

    step: int
    phase: str
    module: str
    line: str

    def __str__(self) -> str:
        step = f"step {self.step}, {self.phase}"
        if self.phase in WITHOUT_GRADIENTS:
            step = f"{self.phase} after step {self.step}"
        if self.phase == Phase.OTHER:
            step = f"step {self.step}, outside forward and backward"
        if not self.step:
            step = self.phase
        return step + (f", in {module_name(self.module)}" if self.module else "")


def module_name(path: str) -> str:
    """Return a module's path as it is said in a sentence: a number alone says too little."""
    return f"module {path}" if path[:1].isdigit() or path.startswith("*") else path


@dataclass(frozen=True)
class Holder:
    """Blocks of one category, made in one part of a model (its numbers as ``*``) and line of code.

    ``line`` is the innermost outside PyTorch, ``users_line`` the innermost of the user's own code,
    ``dtype`` the type of numbers, where it is known.
    """

    nbytes: int
    blocks: int
    category: str
    module: str
    line: str
    users_line: str
    dtype: str = ""


@dataclass(frozen=True)
class PassesAlive:
    """Forward passes of one class of models that hold activations at the peak, all together."""

    model: str
    phase: str
    passes: int
    nbytes: int


@dataclass(frozen=True)
class FailedRequest:
    """A request that the GPU could not serve, and what was reserved then; ``stack`` are the
    innermost line of code outside PyTorch, and then the user's own, the innermost first."""

    nbytes: int
    reserved_bytes: int
    when: When
    stack: list[str]


@dataclass(frozen=True)
class DrawnRecord:
    """What `phantom_gpu.report_page` draws.

    Attributes:
        timeline: of the events kept, thinned; it ends where memory ran out.
        segments: as ``torch.cuda.memory_snapshot()`` has them, neighbouring blocks put together.
        segments_at: the moment of these.
    """

    timeline: Timeline
    segments: list[dict[str, Any]]
    segments_at: str


@dataclass(frozen=True)
class GpuReport:
    """What one GPU held.

    Attributes:
        index: its number in the machine, whatever CUDA_VISIBLE_DEVICES makes of it.
        capacity_bytes: what the driver leaves the program's processes.
        peak_allocated_bytes, peak_reserved_bytes: PyTorch's own ``memory_stats``.
        allocated_at, reserved_at: when these were reached.
        made_of: ``peak_allocated_bytes`` by category.
        holders: who held the most of it.
        retries: failed requests that succeeded once the cache was given back.
        errors: out-of-memory errors raised, ``failed`` the last of them.
        growth_bytes: what each further step leaves behind, ``growth`` who does, and ``grows_in``
            the phase: an evaluation's is what each further evaluation leaves behind.
        passes_alive: models of which more passes hold memory at the peak than they need.
        record: what was asked for with ``Orders.record``, at the process's end.
    """

    index: int
    name: str
    capacity_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_at: When
    reserved_at: When
    made_of: dict[str, int]
    holders: list[Holder]
    retries: int
    errors: int
    failed: FailedRequest | None
    growth_bytes: int
    growth: list[Holder]
    record: DrawnRecord | None = None
    grows_in: str = ""
    passes_alive: list[PassesAlive] = field(default_factory=list)


class Place(NamedTuple):
    """A call of the program that decides what a step takes; ``line`` is ``file:line`` of it, or the
    name of the class where the place is a model."""

    kind: str
    line: str


@dataclass(frozen=True)
class Edit:
    """What to write for a remedy.

    Attributes:
        place: where it is tried.
        line: ``file:line`` where ``code`` belongs; empty where that is not known.
        how: ``"arguments"`` that the call there gets, those that it goes ``"without"``, the
            ``"class"`` that is called in place of its own, statements that come ``"before"`` or
            ``"after"`` it, or a ``"variable"`` of the environment.
        code: that text.
    """

    place: Place
    line: str
    how: str
    code: str


@dataclass(frozen=True)
class Offer:
    """A remedy that applies to a program.

    Attributes:
        name: of the remedy; ``what`` says it in words.
        effect: what it changes in the training; ``changes`` in words.
        edits: what to write.
        excludes: names of remedies that cannot be made beside it.
    """

    name: str
    what: str
    effect: Effect
    changes: str
    edits: tuple[Edit, ...]
    excludes: tuple[str, ...] = ()


class Mistake(NamedTuple):
    """What a program does by mistake: its kind, what that costs and what to write instead, and
    ``file:line``."""

    kind: str
    says: str
    place: str


@dataclass(frozen=True)
class StepWork:
    """What an optimizer step computes and moves: the average of all steps but the first.

    Attributes:
        flops: operations by the precision of their operands: "fp32", "fp16", "bf16", "other".
        moved_bytes: read and written by operators, each by itself.
        crossing_bytes: copied between the computer's memory and the GPU.
        sent_bytes: to other ranks.
    """

    flops: dict[str, int]
    moved_bytes: int
    crossing_bytes: int
    sent_bytes: int


class CacheHeld(NamedTuple):
    """The most that a cache of keys and values held, for how many users and tokens of each, and
    what one token more of one user takes of it."""

    nbytes: int
    users: int
    tokens: int
    token_bytes: int


@dataclass(frozen=True)
class UnknownValue:
    """A value that nobody computed and that the program read, as zero."""

    line: str
    what: str
    times: int


@dataclass(frozen=True)
class ProcessReport:
    """What is known of one process.

    Attributes:
        script: its command line.
        rank: of a distributed job, else 0.
        ended: ``"finished"``, ``"stopped"`` after the steps asked for, ``"out of memory"``,
            ``"failed"`` by another error, ``"interrupted"``; empty where it ended without a word.
        error, error_stack: the error's text, and lines of code as for a `FailedRequest`.
        steps: optimizer steps taken.
        gpus: those that held anything.
        unknown: values read that nobody computed, the most often read first.
        host_bytes: the most memory that the process held, on the phantom.
        pinned_bytes: the most page-locked memory.
        work: of a step; None where fewer than two were taken.
        versions: of PyTorch and CUDA.
        weights_not_read: models that transformers loaded as zeros.
        tokenizers_stood_in: models whose tokenizer is another one.
        saved_in: folders that hold what was saved of a GPU, which are zeros.
        trainable, trained: tensors of optimizers that require a gradient, and how many had one.
        unsized_workspaces: libraries of NVIDIA's whose workspaces are not counted, since only they
            know how large these are.
        remedies: those that apply to the program, which none of them has tried yet.
        updates_itself: it has no optimizer of ``torch.optim``, and steps are its backward passes.
        cache: the largest of transformers' caches of keys and values; None where there was none.
        mistakes: of the program, once it has ended.
        allocator: what it has in place of PyTorch's caching allocator, which alone is watched.
        faults: of ours, which may have kept something out of this report.
    """

    script: str
    rank: int
    ended: str
    error: str
    error_stack: list[str]
    steps: int
    gpus: list[GpuReport] = field(default_factory=list)
    unknown: list[UnknownValue] = field(default_factory=list)
    host_bytes: int = 0
    pinned_bytes: int = 0
    work: StepWork | None = None
    versions: str = ""
    weights_not_read: list[str] = field(default_factory=list)
    tokenizers_stood_in: list[str] = field(default_factory=list)
    saved_in: list[str] = field(default_factory=list)
    trainable: int = 0
    trained: int = 0
    faults: list[str] = field(default_factory=list)
    unsized_workspaces: list[str] = field(default_factory=list)
    updates_itself: bool = False
    remedies: list[Offer] = field(default_factory=list)
    cache: CacheHeld | None = None
    mistakes: list[Mistake] = field(default_factory=list)
    allocator: str = ""

"""Run: the record of one execution of an experiment."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from gpumem.inputs import InputError, one_of, read_record
from gpumem.trace import Category, Trace, Work
from gpumem.units import format_bytes

Text = Annotated[str, Meta(max_length=200)]
Bytes = Annotated[int, Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, Meta(ge=0, lt=(1 << 63) - 1)]  # the most that msgspec compares with
Whole = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
ByCategory = Mapping[Literal[tuple(map(str, Category))], Bytes]


@dataclass(frozen=True)
class OutOfMemory:
    """Where a run ran out of memory.

    ``requested_bytes`` is the request that failed (0 where the error did not say),
    ``live_bytes`` what was live at that moment and ``by_category`` what it was made of.
    ``reserved_bytes`` is what PyTorch's caching allocator had taken; None where there is none.
    ``step`` counts from 1; 0 means the failure came before the first step.
    """

    requested_bytes: Bytes
    live_bytes: Bytes
    capacity_bytes: Bytes | None
    by_category: ByCategory
    step: Bytes
    phase: str
    module: str
    operator: str
    reserved_bytes: Bytes | None = None

    @classmethod
    def at_event(
        cls,
        trace: Trace,
        index: int,
        requested_bytes: int,
        capacity_bytes: int,
        live: Mapping[Category, int],
        reserved_bytes: int | None = None,
    ) -> "OutOfMemory":
        """Describe the failure of event ``index`` with the bytes ``live`` just before it."""
        event = trace.events[index]
        storage = trace.storages[event.storage]
        return cls(
            requested_bytes=requested_bytes,
            live_bytes=sum(live.values()),
            capacity_bytes=capacity_bytes,
            by_category=named_categories(live),
            step=trace.step_at(index),
            phase=str(event.phase),
            module=storage.module,
            operator=storage.operator,
            reserved_bytes=reserved_bytes,
        )

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        when = f"step {self.step}, {self.phase}" if self.step else "before the first step"
        room = f" of {format_bytes(self.capacity_bytes)}" if self.capacity_bytes else ""
        asked = format_bytes(self.requested_bytes) if self.requested_bytes else "more memory"
        in_use = f"with {format_bytes(self.live_bytes)}{room} in use"
        if self.reserved_bytes is not None:  # what decides: there may be room between the tensors
            reserved, used = format_bytes(self.reserved_bytes), format_bytes(self.live_bytes)
            in_use = f"with {reserved}{room} reserved, {used} of that in use"
        return f"out of memory: asked for {asked} {in_use} ({when}{where})"


@dataclass(frozen=True)
class Run:
    """What one execution of an experiment gave. The same record in all four modes.

    Attributes:
        name: the experiment.
        parameters: the arguments it ran with (numbers, strings, booleans or None).
        mode: ``measured`` on a GPU, ``phantom`` on one that is not there, ``tracked`` on a CPU,
            ``simulated`` on fake tensors.
        device: what ran it, or for a simulation what it stands for ("T4", "NVIDIA H200", "CPU").
        peak_bytes: most bytes allocated at once; up to the failure if it ran out of memory.
        by_category: what the peak was made of; sums to ``peak_bytes``.
        step_peaks_bytes: the same per training step, in order.
        reserved_bytes: most bytes that the caching allocator reserved; None where there is none.
        capacity_bytes: what the device (or the pretended one) lets a program use; None: unknown.
        host_bytes: most bytes live on the CPU in a run on another device.
        losses: the loss at each step; empty in a simulation and on a phantom.
        step_seconds: seconds per timed step, warm-up left out; empty in a simulation and on a
            phantom.
        flops: floating-point operations of one step; None where they were not counted.
        moved_bytes: bytes that one step's operators read and write; None where not counted.
        sent_bytes: bytes that one step sends to other ranks; 0 where there are none.
        oom: where it ran out of memory; None if it did not.
        trace: the event log; None for a run read back from a file.
    """

    name: Text
    parameters: Mapping[str, str | Whole | float | bool | None]
    mode: Literal["measured", "phantom", "tracked", "simulated"]
    device: Text
    peak_bytes: Bytes
    by_category: ByCategory
    step_peaks_bytes: tuple[Bytes, ...] = ()
    reserved_bytes: Bytes | None = None
    capacity_bytes: Bytes | None = None
    host_bytes: Bytes = 0
    losses: tuple[float, ...] = ()
    step_seconds: tuple[Seconds, ...] = ()
    flops: Count | None = None
    moved_bytes: Count | None = None
    sent_bytes: Count = 0
    oom: OutOfMemory | None = None
    trace: Trace | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool | None:
        """Whether the run fitted its device; None where the capacity is unknown."""
        if self.oom is not None:
            return False
        if self.capacity_bytes is None:
            return None
        return max(self.peak_bytes, self.reserved_bytes or 0) <= self.capacity_bytes

    @property
    def seconds_per_step(self) -> float | None:
        """Median of the timed steps; None where nothing was timed."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def label(self) -> str:
        """Where these numbers come from, for figures."""
        where = {"simulated": "simulated for", "phantom": "on a phantom"}
        return f"{where.get(self.mode, f'{self.mode} on')} {self.device}"

    def bytes_of(self, category: str) -> int:
        """Return the bytes of one category at the peak, 0 where there were none.

        Raises:
            InputError: unknown category.
        """
        return self.by_category.get(one_of(category, list(Category), "category"), 0)

    def highest_bytes(self, category: str) -> int:
        """Return the most bytes that one category took, each moment counted, not only the peak.

        Raises:
            InputError: unknown category, or a run read back from a file, which has no trace.
        """
        if self.trace is None:
            raise InputError(f"the run {self.name!r} has no trace: only its peak is known")
        category = one_of(category, list(Category), "category")
        return max(self.trace.timeline().bytes_by_category.get(category, (0,)))

    def named(self, name: str) -> "Run":
        """Return the same run under another name, for figures."""
        return replace(self, name=name)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy, without the trace."""
        record = asdict(replace(self, trace=None))
        del record["trace"]
        record["by_category"] = {str(k): v for k, v in self.by_category.items()}
        return record

    @classmethod
    def from_dict(cls, record: Any) -> "Run":
        """Validate and read what ``to_dict`` wrote.

        Raises:
            InputError: a field is missing, unknown, of the wrong type or out of range, or the
                categories do not sum to the peak.
        """
        if isinstance(record, Mapping) and "trace" in record:
            raise InputError("run has no field 'trace'")
        run = read_record(cls, record, "run")
        _check_sum(run.by_category, run.peak_bytes)
        if run.oom is not None:
            _check_sum(run.oom.by_category, run.oom.live_bytes)
        return run


def named_categories(by_category: Mapping[Category, int]) -> dict[str, int]:
    """Return what is not zero of ``by_category`` with plain text as keys, as a `Run` has it."""
    return {str(c): by_category[c] for c in Category if by_category.get(c)}


def work_figures(step_work: Work | None) -> dict[str, int]:
    """Return the fields of a `Run` that say what work one step did, where it was counted."""
    if step_work is None:
        return {}
    return {
        "flops": step_work.flops,
        "moved_bytes": step_work.moved_bytes,
        "sent_bytes": step_work.sent_bytes,
    }


def _check_sum(by_category: Mapping[str, int], total_bytes: int) -> None:
    categories_bytes = sum(by_category.values())
    if categories_bytes != total_bytes:
        raise InputError(f"the categories sum to {categories_bytes} bytes, not to {total_bytes}")

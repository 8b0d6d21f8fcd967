"""measure(): run an experiment on this machine and say what it took.

On a CUDA (or ROCm) GPU the peak is the caching allocator's own, and the tracker says what it was
made of; what the allocator counted beyond the tracked tensors is ``unattributed``. On a CPU the
peak is that of the tracked tensors. The first steps are tracked, the later ones run untracked and
are timed, so that watching does not cost what is being measured.

An out-of-memory error does not escape: the run says where it happened, and everything that the
experiment held is freed before ``measure`` returns.

Limits: a pretended budget on the CPU applies to the tracked steps. On a GPU the bytes that were in
use before the run are subtracted, and the CUDA context, which lives outside the allocator, is not
counted. Untracked runs (``track=False``) have one category only.
"""

import os
import time
from contextlib import nullcontext
from typing import Any

import torch

from labkit import hardware
from labkit.experiment import (
    Experiment,
    Steps,
    allocated_bytes,
    check_arguments,
    describe_oom,
    name_of,
    plain_parameters,
)
from labkit.memory import Category, InputError, Peak, Phase, Run, Trace, positive_int
from labkit.tracker import Tracker, is_out_of_memory, track

TRACKED_STEPS = 2  # the second has the optimizer's state; a third would repeat it


def measure(
    experiment: Experiment, *, steps: int = 4, track: bool = True, **parameters: Any
) -> Run:
    """Run ``experiment`` on this machine's GPU, or on its CPU.

    Args:
        experiment: generator function ``experiment(device, ...)`` yielding the loss per step.
        steps: training steps in all. The first two are tracked, the rest timed.
        track: False leaves the tracker out, as compiled code needs. The peak then comes from the
            allocator alone: on a CPU from the profiler's record of its allocations.
        **parameters: the experiment's own arguments.

    Returns:
        The run. If memory ran out, ``run.oom`` says where, and nothing is left allocated.

    Raises:
        InputError: a bad argument, or an experiment that ended without a step.
    """
    steps = positive_int(steps, "steps")
    parameters = check_arguments(experiment, parameters, steps=steps)
    hardware.free_memory()
    job = _Measurement(experiment, steps, parameters, tracked=track)
    try:
        job.run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        job.note_oom(error)
        hardware.clear_exception(error)
    job.steps.generator.close()
    hardware.free_memory()
    if not job.steps.done and job.oom is None:
        raise InputError(f"{name_of(experiment)} ended without yielding a loss")
    return job.result()


class _Measurement:
    def __init__(
        self, experiment: Experiment, steps: int, parameters: dict, *, tracked: bool
    ) -> None:
        self.experiment, self.parameters, self.wanted = experiment, parameters, steps
        self.tracked = tracked
        self.device = hardware.device()
        self.on_gpu = self.device.type == "cuda"
        self.cuda = hardware.cuda_memory
        self.budget_bytes = hardware.current_budget_bytes()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.oom = None
        self.trace: Trace | None = None
        self.reserved_bytes: int | None = None
        # cuBLAS keeps its workspace from the first product on: each run is to pay for its own.
        self.cuda.clear_workspaces()
        self.base_bytes = (self.cuda.allocated() or 0) if self.on_gpu else 0
        self.tracker: Tracker | None = None
        self.steps = Steps(experiment, self.device, parameters)

    def run(self) -> None:
        self.cuda.reset_peaks()
        if self.tracked:
            budget_bytes = None if self.on_gpu else self.budget_bytes
            self.tracker = track(
                budget_bytes=budget_bytes,
                device=_name(self.device) if self.on_gpu else "cpu",
                work=True,
            )
            try:
                with self.tracker:
                    self._take(min(TRACKED_STEPS, self.wanted), timed=False)
            finally:
                self.trace = self.steps.trace(self.tracker)
            self._take(self.wanted - self.steps.done, timed=True)
        else:
            with nullcontext() if self.on_gpu else _cpu_record() as record:
                self._take(self.wanted, timed=True)
            if record is not None:
                self.peaks = [allocator_peak(record)]

    def _take(self, count: int, *, timed: bool) -> None:
        tracker = None if timed else self.tracker
        self.cuda.synchronize()
        started = time.perf_counter()
        for loss in self.steps.take(count, tracker):
            self.losses.append(float(loss.detach()))
            self.cuda.synchronize()
            if timed:
                self.seconds.append(time.perf_counter() - started)
            if self.on_gpu:
                self.peaks.append(self.cuda.peak_allocated() - self.base_bytes)
                self._note_reserved()
                self.cuda.reset_peaks()
            started = time.perf_counter()

    def _note_reserved(self) -> None:
        self.reserved_bytes = max(self.reserved_bytes or 0, self.cuda.peak_reserved())

    def note_oom(self, error: BaseException) -> None:
        live_bytes = None
        if self.on_gpu:
            peak_bytes = self.cuda.peak_allocated()
            self.peaks.append(peak_bytes - self.base_bytes)
            live_bytes = min(allocated_bytes(error) or peak_bytes, peak_bytes) - self.base_bytes
            self._note_reserved()
        tracker = self.tracker if self.tracker and self.tracker.failure else None
        stepping = self.losses or (tracker and tracker.failure.phase is not Phase.SETUP)
        self.oom = describe_oom(
            error, tracker, step=self.steps.done + 1 if stepping else 0,
            capacity_bytes=self.budget_bytes, live_bytes=live_bytes,
        )  # fmt: skip

    def result(self) -> Run:
        tracked = self.trace.peak() if self.trace is not None else Peak(-1, 0, {})
        tracked_bytes = tracked.total_bytes
        # The allocator rounds up and cannot count less than the tensors it holds.
        peak_bytes = max([tracked_bytes, *self.peaks])
        categories = {str(key): value for key, value in tracked.by_category.items()}
        if peak_bytes > tracked_bytes:
            categories[str(Category.UNATTRIBUTED)] = peak_bytes - tracked_bytes
        step_peaks = tuple(self.peaks)
        host_bytes = 0
        if self.trace is not None:
            if not self.on_gpu:
                step_peaks = tuple(self.trace.peak(start=a, stop=b).total_bytes
                                   for a, b in self.trace.steps())  # fmt: skip
            else:
                host_bytes = self.trace.peak("cpu").total_bytes
        flops, moved_bytes, sent_bytes = self.steps.work_per_step()
        here = hardware.machine()
        return Run(
            name=name_of(self.experiment),
            parameters=plain_parameters(self.experiment, self.parameters),
            mode="measured" if self.on_gpu or not self.tracked else "tracked",
            device=here.name,
            peak_bytes=peak_bytes,
            by_category=categories,
            step_peaks_bytes=step_peaks,
            reserved_bytes=self.reserved_bytes,
            capacity_bytes=self.budget_bytes or (here.capacity_bytes if self.on_gpu else None),
            host_bytes=host_bytes,
            losses=tuple(self.losses),
            step_seconds=tuple(self.seconds),
            flops=flops,
            moved_bytes=moved_bytes,
            sent_bytes=sent_bytes,
            oom=self.oom,
            trace=self.trace,
        )


def _name(device: torch.device) -> str:
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"{device.type}:{index}"


def _cpu_record() -> Any:
    # Without this the profiler's library prints a line at each start and stop, past Python.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )


def allocator_peak(record: torch.profiler.profile) -> int:
    """Most bytes that the CPU allocator held above where it began, from a finished profile.

    Reads the ``[memory]`` events of a profile taken with ``profile_memory=True``: the allocator's
    own record of each allocation and each free, compiled code included.
    """
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes

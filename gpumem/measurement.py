"""measure(): run an experiment on this machine and say what it took.

On a CUDA (or ROCm) GPU, a phantom included, the peak is the caching allocator's own, and the
tracker says what it was made of; what the allocator counted beyond the tracked tensors is
``unattributed``. On a CPU the peak is that of the tracked tensors. The first steps are tracked, the
later ones are timed.

An out-of-memory error does not escape: the run says where it happened, and everything that the
experiment held is freed.

Limits: a pretended budget on the CPU applies to the tracked steps. On a GPU the bytes that were in
use before the run are subtracted, and the CUDA context, which lives outside the allocator, is not
counted. Tracked steps keep saved tensors in other objects, so that blocks may lie elsewhere: on an
H100 one of 61 recipes reserves 1.9 % more when it is tracked. Untracked runs (``track=False``) have
one category only.
"""

import os
import time
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch

from gpumem.experiment import Experiment, Steps, check_arguments, name_of, plain_parameters
from gpumem.fake_cuda.cuda_names import no_cuda
from gpumem.hardware import cuda, this_machine
from gpumem.inputs import InputError, positive_int
from gpumem.out_of_memory import allocated_bytes, is_out_of_memory, requested_bytes
from gpumem.runs import OutOfMemory, Run, named_categories, work_figures
from gpumem.trace import Category, Phase
from gpumem.tracker import Failure, Tracker, track

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

    Raises:
        InputError: a bad argument, an experiment that ended without a step, or one that asks for
            CUDA's autocast or loss scaling where there is no GPU.
    """
    steps = positive_int(steps, "steps")
    parameters = check_arguments(experiment, parameters, steps=steps)
    cuda.free_memory()  # cuBLAS's workspaces, too: each run has its own
    job = _Measurement(experiment, steps, parameters, tracked=track)
    try:
        with nullcontext() if job.on_gpu else no_cuda():
            job.run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        job.record_oom(error)
        cuda.clear_exception(error)
    job.steps.close()
    cuda.free_memory()
    if not job.steps.done and job.oom is None:
        raise InputError(f"{name_of(experiment)} ended without yielding a loss")
    return job.result()


class _Measurement:
    def __init__(
        self, experiment: Experiment, steps: int, parameters: dict, *, tracked: bool
    ) -> None:
        self.experiment, self.parameters, self.wanted = experiment, parameters, steps
        self.device = this_machine.device()
        self.on_gpu = self.device.type == "cuda"
        self.cuda = cuda.cuda_memory
        self.budget_bytes = this_machine.current_budget_bytes()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.oom: OutOfMemory | None = None
        self.reserved_bytes: int | None = None
        self.base_bytes = (self.cuda.allocated() or 0) if self.on_gpu else 0
        self.tracker: Tracker | None = None
        if tracked and self.on_gpu:
            self.tracker = track(device=_name(self.device), work=True)
        elif tracked:
            self.tracker = track(budget_bytes=self.budget_bytes, device="cpu", work=True)
        self.steps = Steps(experiment, self.device, parameters)

    def run(self) -> None:
        self.cuda.reset_peaks()
        if self.tracker is not None:
            with self.tracker:
                self._take(min(TRACKED_STEPS, self.wanted), self.tracker)
            self._take(self.wanted - self.steps.done)
        elif self.on_gpu:
            self._take(self.wanted)
        else:
            with cpu_record() as record:
                self._take(self.wanted)
            self.peaks = [allocator_peak(record)]

    def _take(self, count: int, tracker: Tracker | None = None) -> None:
        """Take up to ``count`` steps; those without a tracker are timed."""
        self.cuda.synchronize()
        started = time.perf_counter()
        for loss in self.steps.take(count, tracker):
            self.losses.append(float(loss.detach()))
            self.cuda.synchronize()
            if tracker is None:
                self.seconds.append(time.perf_counter() - started)
            if self.on_gpu:
                self._record_peaks()
                self.cuda.reset_peaks()
            started = time.perf_counter()

    def _record_peaks(self) -> None:
        self.peaks.append(self.cuda.peak_allocated() - self.base_bytes)
        self.reserved_bytes = max(self.reserved_bytes or 0, self.cuda.peak_reserved())

    def record_oom(self, error: BaseException) -> None:
        """Describe an out-of-memory error as precisely as what was watching allows."""
        failure = (self.tracker and self.tracker.failure) or Failure("", "", "", {})
        categories = Counter(failure.by_category)
        if self.on_gpu:
            self._record_peaks()
            peak_bytes = self.peaks[-1] + self.base_bytes
            live_bytes = min(allocated_bytes(error) or peak_bytes, peak_bytes) - self.base_bytes
            # What the tracker does not know of the allocator's bytes.
            categories += Counter({Category.UNATTRIBUTED: live_bytes - categories.total()})
        stepping = self.losses or failure.phase not in ("", Phase.SETUP)
        self.oom = OutOfMemory(
            requested_bytes=requested_bytes(error),
            live_bytes=categories.total(),
            capacity_bytes=self.budget_bytes,
            by_category=named_categories(categories),
            step=self.steps.done + 1 if stepping else 0,
            phase=str(failure.phase),
            module=failure.module,
            operator=failure.operator,
            reserved_bytes=self.cuda.reserved() if self.on_gpu else None,
        )

    def result(self) -> Run:
        here = this_machine.machine()
        figures: dict[str, Any] = {"step_peaks_bytes": tuple(self.peaks)}
        categories: Counter[Category] = Counter()
        if self.tracker is not None:
            figures["trace"] = trace = self.tracker.trace()
            categories.update(trace.peak().by_category)
            if self.on_gpu:
                figures["host_bytes"] = trace.peak("cpu").total_bytes
            else:
                figures["step_peaks_bytes"] = trace.step_peaks_bytes()
            figures |= work_figures(self.tracker.step_work)
        # The allocator rounds up and cannot count less than the tensors it holds.
        peak_bytes = max([categories.total(), *self.peaks])
        categories[Category.UNATTRIBUTED] += peak_bytes - categories.total()
        if not here.phantom:  # which computes no losses, and is as fast as its CPU
            figures |= {"losses": tuple(self.losses), "step_seconds": tuple(self.seconds)}
        mode = "phantom" if here.phantom else "measured"
        if self.tracker is not None and not self.on_gpu:
            mode = "tracked"
        return Run(
            name=name_of(self.experiment),
            parameters=plain_parameters(self.experiment, self.parameters),
            mode=mode,
            device=here.name,
            peak_bytes=peak_bytes,
            by_category=named_categories(categories),
            reserved_bytes=self.reserved_bytes,
            capacity_bytes=self.budget_bytes or (here.capacity_bytes if self.on_gpu else None),
            oom=self.oom,
            **figures,
        )


def _name(device: torch.device) -> str:
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"{device.type}:{index}"


def cpu_record(*, with_flops: bool = False) -> torch.profiler.profile:
    """Return a profiler that records each allocation of the CPU allocator, for `allocator_peak`."""
    # Without this the profiler's library prints a line at each start and stop, past Python.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True,
        with_flops=with_flops,
    )


def allocator_peak(record: torch.profiler.profile) -> int:
    """Return the most bytes that the CPU allocator held above where it began, by its own record of
    each allocation and free in a profile taken with ``profile_memory=True``."""
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    live_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, live_bytes)
    return peak_bytes

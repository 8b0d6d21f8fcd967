"""simulate(): run an experiment on fake tensors, as if on a named GPU.

A training step of a model of any size runs in seconds on any machine, with exactly the bytes that
the tensors of a real run take, and its floating-point operations are counted exactly. Nothing is
timed. For a GPU the log is then replayed through PyTorch's caching allocator, with the workspaces
that its libraries take from it: that gives reserved memory, and the request that would fail.

Limits: values do not exist, so an experiment must not ask for one (``.item()``, ``if loss > 3``);
losses are left out; a batch is taken to hold no padding and one text per row. Of kernels' own
workspaces those of cuBLAS, fused attention, sums, sorts and norms are simulated; the CUDA context
is set aside in the capacity.
"""

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from gpumem.allocator.kernel_workspaces import kernel_workspaces
from gpumem.allocator.replay import replay
from gpumem.allocator.workspaces import with_workspaces
from gpumem.experiment import Experiment, Steps, check_arguments, name_of, plain_parameters
from gpumem.fake_cuda.autocast import key_of_parts
from gpumem.fake_cuda.depth_extension import DEEPER, SHALLOW, SHARDED_DEPTHS, extended_log
from gpumem.fake_cuda.fake_tensors import GPU_DEVICE, fake_tensors
from gpumem.fake_cuda.process_group import fake_ranks
from gpumem.fake_cuda.streams import FakeStreams
from gpumem.hardware import catalogue, this_machine
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError, positive_int
from gpumem.runs import OutOfMemory, Run, named_categories, work_figures
from gpumem.trace import Category, Trace, Work
from gpumem.tracker import Tracker, track


def simulate(
    experiment: Experiment,
    *,
    gpu: str | Gpu | None = None,
    steps: int = 2,
    ranks: int | None = None,
    rank: int | None = None,
    alike: str | None = None,
    **parameters: Any,
) -> Run:
    """Run ``experiment`` on fake tensors.

    Args:
        experiment: generator function ``experiment(device, ...)`` yielding the loss per step.
        gpu: a name from the catalogue; by default the GPU pretended with ``lab.pretend``. None,
            with nothing pretended, simulates this machine's CPU, byte for byte.
        steps: training steps; from the second on they repeat each other.
        ranks: simulate one of this many processes with a GPU each, in a process group.
        rank: which of them, from 0; by default the first. Without ``ranks`` it is an argument of
            the experiment.
        alike: the name of the argument that counts identical layers. Shallow models are simulated
            then, and what the last layer adds is repeated (`depth_extension`); where one
            layer more differs, the whole model is simulated. What differs in later layers is not
            noticed, nor that an optimizer deals out whole tensors to the ranks, as
            ``ZeroRedundancyOptimizer`` does.
        **parameters: the experiment's own arguments.

    Returns:
        The run. ``oom`` is the first request that the GPU could not have served; the simulation
        continues past it, so that ``peak_bytes`` says how much would have been needed.

    Raises:
        InputError: a bad argument, an unknown GPU, or an experiment that needs values.
    """
    gpu = catalogue.gpu(gpu) if gpu else this_machine.pretended()
    take = partial(simulated_log, experiment, gpu=gpu, steps=steps)
    if ranks is None:
        if rank is not None:
            parameters["rank"] = rank
        log = _at_depth(take, alike, parameters, (SHALLOW, DEEPER))
        return run_of(log, gpu, name=name_of(experiment))
    rank = 0 if rank is None else rank
    with fake_ranks(ranks, rank, as_cuda=gpu is not None):
        log = _at_depth(take, alike, parameters, SHARDED_DEPTHS)
    log = replace(log, parameters={**log.parameters, "ranks": ranks, "rank": rank})
    return run_of(log, gpu, name=name_of(experiment))


@dataclass(frozen=True)
class Log:
    """What simulated steps did: the experiment's arguments as plain values, the event log of all
    steps, and the work of the last step (None where it was not counted)."""

    parameters: Mapping[str, Any]
    trace: Trace
    step_work: Work | None


def _at_depth(
    take: Callable[..., Log],
    alike: str | None,
    parameters: Mapping[str, Any],
    depths: tuple[int, int],
) -> Log:
    """Return the log of ``take(**parameters)``, extended from two ``depths`` if ``alike``."""
    if alike is None:
        return take(**parameters)
    if alike not in parameters:
        raise InputError(f"alike={alike!r} names no argument that is given: {alike}=80, say")
    layers = positive_int(parameters[alike], alike)

    def log_with_layers(count: int) -> Log:
        return take(**{**parameters, alike: count})

    extended = extended_log(log_with_layers, layers, depths=depths, check=True)
    if extended is None:
        return log_with_layers(layers)
    return replace(extended.log, parameters={**extended.log.parameters, alike: layers})


def simulated_log(
    experiment: Experiment, *, gpu: Gpu | None, steps: int = 2, **parameters: Any
) -> Log:
    """Run the steps on fake tensors, before any allocator. Arguments and errors as `simulate`."""
    steps = positive_int(steps, "steps")
    parameters = check_arguments(experiment, parameters, steps=steps)
    device = GPU_DEVICE if gpu else torch.device("cpu")
    with recording(gpu) as tracker:
        job = Steps(experiment, device, parameters)
        with contextlib.closing(job):
            try:
                for _ in job.take(steps, tracker):
                    pass
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise InputError(
                    f"{name_of(experiment)} asks for a value ({error.func}); a simulation has "
                    "none. Yield the loss tensor itself, and keep .item(), .tolist(), comparisons "
                    "of tensors and results whose size depends on values out of the step."
                ) from None
            trace = tracker.trace()
    if not job.done:
        raise InputError(f"{name_of(experiment)} ended without yielding a loss")
    if gpu and not any(storage.device == trace.device for storage in trace.storages):
        raise InputError(
            f"{name_of(experiment)} puts nothing on the device that it is given: build the model "
            "and the batches with device=device"
        )
    return Log(plain_parameters(experiment, parameters), trace, tracker.step_work)


@contextlib.contextmanager
def recording(gpu: Gpu | None) -> Iterator[Tracker]:
    """Record what is done inside, with fake tensors for ``gpu``, or for this machine's CPU."""
    tracker = track(device=str(GPU_DEVICE if gpu else torch.device("cpu")), work=True)
    if gpu:
        tracker.workspaces = partial(kernel_workspaces, gpu=gpu)
        tracker.key_of_parts = key_of_parts
    with contextlib.ExitStack() as stack:
        if not gc.get_freeze_count():  # else the caller's, which stay as they are
            gc.freeze()  # to look for garbage among new objects only saves an eighth of the time
            stack.callback(gc.unfreeze)
        stack.enter_context(fake_tensors(gpu))
        tracker.streams = FakeStreams()
        yield stack.enter_context(tracker)


def run_of(log: Log, gpu: Gpu | None, *, name: str) -> Run:
    """Return the run that ``log`` gives on ``gpu``, or on this machine's CPU."""
    figures = _on_gpu(log.trace, gpu) if gpu else _on_cpu(log.trace)
    figures |= work_figures(log.step_work)
    return Run(name=name, parameters=log.parameters, mode="simulated", **figures)


def _on_gpu(tensors: Trace, gpu: Gpu) -> dict[str, Any]:
    trace = with_workspaces(tensors, gpu)
    played = replay(trace, budget_bytes=gpu.budget_bytes)
    return {
        "trace": trace,
        "device": gpu.name,
        "peak_bytes": played.peak_allocated_bytes,
        "by_category": named_categories(played.by_category),
        "step_peaks_bytes": played.step_peaks_bytes(),
        "reserved_bytes": played.peak_reserved_bytes,
        "capacity_bytes": gpu.budget_bytes,
        "host_bytes": trace.peak("cpu").total_bytes,
        "oom": played.failure,
    }


def _on_cpu(trace: Trace) -> dict[str, Any]:
    peak, capacity_bytes = trace.peak(), this_machine.current_budget_bytes()
    return {
        "trace": trace,
        "device": "CPU",
        "peak_bytes": peak.total_bytes,
        "by_category": named_categories(peak.by_category),
        "step_peaks_bytes": trace.step_peaks_bytes(),
        "capacity_bytes": capacity_bytes,
        "oom": _first_failure(trace, capacity_bytes) if capacity_bytes else None,
    }


def _first_failure(trace: Trace, capacity_bytes: int) -> OutOfMemory | None:
    """Return the first request of ``trace`` that ``capacity_bytes`` could not serve, if any."""
    live: Counter[Category] = Counter()
    for index, storage, change_bytes in trace.changes():
        if live.total() + change_bytes > capacity_bytes:
            return OutOfMemory.at_event(trace, index, change_bytes, capacity_bytes, live)
        live[storage.category] += change_bytes
    return None

"""simulate(): run an experiment on fake tensors, as if on a named GPU.

A training step of a model of any size runs in seconds on any machine, with exactly the bytes that
the tensors of a real run take, and its floating-point operations are counted exactly. Nothing is
timed. For a GPU the log is then replayed through PyTorch's caching allocator, with the workspaces
that its libraries take from it: that gives reserved memory, and the request that would fail.

Limits: values do not exist, so an experiment must not ask for one (``.item()``, ``if loss > 3``);
losses are left out; a batch is taken to hold no padding and one text per row. Kernels' own
workspaces are not simulated, cuBLAS's apart; the CUDA context is set aside in the capacity.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from labkit import hardware
from labkit.catalogue import Gpu
from labkit.depth import DEEPER, SHALLOW, SHARDED_DEPTHS, extend, same
from labkit.experiment import Experiment, Steps, check_arguments, name_of, plain_parameters
from labkit.fake_mode import GPU_DEVICE, fake_tensors
from labkit.fake_ranks import fake_ranks
from labkit.memory import Category, InputError, OutOfMemory, Run, Trace, positive_int
from labkit.replays import replay
from labkit.tracker import track
from labkit.workspaces import with_workspaces


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
        gpu: a name from the catalogue, whose capacity decides whether the run fits; by default
            the GPU pretended with ``lab.pretend``. None, with nothing pretended, simulates this
            machine's CPU, byte for byte.
        steps: training steps; from the second on they repeat each other.
        ranks: simulate one of so many processes, each with a GPU: a process group of that size
            is there when the experiment is called. None: no process group.
        rank: which of them, from 0; by default the first. Without ``ranks`` it is an argument of
            the experiment, as any other.
        alike: the name of the argument that counts layers which are all alike, for a model too
            deep to wait for. Models with one layer and with two are simulated then (two and
            three where ranks share them), and what the second has more is repeated
            (`labkit.depth`). One layer more is the check: where it does something else, or
            nothing can be repeated, the whole model is simulated. What differs further up is not
            noticed, nor that an optimizer deals out whole tensors to the ranks, as
            ``ZeroRedundancyOptimizer`` does.
        **parameters: the experiment's own arguments.

    Returns:
        The run, with ``oom`` set to the first request that the GPU could not have served. The
        simulation goes on past it, so that ``peak_bytes`` says how much would have been needed.

    Raises:
        InputError: a bad argument, an unknown GPU, or an experiment that needs values.
    """
    card = hardware.gpu(gpu) if gpu else hardware.pretended()
    take = partial(simulated_log, experiment, card=card, steps=steps)
    if ranks is None:
        parameters |= {} if rank is None else {"rank": rank}
        log = _at_depth(take, alike, parameters, (SHALLOW, DEEPER))
        return run_of(log, card, name=name_of(experiment))
    rank = 0 if rank is None else rank
    with fake_ranks(ranks, rank, as_cuda=card is not None):
        log = _at_depth(take, alike, parameters, SHARDED_DEPTHS)
    log = log._replace(parameters={**log.parameters, "ranks": ranks, "rank": rank})
    return run_of(log, card, name=name_of(experiment))


class Log(NamedTuple):
    """What simulated steps did.

    Attributes:
        parameters: what the experiment was called with, as plain values.
        trace: the event log of all steps.
        flops, moved_bytes: the work of the last step; None where it was not counted.
        sent_bytes: what the last step sent to other ranks.
    """

    parameters: Mapping[str, Any]
    trace: Trace
    flops: int | None
    moved_bytes: int | None
    sent_bytes: int = 0


def _at_depth(
    take: Callable[..., Log],
    alike: str | None,
    parameters: Mapping[str, Any],
    depths: tuple[int, int],
) -> Log:
    """The log of ``take(**parameters)``, extended from two ``depths`` if layers are ``alike``."""
    if alike is None:
        return take(**parameters)
    if alike not in parameters:
        raise InputError(f"alike={alike!r} names no argument that is given: {alike}=80, say")
    layers = positive_int(parameters[alike], alike)
    checked = depths[1] + 1
    if layers <= checked:
        return take(**parameters)
    # The deepest first: the first trace of a process holds what libraries make once.
    real, deeper, shallow = (take(**{**parameters, alike: n}) for n in (checked, *depths[::-1]))
    made, trace = (extend(shallow.trace, deeper.trace, n, depths=depths) for n in (checked, layers))
    if made is None or trace is None or not same(made, real.trace):
        return take(**parameters)
    more = layers - depths[1]
    work = (d + more * (d - s) for s, d in zip(shallow[2:], deeper[2:], strict=True))
    return Log({**deeper.parameters, alike: layers}, trace, *work)


def simulated_log(
    experiment: Experiment, *, card: Gpu | None, steps: int = 2, **parameters: Any
) -> Log:
    """The steps on fake tensors, before any allocator. Arguments and errors as for `simulate`."""
    steps = positive_int(steps, "steps")
    parameters = check_arguments(experiment, parameters, steps=steps)
    device = GPU_DEVICE if card else torch.device("cpu")
    tracker = track(device=str(device), work=True)
    with fake_tensors(card), tracker:
        job = Steps(experiment, device, parameters)
        with job.closing():
            try:
                for _ in job.take(steps, tracker):
                    pass
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise InputError(
                    f"{name_of(experiment)} asks for a value ({error.func}); a simulation has "
                    "none. Yield the loss tensor itself, and keep .item(), .tolist(), comparisons "
                    "of tensors and results whose size depends on values out of the step."
                ) from None
            trace = job.trace(tracker)
    if not job.done:
        raise InputError(f"{name_of(experiment)} ended without yielding a loss")
    if card and not any(storage.device == trace.device for storage in trace.storages):
        raise InputError(
            f"{name_of(experiment)} puts nothing on the device that it is given: build the model "
            "and the batches with device=device"
        )
    return Log(plain_parameters(experiment, parameters), trace, *job.work_per_step())


def run_of(log: Log, card: Gpu | None, *, name: str) -> Run:
    """The run that ``log`` gives on ``card``, or on this machine's CPU."""
    if card is None:
        return _on_cpu(log, name)
    trace = with_workspaces(log.trace, card)
    played = replay(trace, budget_bytes=card.budget_bytes)
    peak = trace.peak()
    categories = {str(key): value for key, value in peak.by_category.items()}
    # The allocator hands out whole blocks: what they hold beyond the tensors belongs to none.
    if rounding_bytes := played.peak_allocated_bytes - peak.total_bytes:
        unattributed = str(Category.UNATTRIBUTED)
        categories[unattributed] = categories.get(unattributed, 0) + rounding_bytes
    return Run(
        name=name,
        parameters=log.parameters,
        mode="simulated",
        device=card.name,
        peak_bytes=played.peak_allocated_bytes,
        by_category=categories,
        step_peaks_bytes=tuple(played.step_peaks_bytes()),
        reserved_bytes=played.peak_reserved_bytes,
        capacity_bytes=card.budget_bytes,
        host_bytes=trace.peak("cpu").total_bytes,
        flops=log.flops,
        moved_bytes=log.moved_bytes,
        sent_bytes=log.sent_bytes,
        oom=played.failure,
        trace=trace,
    )


def _on_cpu(log: Log, name: str) -> Run:
    trace, capacity_bytes = log.trace, hardware.current_budget_bytes()
    peak = trace.peak()
    return Run(
        name=name,
        parameters=log.parameters,
        mode="simulated",
        device="CPU",
        peak_bytes=peak.total_bytes,
        by_category={str(key): value for key, value in peak.by_category.items()},
        step_peaks_bytes=tuple(trace.peak(start=a, stop=b).total_bytes for a, b in trace.steps()),
        capacity_bytes=capacity_bytes,
        flops=log.flops,
        moved_bytes=log.moved_bytes,
        sent_bytes=log.sent_bytes,
        oom=first_failure(trace, capacity_bytes) if capacity_bytes else None,
        trace=trace,
    )


def first_failure(trace: Trace, capacity_bytes: int) -> OutOfMemory | None:
    """The first request of ``trace`` that ``capacity_bytes`` could not hold; None if all fit."""
    live: dict[Category, int] = dict.fromkeys(Category, 0)
    total_bytes = 0
    for index, storage, change_bytes in trace.changes():
        if total_bytes + change_bytes > capacity_bytes:
            return OutOfMemory(
                requested_bytes=change_bytes,
                live_bytes=total_bytes,
                capacity_bytes=capacity_bytes,
                by_category={str(key): value for key, value in live.items() if value},
                step=sum(start <= index for start, _ in trace.steps()),
                phase=str(trace.events[index].phase),
                module=storage.module,
                operator=storage.operator,
            )
        live[storage.category] += change_bytes
        total_bytes += change_bytes
    return None

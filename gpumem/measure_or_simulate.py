"""run(): measure an experiment where there is a GPU, else simulate it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from gpumem.experiment import Experiment
from gpumem.hardware import catalogue, cuda, this_machine
from gpumem.hardware.catalogue import DEFAULT_GPU
from gpumem.runs import Run
from gpumem.trace import Trace


def run(
    experiment: Experiment,
    *,
    gpu: str | None = None,
    steps: int | None = None,
    ranks: int | None = None,
    alike: str | None = None,
    **parameters: Any,
) -> Run:
    """Measure where there is a GPU that PyTorch can measure, else simulate for ``gpu``.

    Args:
        experiment: generator function ``experiment(device, ...)`` yielding the loss per step.
        gpu: the GPU to simulate where nothing can be measured; by default the pretended GPU,
            else a T4. Ignored (but checked) where there is a real one.
        steps: training steps; by default what `measure` or `simulate` takes. A GPU that is there
            takes two more than are tracked, at least: those that are tracked are not timed.
        ranks: as one of this many processes with a GPU each: launched where there are as many
            GPUs, else simulated. The run is that of the rank with the highest peak. A single one
            is this process, in a process group of its own.
        alike: as for `simulate`; nothing is left out where it is measured.
        **parameters: the experiment's own arguments.

    Raises:
        InputError: as `measure` and `simulate` do.
    """
    if steps is not None:
        parameters["steps"] = steps
    if gpu is not None:
        gpu = catalogue.gpu(gpu)
    elif this_machine.pretended() is None and this_machine.current_budget_bytes() is None:
        gpu = catalogue.gpu(DEFAULT_GPU)
    # What is not used is not imported: the first run of most lessons is a simulation.
    here = this_machine.machine()
    if here.can_measure:
        if ranks is None or ranks == 1:
            from gpumem.measurement import TRACKED_STEPS, measure

            if steps is not None and not here.phantom:
                parameters["steps"] = max(steps, TRACKED_STEPS + 2)
            with _group_of_one() if ranks else nullcontext():
                return measure(experiment, **parameters)
        from gpumem.ranks.launch import gpu_for_each, launch

        if gpu_for_each(ranks):
            runs = launch(experiment, ranks=ranks, **parameters)
            return max(runs, key=lambda run: run.peak_bytes)
    from gpumem.simulation import simulate

    return simulate(experiment, gpu=gpu, ranks=ranks, alike=alike, **parameters)


@contextmanager
def _group_of_one() -> Iterator[None]:
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def measured_or_replayed(
    experiment: Experiment,
    lengths: Sequence[int],
    *,
    gpu: str,
    expandable_segments: bool = False,
    alike: str | None = None,
    **parameters: Any,
) -> tuple[Any, Iterator]:
    """Return ``torch.cuda`` and the steps of ``experiment`` on batches of ``lengths``.

    Without a GPU both are replayed from two simulated steps of each length.
    """
    if this_machine.machine().can_measure:
        cuda.free_memory()
        torch.cuda.reset_accumulated_memory_stats()
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable_segments}")
        return torch.cuda, experiment(torch.device("cuda"), lengths=lengths, **parameters)
    from gpumem.allocator.replay import ReplayedCuda
    from gpumem.fake_cuda.step_extension import continued

    parameters |= {"gpu": gpu, "alike": alike}
    traces = {n: _trace(experiment, lengths=(n, n), **parameters) for n in lengths}
    trace = continued(traces, lengths)
    replayed = ReplayedCuda(trace, gpu, expandable_segments=expandable_segments)
    return replayed, replayed.steps()


@lru_cache(maxsize=32)
def _trace(experiment: Experiment, **parameters: Any) -> Trace:
    from gpumem.simulation import simulate

    return simulate(experiment, **parameters).trace

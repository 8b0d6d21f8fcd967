"""run() and sweep(): the same experiment in whichever world this machine has.

Limits: a sweep runs one setting after another in this process; it is as slow as their sum.
"""

import itertools
from collections.abc import Iterable
from typing import Any

from labkit import hardware
from labkit.experiment import Experiment, check_arguments, name_of
from labkit.measure import measure
from labkit.memory import InputError, Run, positive_int
from labkit.ranks import gpu_for_each, launch
from labkit.simulate import simulate

DEFAULT_GPU = "t4"  # what most people can have for nothing
OURS = ("steps", "ranks", "alike")  # arguments of `run`, not of the experiment


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
        gpu: what to stand in for where nothing can be measured; by default the pretended GPU,
            else a T4. Ignored (but checked) where there is a real one.
        steps: training steps; by default what `measure` or `simulate` takes.
        ranks: as one of so many processes with a GPU each: launched where there are as many GPUs,
            else simulated. The run is that of the rank with the highest peak.
        alike: as for `simulate`; nothing is left out where it is measured.
        **parameters: the experiment's own arguments.

    Raises:
        InputError: as `measure` and `simulate` do.
    """
    options = parameters if steps is None else {"steps": steps, **parameters}
    if gpu is not None:
        hardware.gpu(gpu)
    if hardware.machine().can_measure and (ranks is None or gpu_for_each(ranks)):
        if ranks is None:
            return measure(experiment, **options)
        return max(launch(experiment, ranks=ranks, **options), key=lambda run: run.peak_bytes)
    if gpu is None and hardware.pretended() is None and hardware.current_budget_bytes() is None:
        gpu = DEFAULT_GPU
    return simulate(experiment, gpu=gpu, ranks=ranks, alike=alike, **options)


def sweep(
    experiment: Experiment, *, gpu: str | None = None, progress: bool = True, **settings: Any
) -> list[Run]:
    """`run` every combination of the settings that are lists, in order.

    Args:
        experiment: as for `run`.
        gpu: as for `run`.
        progress: show a progress bar.
        **settings: each argument either one value or a list of values.

    Returns:
        One run per combination, the last list varying fastest. A setting that runs out of memory
        is a run like the others, with ``oom`` set.

    Raises:
        InputError: an empty list, or as `run`.
    """
    from tqdm.auto import tqdm

    names = list(settings)
    lists = [_as_list(name, value) for name, value in settings.items()]
    combinations = [dict(zip(names, values, strict=True)) for values in itertools.product(*lists)]
    for combination in combinations:  # all of them, before the first takes its time
        positive_int(combination.get("steps", 1), "steps")
        check_arguments(experiment, {k: v for k, v in combination.items() if k not in OURS})
    bar = tqdm(combinations, disable=not progress, leave=False, desc=name_of(experiment))
    return [run(experiment, gpu=gpu, **combination) for combination in bar]


def _as_list(name: str, value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value]
    values = list(value)
    if not values:
        raise InputError(f"{name} is an empty list: there is nothing to run")
    return values

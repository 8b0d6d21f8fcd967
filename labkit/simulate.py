"""simulate(): run an experiment on fake tensors, as if on a named GPU.

Fake tensors have shapes, types and storages, but no data: a training step of a model of any size
runs in seconds on any machine, with exactly the bytes that the tensors of a real run take, and its
floating-point operations are counted exactly. Nothing is timed.

What CUDA would choose is chosen for it: optimizers take their ``foreach`` form, as they do for
CUDA parameters, with its temporaries, and autocast follows CUDA's list of float32 operators.

Limits: values do not exist, so an experiment must not ask for one (``.item()``, ``if loss > 3``);
losses are left out; a batch is taken to hold no padding and one text per row. Kernels' own
workspaces and the allocator's rounding and caching are not simulated; the CUDA context is set
aside in the capacity. Attention runs as the CPU's flash kernel, which keeps what the CUDA kernels
keep; where a GPU would have to fall back to the plain form, it needs more. ``F.mse_loss`` keeps a
buffer of its inputs' size on real devices that fake tensors do not show.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from labkit import hardware
from labkit.cuda_autocast import cuda_autocast_rules
from labkit.experiment import Experiment, Steps, check_arguments, name_of, plain_parameters
from labkit.memory import Category, InputError, OutOfMemory, Run, Trace, positive_int
from labkit.tracker import track


@contextmanager
def fake_tensors(*, as_cuda: bool) -> Iterator[None]:
    """Fake tensors on the CPU; with ``as_cuda`` PyTorch chooses what it would choose on CUDA."""

    def swap(a: torch.Tensor, b: torch.Tensor) -> None:
        # swap_tensors refuses parameters with weak references, which fake tensors have by
        # themselves; module.to() needs no more than this.
        a.data = b.data

    def foreach(_: Any, differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:
        return False, not differentiable  # fused, foreach

    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mock.patch("torch.utils.swap_tensors", swap))
        for name in ("get_rng_state", "set_rng_state"):
            # Checkpointing keeps the random state: the CPU's, real, and no tensor of the device.
            stack.enter_context(mock.patch.object(torch, name, _really(getattr(torch, name))))
        if masking := _masking_utils():
            # transformers looks at the positions to see whether a batch packs several texts, and
            # builds a mask when it cannot look; a batch that packs none gets none.
            stack.enter_context(
                mock.patch.object(masking, "find_packed_sequence_indices", return_value=None)
            )
        # A learner's error is theirs to read, without the mode's own log of it above.
        stack.enter_context(mock.patch.object(fake_tensor.log, "disabled", True))
        stack.enter_context(_LibraryAnswers())
        if as_cuda:
            stack.enter_context(cuda_autocast_rules())
            for module in _optimizer_modules():
                stack.enter_context(
                    mock.patch.object(module, "_default_to_fused_or_foreach", foreach)
                )
        yield


def _masking_utils() -> Any:
    """transformers' masks, imported now: an experiment that imports them first would escape."""
    if importlib.util.find_spec("transformers") is None:
        return None
    return importlib.import_module("transformers.masking_utils")


class _LibraryAnswers(TorchDispatchMode):
    """Answers 1 where an optimizer of PyTorch's asks for a value (Adafactor scales by norms).

    The value changes what is computed, never what is allocated. An experiment's own question is
    not answered.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            answer = _library_answer(args[0].dtype)
            if answer is not None:
                return answer
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            raise InputError(
                f"the experiment puts a tensor on {str(device)!r}. Use the device that it is "
                "given: a simulation stands for the GPU with fake tensors on the CPU."
            )
        if func._schema.is_mutable:
            real = [t for t in tree_leaves(args) if type(t) is Parameter or type(t) is torch.Tensor]
            if any(t.is_floating_point() and t.device.type != "meta" for t in real):
                raise InputError(
                    "the experiment changes a tensor that was made outside it. Build the model and "
                    "everything else inside, so that a simulation leaves your tensors alone."
                )
        return func(*args, **kwargs)


def _library_answer(dtype: torch.dtype) -> Any:
    """What PyTorch's own code is told; None where the question is the experiment's own."""
    frame = sys._getframe(2)  # who called .item(), bool() or float(): the first outside the modes
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "torch.amp.grad_scaler":
            # found-inf is summed: none was found. Anything else it asks is a scale or a counter.
            return 0.0 if frame.f_code.co_name in ("_maybe_opt_step", "<genexpr>") else 1.0
        if name.startswith("torch.optim."):
            # Numbers change no allocation; a yes or no (L-BFGS: stop now?) does: refuse it.
            return None if dtype is torch.bool else 1.0
        if not name.startswith(("torch.", "labkit.")):
            return None
        frame = frame.f_back
    return None


def _really(function: Any) -> Any:
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), unset_fake_temporarily():
            return function(*args, **kwargs)

    return outside


def _optimizer_modules() -> list[Any]:
    """Each optimizer's module imported the function by name, so each has its own copy."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.optim.") and hasattr(module, "_default_to_fused_or_foreach")
    ]


def simulate(
    experiment: Experiment, *, gpu: str | None = None, steps: int = 2, **parameters: Any
) -> Run:
    """Run ``experiment`` on fake tensors.

    Args:
        experiment: generator function ``experiment(device, ...)`` yielding the loss per step.
        gpu: a name from the catalogue, whose capacity decides whether the run fits; by default
            the GPU pretended with ``lab.pretend``. None, with nothing pretended, simulates this
            machine's CPU, byte for byte.
        steps: training steps; from the second on they repeat each other.
        **parameters: the experiment's own arguments.

    Returns:
        The run, with ``oom`` set to the first request that the GPU could not have served. The
        simulation goes on past it, so that ``peak_bytes`` says how much would have been needed.

    Raises:
        InputError: a bad argument, an unknown GPU, or an experiment that needs values.
    """
    steps = positive_int(steps, "steps")
    parameters = check_arguments(experiment, parameters, steps=steps)
    card = hardware.gpu(gpu) if gpu else hardware.pretended()
    capacity_bytes = card.budget_bytes if card else hardware.current_budget_bytes()
    tracker = track(device="cpu", work=True)
    with fake_tensors(as_cuda=card is not None), tracker:
        job = Steps(experiment, torch.device("cpu"), parameters)
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
    peak = trace.peak()
    flops, moved_bytes = job.work_per_step()
    return Run(
        name=name_of(experiment),
        parameters=plain_parameters(experiment, parameters),
        mode="simulated",
        device=card.name if card else "CPU",
        peak_bytes=peak.total_bytes,
        by_category={str(key): value for key, value in peak.by_category.items()},
        step_peaks_bytes=tuple(trace.peak(start=a, stop=b).total_bytes for a, b in trace.steps()),
        capacity_bytes=capacity_bytes,
        flops=flops,
        moved_bytes=moved_bytes,
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

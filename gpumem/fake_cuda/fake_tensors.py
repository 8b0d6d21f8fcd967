"""Fake tensors, and every question that PyTorch and its libraries ask of a GPU, answered.

Fake tensors have shapes, types and storages, but no data. What stands for the GPU is the device
``cpu:0``, for the host plain ``cpu``: fake tensors keep the two apart, so that mixing them is
refused as on a real GPU and what lives on the host is counted there.

What CUDA would choose is chosen for it: optimizers take their ``foreach`` form with its
temporaries, autocast follows CUDA's list of float32 operators, attention takes the kernel that the
GPU has, and experts are multiplied in groups, which needs no values. Questions about values are
answered where the answer changes no allocation and the library itself asks: no gradient
overflowed, no activation is an outlier, no batch is padded, an image has its tokens.

Limits: kernels' own workspaces are no tensors. ``F.mse_loss`` keeps a buffer of its inputs' size
on real devices that fake tensors do not show.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from gpumem.fake_cuda.attention import cuda_attention_choice
from gpumem.fake_cuda.autocast import cuda_autocast_rules, cuda_operators
from gpumem.fake_cuda.bitsandbytes import fake_bitsandbytes
from gpumem.fake_cuda.cuda_names import GPU_DEVICE, cuda_names, no_cuda
from gpumem.fake_cuda.generation import GENERATION, Generation, fake_generation
from gpumem.fake_cuda.refusals import NAMES_CUDA, line_of_error, refuse, refuse_cuda
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError


@contextmanager
def fake_tensors(gpu: Gpu | None) -> Iterator[None]:
    """Fake tensors for ``gpu``, on which PyTorch chooses as on CUDA; None: for the CPU."""
    as_cuda = gpu is not None

    def swap(a: torch.Tensor, b: torch.Tensor) -> None:
        # swap_tensors refuses parameters with weak references, which fake tensors have by
        # themselves; module.to() needs no more than this.
        a.data = b.data
        a.__dict__.update(b.__dict__)  # its device, and what a quantized parameter knows

    def foreach(tensors: Any, differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:
        on_gpu = all(t is None or t.device == GPU_DEVICE for t in tensors)
        return False, on_gpu and not differentiable  # fused, foreach

    with ExitStack() as stack:
        push, patch = stack.enter_context, mock.patch.object
        push(FakeTensorMode(allow_non_fake_inputs=True))
        push(mock.patch("torch.utils.swap_tensors", swap))
        for name in ("get_rng_state", "set_rng_state"):
            # Checkpointing keeps the random state: the CPU's, real, and no tensor of the device.
            push(patch(torch, name, _really(getattr(torch, name))))
        generation = None
        if importlib.util.find_spec("transformers"):
            # transformers looks at the positions to see whether a batch packs several texts, and
            # builds a mask when it cannot look; a batch that packs none gets none. Imported now:
            # an experiment that imports the masks first would escape.
            masking = importlib.import_module("transformers.masking_utils")
            push(patch(masking, "find_packed_sequence_indices", _packs_nothing))
            experts = importlib.import_module("transformers.integrations.moe")
            grouped = as_cuda and (gpu.compute_capability or (9, 0)) >= (8, 0)
            push(patch(experts, "_can_use_grouped_mm", lambda *_: grouped))
            generation = push(fake_generation(as_cuda=as_cuda))
        # A learner's error is theirs to read, without the mode's own log of it above.
        push(patch(fake_tensor.log, "disabled", True))
        push(fake_bitsandbytes(gpu))
        push(_LibraryAnswers(generation))
        if as_cuda:
            push(cuda_names())
            push(cuda_operators())
            push(patch(FakeTensor, "data", _data, create=True))
            push(cuda_autocast_rules())
            push(cuda_attention_choice(gpu))
            for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
                push(patch(torch._VF, name, _recurrent, create=True))
            for module in _optimizer_modules():
                push(patch(module, "_default_to_fused_or_foreach", foreach))
        else:
            push(no_cuda())
        try:
            yield
        except (AssertionError, AttributeError, RuntimeError) as error:
            if not any(name in str(error).lower() for name in ("cuda", "nvidia", "accelerator")):
                raise
            raise InputError(f"{line_of_error(error)} {NAMES_CUDA}") from error


def _recurrent(*args: Any, **kwargs: Any) -> NoReturn:
    refuse(
        "runs a recurrent layer, which keeps less for backward on the CPU, where simulations run, "
        "than on a GPU. Run the script as it is with `labkit phantom`."
    )


def _packs_nothing(*args: Any, **kwargs: Any) -> None:
    """Not a mock of the library's: that would keep the positions of every call."""


#: Their result is written into a tensor of their input's size, whose memory it keeps: PyTorch's
#: ``TORCH_META_FUNC(mse_loss)`` in ``BinaryOps.cpp``, ``binary_cross_entropy_cuda`` in ``Loss.cu``,
#: ``col2im_cuda`` in ``Col2Im.cu``.
_KEEP_ALL = {
    torch.ops.aten.col2im.default,
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
}


#: Its second result, for the CPU's backward pass, is empty on a GPU (``log_sigmoid_forward_cuda``
#: in ``Activation.cpp``).
_LOG_SIGMOID = torch.ops.aten.log_sigmoid_forward.default
#: It draws its seeds on the host: ``_efficient_attention_forward`` in ``attention.cu``.
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default


@functools.cache
def _runs_on_the_cpu(func: Any) -> bool:
    """Return whether nobody knows the shapes of an operator's results, so that fake tensors let the
    CPU's kernel compute them from zeros, and take the CPU for their device."""
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    known = torch._C._dispatch_has_kernel_for_dispatch_key
    return func.namespace == "aten" and not any(known(func.name(), key) for key in keys)


class _LibraryAnswers(TorchDispatchMode):
    """Answers 1 where an optimizer of PyTorch's asks for a value (Adafactor scales by norms).

    The value changes what is computed, never what is allocated. An experiment's own question is
    not answered. What ``generate`` asks is `Generation`'s to answer.
    """

    def __init__(self, generation: Generation | None) -> None:
        super().__init__()
        self.generation = generation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            answer = _library_answer(args[0], self.generation)
            if answer is not None:
                return answer
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            if torch.device(device).type == "cuda":
                refuse_cuda()
            refuse(f"puts a tensor on {str(device)!r}. Use the device that it is given.")
        if func._schema.is_mutable:
            real = [t for t in tree_leaves(args) if type(t) is Parameter or type(t) is torch.Tensor]
            if any(t.is_floating_point() and t.device.type != "meta" for t in real):
                raise InputError(
                    "the experiment changes a tensor that was made outside it. Build the model and "
                    "everything else inside, so that a simulation leaves your tensors alone."
                )
        if func is torch.ops.aten._grouped_mm.default:  # fake tensors know it for bfloat16 alone
            return _create_grouped_mm_output_tensor(*args, None)
        out = func(*args, **kwargs)
        if self.generation is not None:
            self.generation.saw(func, args, out)
        if func is torch.ops.aten._to_copy.default and device is not None:
            out.fake_device = torch.device(device)  # numbers are copied without it
        elif device is None and isinstance(out, FakeTensor) and out.constant is not None:
            # And computed with.
            given = [t.device for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            if given and all(each == GPU_DEVICE for each in given):
                out.fake_device = GPU_DEVICE
        if func in _KEEP_ALL and out.numel() < args[0].numel():
            out.untyped_storage().resize_(args[0].numel() * out.element_size())
        if func is _LOG_SIGMOID and args[0].device == GPU_DEVICE:
            out[1].untyped_storage().resize_(0)
        if func is _EFFICIENT:
            for seed in out[2:]:
                seed.fake_device = torch.device("cpu")
        elif _runs_on_the_cpu(func):
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if tensors and all(t.device == GPU_DEVICE for t in tensors):
                for made in tree_leaves(out):
                    if isinstance(made, FakeTensor):
                        made.fake_device = GPU_DEVICE
        return out


def _set_data(tensor: FakeTensor, data: FakeTensor) -> None:
    torch.Tensor.data.__set__(tensor, data)
    tensor.fake_device = data.fake_device


# `parameter.data = elsewhere` moves a parameter; a fake tensor keeps its device beside its data.
_data = property(torch.Tensor.data.__get__, _set_data)


def _library_answer(tensor: torch.Tensor, generation: Generation | None) -> Any:
    """Return what PyTorch's own code is told; None where the question is the experiment's own."""
    frame = sys._getframe(2)  # who called .item(), bool() or float(): the first outside the modes
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "torch.amp.grad_scaler":
            # found-inf is summed: none was found. Anything else it asks is a scale or a counter.
            return 0.0 if frame.f_code.co_name in ("_maybe_opt_step", "<genexpr>") else 1.0
        if frame.f_code.co_name == "torch_compilable_check":
            return True  # transformers asks whether there are as many placeholders as images need
        # A seed, or which sample is next: all have one shape, or none could be known. Whether every
        # stage of a pipeline knows its shapes beforehand: they all run this code.
        if name.startswith(("torch.utils.data.", "torch.distributed.pipelining.")):
            return 1
        if name.startswith("torch.optim."):
            # Numbers change no allocation; a yes or no (L-BFGS: stop now?) does: refuse it.
            return None if tensor.dtype is torch.bool else 1.0
        if name.startswith(GENERATION) and generation is not None:
            return generation.answer(tensor)
        if not f"{name}.".startswith(("torch.", "gpumem.")):
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
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("torch.optim.")]
    return [m for m in modules if hasattr(m, "_default_to_fused_or_foreach")]

"""What names CUDA in an experiment means the simulated GPU.

In a simulation the GPU is the device `GPU_DEVICE`, whose type is ``cpu``: ``model.cuda()`` would
fail, and ``torch.autocast("cuda")`` would do nothing, as without a GPU. Inside `cuda_names`

- ``"cuda"`` as the device of a tensor, of a module or by default is the simulated GPU;
- autocast, what it answers about itself, and ``GradScaler`` for CUDA are the simulated GPU's;
- `labkit.fake.cuda_functions` answers for ``torch.cuda`` and ``torch.accelerator``, or refuses.

Limits: libraries that compare a device's type with ``"cuda"`` take their CPU's way.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.amp import autocast_mode
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device

from labkit.fake.cuda_functions import GPU_DEVICE, asks_simulation, function_patches
from labkit.fake.users_code import refuse
from labkit.hardware.catalogue import Gpu


@contextmanager
def cuda_names(gpu: Gpu) -> Iterator[None]:
    """Inside, the names of CUDA stand for the simulated ``gpu``."""
    with ExitStack() as stack:
        stack.callback(_restore_default_device, _chosen_default_device())
        # The type that is used where none is named: CUDA's is float16, the CPU's bfloat16.
        stack.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
        for patch in (*_autocast_patches(), *function_patches(gpu)):
            stack.enter_context(patch)
        outside = default_device.CURRENT_DEVICE
        if outside is not None and outside.type == "cuda":
            stack.enter_context(default_device.DeviceContext(GPU_DEVICE))
        stack.enter_context(_CudaDevices())
        yield


def _chosen_default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context.device if context else None


def _restore_default_device(before: torch.device | None) -> None:
    """Undo a ``torch.set_default_device`` of the experiment's."""
    if _chosen_default_device() != before:
        torch.set_default_device(before)


# --- devices --------------------------------------------------------------------------------------


class _CudaDevices(TorchFunctionMode):
    """Puts on the simulated GPU what PyTorch's functions are to put on ``cuda``."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == _IS_CUDA:
            return args[0].device == GPU_DEVICE and asks_simulation(sys._getframe(1))
        if func is torch.Tensor.cuda:
            func = _cuda
        if func is torch.device and type((*args, None)[0]) is not int:
            return _here(func(*args, **kwargs))
        numbered = func in _NUMBERED
        args = tuple(_here(a) if numbered or type(a) is not int else a for a in args)
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        out = func(*args, **kwargs)
        if func in _FROM_DATA:
            # PyTorch builds a real CPU tensor first and forgets which CPU.
            device = args[0].device if func is torch.Tensor.new_tensor else None
            device = kwargs.get("device") or device or default_device.CURRENT_DEVICE
            if device is not None and torch.device(device) == GPU_DEVICE:
                return out.detach().to(GPU_DEVICE).requires_grad_(out.requires_grad)
        return out


# These take a GPU's number without its name.
_NUMBERED = {torch.device, torch.Tensor.to, torch._C._nn._parse_to}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_IS_CUDA = torch.Tensor.is_cuda.__get__


def _here(value: Any) -> Any:
    """`GPU_DEVICE` for a device that is CUDA's, or a GPU's number; any other value as it is."""
    if type(value) is int:
        index = value
    elif isinstance(value, str) and _CUDA_DEVICE.fullmatch(value):
        index = int(value.partition(":")[2] or 0)
    elif isinstance(value, torch.device) and value.type == "cuda":
        index = value.index or 0
    elif isinstance(value, str) and value.startswith("torch.cuda."):
        refuse(f"names a tensor type of CUDA's, {value!r}. Write .to(device) and a dtype instead.")
    else:
        return value
    own = dist.get_rank() if dist.is_initialized() else 0
    if index not in (0, own):
        refuse(f"names GPU {index}: a simulation has one, {own}. Use the device that is given.")
    return GPU_DEVICE


_CUDA_DEVICE = re.compile(r"cuda(:\d+)?")


def _cuda(tensor, device=None, non_blocking=False, memory_format=torch.preserve_format):
    device = GPU_DEVICE if device is None else _here(device)
    return tensor.to(device, non_blocking=non_blocking, memory_format=memory_format)


# --- autocast and loss scaling --------------------------------------------------------------------

_AUTOCAST_STATE = {
    "is_autocast_enabled": torch.is_autocast_enabled,
    "get_autocast_dtype": torch.get_autocast_dtype,
    "set_autocast_enabled": torch.set_autocast_enabled,
    "set_autocast_dtype": torch.set_autocast_dtype,
    "get_autocast_gpu_dtype": torch.get_autocast_dtype,
    "set_autocast_gpu_dtype": torch.set_autocast_dtype,
}


def _autocast_patches() -> Iterator[AbstractContextManager]:
    """CUDA's autocast and loss scaling as those of the type that `GPU_DEVICE` has."""
    patch = mock.patch.object
    yield patch(autocast, "__init__", _for_simulated(autocast.__init__))
    yield patch(GradScaler, "__init__", _for_simulated(GradScaler.__init__))
    yield patch(autocast, "__enter__", _made_inside(autocast.__enter__, "device"))
    yield patch(GradScaler, "scale", _made_inside(GradScaler.scale, "_device"))
    yield patch(autocast_mode, "_cast", _casting_simulated)
    for name, function in _AUTOCAST_STATE.items():
        yield patch(torch, name, _state_of_simulated(function))


def _for_simulated(plain_init: Callable) -> Callable:
    def init(self: Any, device: str = "cuda", *args: Any, **options: Any) -> None:
        device = options.pop("device_type", device)
        plain_init(self, _simulated_type(device), *args, **options)

    return init


def _simulated_type(device_type: str) -> str:
    return GPU_DEVICE.type if device_type == "cuda" else device_type


def _made_inside(method: Callable, device_attribute: str) -> Callable:
    """Refuse what was made before the simulation: without a GPU it had switched itself off."""

    def checked(self: Any, *args: Any) -> Any:
        if getattr(self, device_attribute) == "cuda":
            refuse(
                f"uses a {type(self).__name__} for 'cuda' that was made outside the experiment. "
                "Make it inside, also where it decorates a function."
            )
        return method(self, *args)

    return checked


def _casting_simulated(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    return _plain_cast(value, _simulated_type(device_type), dtype)


_plain_cast = autocast_mode._cast


def _state_of_simulated(function: Callable) -> Callable:
    """Calls that name no device mean CUDA."""

    def called(*args: Any) -> Any:
        if not args or not isinstance(args[0], str):
            args = ("cuda", *args)
        return function(_simulated_type(args[0]), *args[1:])

    return called


@contextmanager
def no_cuda() -> Iterator[None]:
    """Inside, CUDA's autocast and loss scaling are refused, which torch switches off on a CPU."""

    def refusing(plain_init: Callable) -> Callable:
        def init(self: Any, device: str = "cuda", *args: Any, **options: Any) -> None:
            device = options.pop("device_type", device)
            if device == "cuda" and options.get("enabled", True):
                refuse("is for a GPU, and this run is on the CPU. Write device.type for 'cuda'.")
            plain_init(self, device, *args, **options)

        return init

    with ExitStack() as stack:
        for kind in (autocast, GradScaler):
            patch = mock.patch.object(kind, "__init__", refusing(kind.__init__))
            stack.enter_context(patch)
        yield

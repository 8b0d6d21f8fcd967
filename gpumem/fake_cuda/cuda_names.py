"""What names CUDA in an experiment: autocast means the simulated GPU, anything else is refused.

The simulated GPU is `GPU_DEVICE`, whose type is ``cpu``. There ``torch.autocast("cuda")`` would
do nothing, as without a GPU, and ``torch.cuda`` would answer for this machine. Inside `cuda_names`

- autocast, what it answers about itself, and ``GradScaler`` for CUDA are the simulated GPU's;
- the user's code that asks ``torch.cuda`` or ``torch.accelerator``, or compares the type of the
  simulated device, is refused with its line; so is ``"cuda"`` as a device (`fake_tensors`).

Installed libraries get this machine's answers and take their CPU's way.

Limits: of functions that a file imports by their names (``from torch.cuda import is_available``)
those are seen that ask whether there is a GPU, or for its memory. ``str(device)`` is not seen.
"""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.amp import autocast_mode
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device

from gpumem.fake_cuda.refusals import is_users, refuse, refuse_cuda

#: What stands for the GPU: fake tensors keep it apart from plain "cpu", which is the host. Mixing
#: the two is refused as on a real GPU, and a copy between them is a copy.
GPU_DEVICE = torch.device("cpu", 0)


@contextmanager
def cuda_names() -> Iterator[None]:
    """Inside, CUDA's autocast is the simulated GPU's, and the user's code may ask CUDA nothing."""
    with ExitStack() as stack:
        stack.callback(_restore_default_device, _chosen_default_device())
        # The type that is used where none is named: CUDA's is float16, the CPU's bfloat16.
        stack.callback(torch.set_autocast_dtype, "cpu", torch.get_autocast_dtype("cpu"))
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
        for patch in (*_autocast_patches(), *_refusing_patches()):
            stack.enter_context(patch)
        stack.enter_context(_checked_device_type())
        stack.enter_context(_MadeFromData())
        yield


def _chosen_default_device() -> torch.device | None:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return context.device if context else None


def _restore_default_device(before: torch.device | None) -> None:
    """Undo a ``torch.set_default_device`` of the experiment's."""
    if _chosen_default_device() != before:
        torch.set_default_device(before)


class _MadeFromData(TorchFunctionMode):
    """Puts what is made of numbers on the simulated GPU; refuses questions that name CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            refuse_cuda()
        out = func(*args, **kwargs)
        asks = func == _IS_CUDA or (func is torch.device and out.type == "cuda")
        if asks and is_users(sys._getframe(1).f_code):
            refuse_cuda()
        if func in _FROM_DATA:
            # PyTorch builds a real CPU tensor first and forgets which CPU.
            device = args[0].device if func is torch.Tensor.new_tensor else None
            device = kwargs.get("device") or device or default_device.CURRENT_DEVICE
            if device is not None and torch.device(device) == GPU_DEVICE:
                return out.detach().to(GPU_DEVICE).requires_grad_(out.requires_grad)
        return out


_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_IS_CUDA = torch.Tensor.is_cuda.__get__


# --- what is refused ------------------------------------------------------------------------------


class _Guarded(ModuleType):
    """A module of PyTorch's that answers for this machine's GPU, closed to the user's code."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        frame = sys._getframe(1)
        if name == "is_available" and frame.f_globals.get("__name__") == _DATA_LOADER:
            return lambda: True  # it pins memory where there is a GPU
        if name != "amp" and is_users(frame.f_code):
            refuse_cuda()
        return getattr(self._module, name)


_DATA_LOADER = "torch.utils.data.dataloader"
#: Other questions that are refused. The switches of ``torch.backends`` are none: they change speed,
#: or kernels that `gpumem.fake_cuda.attention` chooses by them.
_QUESTIONS = (
    (torch.backends.cudnn, "is_available"),
    (torch.backends.cuda, "is_built"),
    (torch.backends.cuda, "is_flash_attention_available"),
    (torch.backends.cuda, "can_use_flash_attention"),
    (torch.backends.cuda, "can_use_efficient_attention"),
    (torch.backends.cuda, "can_use_cudnn_attention"),
    # What torch.cuda's functions ask before they say that there is no GPU, or nothing is taken.
    (torch.cuda, "_is_compiled"),
    (torch.cuda, "is_initialized"),
    (torch.cuda.memory, "is_initialized"),
)


def _refusing_patches() -> Iterator[AbstractContextManager]:
    for name in ("cuda", "accelerator"):
        yield mock.patch.object(torch, name, _Guarded(getattr(torch, name)))
    for module, name in _QUESTIONS:
        yield mock.patch.object(module, name, _refusing_user(getattr(module, name)))


def _refusing_user(function: Callable) -> Callable:
    """Refuse the user's code that calls ``function``, by one of torch.cuda's functions or not."""

    def checked(*args: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__", "").startswith("torch.cuda"):
            frame = frame.f_back
        if is_users(frame.f_code):
            refuse_cuda()
        return function(*args, **options)

    return checked


_TYPE = torch.device.type


@contextmanager
def _checked_device_type() -> Iterator[None]:
    """Inside, the user's code may hand on ``GPU_DEVICE.type``, but not compare it: it is "cpu"."""

    def checked(device: torch.device) -> str:
        kind = _TYPE.__get__(device)
        asked = device == GPU_DEVICE and is_users(sys._getframe(1).f_code)
        return _SimulatedType(kind) if asked else kind

    # torch.device is written in C and refuses setattr: write to the dictionary behind it, and drop
    # what the interpreter has cached.
    attributes = gc.get_referents(vars(torch.device))[0]
    before = attributes["type"]

    def show(value: Any) -> None:
        attributes["type"] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.device))

    show(property(checked))
    try:
        yield
    finally:
        show(before)


class _SimulatedType(str):
    """The type of the simulated device as the user's code sees it."""

    __slots__ = ()
    __eq__ = _refusing_user(str.__eq__)
    __ne__ = _refusing_user(str.__ne__)
    __hash__ = _refusing_user(str.__hash__)
    __contains__ = _refusing_user(str.__contains__)
    startswith = _refusing_user(str.startswith)


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
    cast = autocast_mode._cast
    yield patch(autocast_mode, "_cast", lambda x, kind, to: cast(x, _simulated_type(kind), to))
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

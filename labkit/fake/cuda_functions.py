"""What ``torch.cuda`` and ``torch.accelerator`` answer an experiment about the simulated GPU.

The user's own calls describe the simulated GPU, do nothing where there is nothing to do, or are
refused with the line that calls. Installed libraries get this machine's answers.

Limits: there is one stream. Streams and events order nothing, a tensor's memory is free as soon as
nothing refers to it, and each stream's own blocks are not simulated. Functions that a file imports
by their names (``from torch.cuda import is_available``) are not seen.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch

from labkit.fake.users_code import is_users, refuse
from labkit.hardware.catalogue import Gpu

#: What stands for the GPU: fake tensors keep it apart from plain "cpu", which is the host. Mixing
#: the two is refused as on a real GPU, and a copy between them is a copy.
GPU_DEVICE = torch.device("cpu", 0)

# Beside the functions that a module exports: classes, and functions with private names.
_MEMORY = ("_record_memory_history", "_snapshot", "_dump_snapshot")
_ATTENTION = (
    "is_flash_attention_available",
    "can_use_flash_attention",
    "can_use_efficient_attention",
    "can_use_cudnn_attention",
)


def _functions() -> Iterator[tuple[ModuleType, str]]:
    """Yield the functions that answer for a GPU; switches of ``torch.backends`` stay PyTorch's."""
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and not isinstance(value, type):
                yield module, name
    yield from ((torch.cuda, name) for name in ("device", "device_of"))
    yield from ((torch.cuda.memory, name) for name in _MEMORY)
    yield from ((torch.backends.cuda, name) for name in ("is_built", *_ATTENTION))
    yield torch.backends.cudnn, "is_available"
    yield torch.accelerator, "device_index"


def asks_simulation(frame: FrameType) -> bool:
    """Return whether the code in ``frame`` is told about the simulated GPU.

    PyTorch's data loader is: it pins memory only where there is a GPU.
    """
    name = frame.f_globals.get("__name__", "")
    return is_users(frame.f_code) or name.startswith("torch.utils.data.")


def function_patches(gpu: Gpu) -> Iterator[AbstractContextManager]:
    """Yield patches for each of these functions, and for streams, events and graphs."""
    answers = _Answers(gpu)
    for module, name in _functions():
        answer = getattr(answers, name, None) or _refusal(module, name)
        yield mock.patch.object(module, name, _either(getattr(module, name), answer))
    yield mock.patch.object(torch.cuda.Stream, "__new__", _one_stream)
    yield mock.patch.object(torch.cuda.Event, "__new__", _one_stream)
    yield mock.patch.object(torch.Tensor, "record_stream", answers.synchronize)
    yield mock.patch.object(torch.cuda.CUDAGraph, "__new__", _refusal(torch.cuda, "CUDAGraph"))


def _either(original: Callable, answer: Callable) -> Callable:
    def function(*args: Any, **options: Any) -> Any:
        asked = answer if asks_simulation(sys._getframe(1)) else original
        return asked(*args, **options)

    return function


def _refusal(module: ModuleType, name: str) -> Callable:
    def refused(*args: Any, **options: Any) -> NoReturn:
        refuse(f"calls {module.__name__}.{name}: {_INSTEAD.get(name, instead)}")

    instead = "a simulation has no answer. Leave the call out of the experiment."
    if "mem" in name:
        instead = (
            "the allocator is replayed after the experiment. Leave the call out, and read "
            "peak_bytes, reserved_bytes and trace of the run that simulate returns."
        )
    return refused


_INSTEAD = {
    "empty_cache": "the replay of the allocator keeps what is cached. Leave the call out: without "
    "it reserved_bytes is what a run needs at most.",
    "set_per_process_memory_fraction": "simulate a smaller GPU instead, "
    'gpu=dataclasses.replace(lab.gpu("t4"), usable_bytes=...).',
}


class _Answers:
    """What the user's own calls get; a function without an answer is refused."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def is_available(self) -> bool:
        return True

    is_initialized = is_built = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    current_device_index = current_device_idx = current_device

    def current_accelerator(self, check_available: bool = False) -> torch.device:
        return GPU_DEVICE

    def get_device_name(self, device: Any = None) -> str:
        return self._gpu.name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        if self._gpu.compute_capability is None:
            refuse(f"asks for a compute capability, which {self._gpu.name} does not have.")
        return self._gpu.compute_capability

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        major, minor = self.get_device_capability()
        total_memory = self._gpu.usable_bytes
        return SimpleNamespace(
            name=self._gpu.name, total_memory=total_memory, major=major, minor=minor
        )

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return including_emulation or self._gpu.bf16_native

    def is_current_stream_capturing(self) -> bool:
        return False

    def current_stream(self, device: Any = None) -> "_OneStream":
        return _OneStream()

    default_stream = current_stream

    def stream(self, stream: Any) -> AbstractContextManager:
        return nullcontext(stream)

    device = device_of = device_index = stream

    def synchronize(self, *args: Any, **options: Any) -> None:
        """There is nothing to do: order, random state and counters that are never shown."""

    init = ipc_collect = set_device = set_device_index = set_device_idx = synchronize
    set_stream = set_sync_debug_mode = synchronize
    manual_seed = manual_seed_all = seed = seed_all = synchronize
    reset_peak_memory_stats = reset_accumulated_memory_stats = synchronize
    reset_max_memory_allocated = reset_max_memory_cached = synchronize


class _OneStream(AbstractContextManager):
    """A stream or an event where there is one stream: nothing has to wait."""

    device = GPU_DEVICE

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize

    def record_event(self, event: Any = None) -> "_OneStream":
        return event or _OneStream()

    def elapsed_time(self, end: Any) -> NoReturn:
        refuse("asks for a time, and a simulation times nothing. Leave it to lab.measure.")


def _one_stream(kind: type, *args: Any, **options: Any) -> _OneStream:
    return _OneStream()

"""What ``torch.cuda`` and ``torch.accelerator`` answer an experiment about the simulated GPU.

The user's own calls describe the simulated GPU, do nothing where there is nothing to do, or are
refused with the line that calls. Installed libraries get this machine's answers.

Limits: functions that a file imports by their names (``from torch.cuda import is_available``) are
not seen.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch

from labkit.fake.streams import default_stream, set_stream, stream_patches
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
    patch, answers = mock.patch.object, _answers(gpu)
    for module, name in _functions():
        answer = answers.get(name) or _refusal(module, name)
        yield patch(module, name, _either(getattr(module, name), answer))
    for name in ("device", "device_of"):
        yield patch(torch.cuda, name, _kind(getattr(torch.cuda, name), nullcontext))
    yield from stream_patches()
    yield patch(torch.cuda.CUDAGraph, "__new__", _refusal(torch.cuda, "CUDAGraph"))


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


def _kind(original: type, answer: Callable) -> type:
    """Do as `_either` for a class, and stay one: libraries ask what is an instance of it."""

    class Kind(type):
        def __call__(cls, *args: Any, **options: Any) -> Any:
            asked = answer if asks_simulation(sys._getframe(1)) else original
            return asked(*args, **options)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

    return Kind(original.__name__, (original,), {})


_INSTEAD = {
    "empty_cache": "the replay of the allocator keeps what is cached. Leave the call out: without "
    "it reserved_bytes is what a run needs at most.",
    "set_per_process_memory_fraction": "simulate a smaller GPU instead, "
    'gpu=dataclasses.replace(lab.gpu("t4"), usable_bytes=...).',
}


#: There is nothing to do: order, random state and counters that are never shown.
_NOTHING_TO_DO = (
    *("init", "ipc_collect", "synchronize", "set_sync_debug_mode"),
    *("set_device", "set_device_index", "set_device_idx"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached"),
)


def _answers(gpu: Gpu) -> dict[str, Callable]:
    """Return by name what the user's own calls get; a function that is not there is refused."""

    def capability(device: Any = None) -> tuple[int, int]:
        if gpu.compute_capability is None:
            refuse(f"asks for a compute capability, which {gpu.name} does not have.")
        return gpu.compute_capability

    def properties(device: Any = None) -> SimpleNamespace:
        major, minor = capability()
        return SimpleNamespace(
            name=gpu.name, total_memory=gpu.usable_bytes, major=major, minor=minor
        )

    def bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or gpu.bf16_native

    return {
        **dict.fromkeys(("is_available", "is_initialized", "is_built"), _always(True)),
        **dict.fromkeys(
            ("current_device", "current_device_index", "current_device_idx"), _always(0)
        ),
        **dict.fromkeys(_NOTHING_TO_DO, _nothing),
        "device_index": nullcontext,
        "stream": torch.cpu.stream,
        "current_stream": torch.cpu.current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "device_count": _always(1),
        "current_accelerator": _always(GPU_DEVICE),
        "is_current_stream_capturing": _always(False),
        "get_device_name": _always(gpu.name),
        "get_device_capability": capability,
        "get_device_properties": properties,
        "is_bf16_supported": bf16_supported,
    }


def _always(answer: Any) -> Callable:
    return lambda *args, **options: answer


_nothing = _always(None)

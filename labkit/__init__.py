"""labkit: predict, measure and understand the GPU memory of a training step.

    import labkit as lab

    def experiment(device, batch_size=8):
        model = lab.model("SmolLM2-135M", device=device)
        ...
        yield loss

    run = lab.run(experiment, batch_size=8)   # measured on a GPU, else simulated for a T4
    lab.bars([run])

Everything public is listed in ``__all__``; a name loads its module, and that module's libraries,
when it is first used.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "labkit.measure": ("measure",),
    "labkit.simulate": ("simulate",),
    "labkit.worlds": ("run", "sweep"),
    "labkit.ranks": ("RankError", "launch"),
    "labkit.allocator": ("CachingAllocator",),
    "labkit.replays": ("replay",),
    "labkit.recipes": ("Recipe",),
    "labkit.estimates": ("estimate",),
    "labkit.formula": ("envelope",),
    "labkit.advice": ("advise",),
    "labkit.tracker": ("SimulatedOutOfMemory", "track"),
    "labkit.memory": (
        "Category", "InputError", "OutOfMemory", "Phase", "Run", "Trace", "format_bytes",
    ),
    "labkit.hardware": (
        "cuda_memory", "free_memory", "gpu", "gpus", "machine", "pretend", "read_snapshot",
    ),
    "labkit.models": (
        "PRECISIONS", "autocast", "batches", "checkpointing", "corpus", "dtype_of", "model",
        "model_info", "pretrained",
    ),
    "labkit.clock": ("Clock",),
    "labkit.compilers": ("missing_compiler",),
    "labkit.seeds": ("losses",),
    "labkit.evaluation": ("held_out_loss",),
    "labkit.comparing": ("exponent", "relative_error"),
    "labkit.disk": ("Scratch", "Shelf", "disk_speed", "files"),
    "labkit.claims": ("claim", "expect"),
    "labkit.exercises": ("exercise",),
    "labkit.session": ("folder", "recorded", "result", "start"),
    "labkit.show.allocation": ("segments",),
    "labkit.show.calculator": ("calculator",),
    "labkit.show.curves": ("lines",),
    "labkit.show.dots": ("dots",),
    "labkit.show.frontier": ("frontier",),
    "labkit.show.gantt": ("gantt", "idle_share"),
    "labkit.show.levels": ("levels",),
    "labkit.show.pairs": ("side_by_side",),
    "labkit.show.parts": ("parts", "write_seconds"),
    "labkit.show.plots": ("bars",),
    "labkit.show.predictions": ("predict",),
    "labkit.show.tables": ("table",),
    "labkit.show.timelines": ("timeline",),
    "labkit.show.training": ("loss_curves",),
    "labkit.show.widgets": ("explore",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


class _Package(ModuleType):
    """Two functions have the names of their modules, which must not take their place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in _MODULE_OF:  # it has just been imported
            value = getattr(value, name)
        super().__setattr__(name, value)


# So that nothing is imported before it is used: `labkit doctor` must start where PyTorch cannot.
sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""labkit: predict, measure and understand the GPU memory of a training step.

    import labkit as lab

    def experiment(device, batch_size=8):
        model = lab.model("SmolLM2-135M", device=device)
        ...
        yield loss

    run = lab.run(experiment, batch_size=8)   # measured on a GPU, else simulated for a T4
    lab.bars([run])

docs/API.md documents the public names. A name loads its module, and the libraries that module
needs, when it is first used: `labkit doctor` must start where PyTorch cannot be imported.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

#: The public names by group and by the module that defines them.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "Run an experiment": {
        "labkit.dispatch": ("run",),
        "labkit.measurement": ("measure",),
        "labkit.simulation": ("simulate",),
        "labkit.distributed.launch": ("launch",),
        "labkit.tracker": ("track",),
        "labkit.runs": ("Run",),
        "labkit.trace": ("Trace",),
        "labkit.hardware.this_machine": ("pretend",),
        "labkit.hardware.catalogue": ("gpu", "gpus"),
        "labkit.hardware.cuda": ("free_memory",),
        "labkit.values": ("format_bytes", "InputError"),
    },
    "Models and data": {
        "labkit.models.catalogue": ("model", "model_info", "pretrained", "checkpointing"),
        "labkit.models.precisions": ("dtype_of", "autocast"),
        "labkit.models.text": ("batches",),
    },
    "Plan a training run": {
        "labkit.plan.recipe": ("Recipe",),
        "labkit.plan.training": ("training",),
        "labkit.plan.estimate": ("estimate",),
        "labkit.plan.advice": ("advise",),
    },
    "In a lesson": {
        "labkit.course.session": (
            "start",
            "claim",
            "claim_seconds",
            "claim_table",
            "expect",
            "recorded",
            "result",
            "folder",
        ),
        "labkit.exercises.engine": ("exercise",),
        "labkit.show.predictions": ("predict",),
        "labkit.show.widgets": ("explore",),
    },
    "Compare and draw": {
        "labkit.toolbox.losses": ("losses",),
        "labkit.toolbox.compare": ("relative_error",),
        "labkit.show.bars": ("bars",),
        "labkit.show.timelines": ("timeline",),
        "labkit.show.lines": ("lines",),
        "labkit.show.loss_curves": ("loss_curves",),
    },
}
_MODULE_OF = {
    name: module
    for modules in GROUPS.values()
    for module, names in modules.items()
    for name in names
}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

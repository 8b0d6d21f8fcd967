"""gpumem: what a training step takes of a GPU's memory; track, measure, simulate, estimate.

    import gpumem

    run = gpumem.simulate(experiment, gpu="t4", batch_size=8)
    print(run.peak_bytes, run.by_category)
    print(gpumem.estimate("Llama-3.1-8B", gpu="rtx-4090", precision="bf16", lora=16))

A name loads its module, and the libraries that module needs, when it is first used.
"""

from typing import Any

from gpumem.lazy import public_names

#: The public names by group and by the module that defines them.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "Run an experiment": {
        "gpumem.measure_or_simulate": ("run",),
        "gpumem.measurement": ("measure",),
        "gpumem.simulation": ("simulate",),
        "gpumem.ranks.launch": ("launch",),
        "gpumem.tracker": ("track",),
        "gpumem.runs": ("Run",),
        "gpumem.trace": ("Trace",),
        "gpumem.hardware.this_machine": ("pretend",),
        "gpumem.hardware.catalogue": ("gpu", "gpus"),
        "gpumem.hardware.cuda": ("free_memory",),
        "gpumem.inputs": ("InputError",),
        "gpumem.units": ("format_bytes",),
    },
    "Models and data": {
        "gpumem.models.catalogue": ("model", "model_info", "pretrained", "checkpointing"),
        "gpumem.models.precisions": ("dtype_of", "autocast"),
        "gpumem.models.text": ("batches",),
    },
    "Plan a training run": {
        "gpumem.estimation.recipe": ("Recipe",),
        "gpumem.estimation.training": ("training",),
        "gpumem.estimation.estimate": ("estimate",),
        "gpumem.estimation.advice": ("advise",),
    },
    "Plan what answers": {
        "gpumem.estimation.generation": ("Serving", "generation"),
        "gpumem.estimation.serving": ("serve",),
        "gpumem.estimation.serving_advice": ("advise_serving",),
    },
}

__all__, __getattr__, __dir__ = public_names(__name__, GROUPS)


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook ``%memory`` and ``%%memory``: ``%load_ext gpumem``."""
    from gpumem.notebook import load

    load(shell)

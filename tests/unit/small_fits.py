"""A table of fits, small enough to be computed in a test."""

from labkit.fitting import build
from labkit.fitting.table import FitTable
from labkit.plan.recipe import Recipe

MODEL = "SmolLM2-tiny"
TOKENS = (512, 1024, 2048, 4096)
WAYS = [
    Recipe(precision="fp32"),
    Recipe(precision="bf16"),
    Recipe(precision="bf16", checkpointing=True, chunked_loss=True),
    Recipe(precision="bf16", checkpointing=True, chunked_loss=True, offload="weights"),
    Recipe(precision="bf16", attention="eager"),
    Recipe(precision="bf16", lora=16),
    Recipe(precision="bf16", ranks=2),
    Recipe(precision="amp-fp16"),
]


def plan_small_table(patch) -> None:
    """Have `labkit.fitting.build` plan it; ``patch`` is pytest's monkeypatch."""
    patch.setattr(build, "ways", lambda: WAYS)
    patch.setattr(build, "TOKENS", TOKENS)
    patch.setattr(build, "LENGTHS", (512, 1024))


def small_table(patch, folder) -> FitTable:
    """Compute it with the steps of a real one."""
    plan_small_table(patch)
    return build._table({MODEL: build.model_points(MODEL, folder)})

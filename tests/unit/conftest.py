"""What tests of advice and of its command share."""

from types import SimpleNamespace

import pytest

from gpumem.estimation import recipes_to_try, search
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.trace import Trace
from gpumem.units import GIB, MIB


@pytest.fixture
def guessed(monkeypatch):
    """Estimates by a formula; the recipes that were asked for, in order."""
    asked = []

    def estimate(config, *, gpu, recipe, loops):
        assert not loops  # each would be simulated twice
        asked.append(recipe)
        least = recipes_to_try.least_bytes(recipe, shapes_of(config))
        each = 30 * MIB if recipe.checkpointing or recipe.offload == "activations" else 100 * MIB
        needed = least + each * recipe.batch_size
        again = 1 + 0.3 * recipe.checkpointing + 0.02 * recipe.chunked_loss
        run = SimpleNamespace(
            trace=Trace("cpu:0", (), (), (0,)),
            host_bytes=30 * GIB if recipe.offload != "none" or "paged" in recipe.optimizer else 0,
            flops=int(10**12 * recipe.tokens * again),
            moved_bytes=10**9,
            sent_bytes=10**9 * (recipe.ranks > 1),
        )
        fits = needed <= gpu.budget_bytes
        return SimpleNamespace(
            recipe=recipe, gpu=gpu, peak_reserved_bytes=needed, fits=fits, run=run
        )

    monkeypatch.setattr(search, "estimate", estimate)
    return asked

"""Recipes whose model several GPUs share: simulated as they run, and refused where they cannot."""

import json

import pytest
import rank_jobs
from test_depth import IMAGES
from transformers import LlamaConfig

import labkit as lab
from benchmarks.setups import TINY
from gpumem.allocator.replay import replay
from gpumem.allocator.workspaces import with_workspaces
from gpumem.estimation import recipes_to_try
from gpumem.estimation.estimate import one_layer_bytes, recipe_log
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.training import training
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.fake_cuda.process_group import fake_ranks
from gpumem.hardware.catalogue import GPUS
from gpumem.inputs import InputError
from gpumem.models.config import find_config
from gpumem.simulation import simulated_log

pytestmark = pytest.mark.slow
H100 = GPUS["h100"]
CONFIG = LlamaConfig(**TINY | {"num_hidden_layers": 7})
RECIPES = {
    "bf16 units, checkpointing, chunked loss": {
        **{"precision": "amp-bf16", "optimizer": "sgd"},
        **{"checkpointing": True, "chunked_loss": True},
    },
    "on the host": {"offload": "weights", "checkpointing": True},
    "bf16 units": {"precision": "amp-bf16"},
    "accumulated": {"accumulate": 3},
    "LoRA": {"lora": 4, "checkpointing": True, "precision": "bf16"},
}
AT_NIGHT = ("bf16 units", "accumulated", "LoRA")
CASES = [
    pytest.param(settings, id=name, marks=pytest.mark.nightly if name in AT_NIGHT else ())
    for name, settings in RECIPES.items()
]


def agree(config, settings):
    recipe = Recipe(batch_size=2, seq_len=32, ranks=8, **settings)
    found, whole = (recipe_log(config, recipe, H100, exact=exact) for exact in (False, True))
    assert (found.exact, whole.exact) == (False, True)
    assert found.layer_bytes == whole.layer_bytes
    assert found.log.step_work == whole.log.step_work
    for device in ("cpu:0", "cpu"):
        made, traced = (log.trace.peak(device) for log in (found.log, whole.log))
        assert made.by_category == traced.by_category


@pytest.mark.parametrize("settings", CASES)
def test_extended_and_whole_trace_agree(settings):
    agree(CONFIG, settings)


@pytest.mark.nightly
def test_they_agree_where_a_vision_tower_is_shared_too():
    agree(IMAGES, {"precision": "amp-bf16", "checkpointing": True})


@pytest.mark.parametrize("settings", CASES)
def test_third_step_is_the_second_again(settings):
    recipe = Recipe(batch_size=2, seq_len=32, ranks=8, **settings)
    with fake_ranks(8, 0, as_cuda=True):
        traced = simulated_log(training(CONFIG, recipe), gpu=H100, steps=3).trace
    found = recipe_log(CONFIG, recipe, H100, exact=True)
    repeated = found.log.trace
    assert found.layer_bytes == one_layer_bytes(traced)
    assert [tuple(e)[1:] for e in repeated.events] == [tuple(e)[1:] for e in traced.events]
    replayed = [replay(with_workspaces(trace, H100)) for trace in (repeated, traced)]
    assert replayed[0].step_peaks_bytes() == replayed[1].step_peaks_bytes()
    assert replayed[0].peak_reserved_bytes == replayed[1].peak_reserved_bytes


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({}, True),
        pytest.param(
            {"checkpointing": True, "chunked_loss": True}, True, marks=pytest.mark.nightly
        ),
        pytest.param(
            {"lora": 4, "optimizer": "sgd", "accumulate": 2}, False, marks=pytest.mark.nightly
        ),
    ],
    ids=["plain", "checkpointing, chunked loss", "LoRA"],
)
def test_simulated_as_two_real_ranks(settings, tied):
    recipe = Recipe(batch_size=2, seq_len=96, ranks=2, **settings)
    job = {"record": json.dumps(recipe.to_dict()), "tied": tied}
    fake = lab.simulate(rank_jobs.recipe, ranks=2, **job)
    as_simulated = pytest.approx(fake.peak_bytes, rel=0.02)
    # Gloo's copies of what it sums live a little longer, now on one rank, now on both: as with
    # seconds, the least of a few launches is what the recipe itself takes.
    for _ in range(3):
        real = lab.launch(rank_jobs.recipe, ranks=2, steps=3, **job)
        if (least_bytes := min(run.peak_bytes for run in real)) == as_simulated:
            break
    assert least_bytes == as_simulated
    for run in real:
        assert run.sent_bytes == fake.sent_bytes > 0
        assert run.bytes_of("optimizer") == fake.bytes_of("optimizer")
        assert run.losses[-1] < 6, run.losses  # guessing costs log(256) = 5.5, a broken model more
    assert real[0].losses != real[1].losses  # each has rows of its own


def test_frozen_weights_are_divided_too():
    """As states are: tests/unit/test_fake_ranks.py."""
    alone, shared = (
        lab.estimate("Llama-3.1-8B", gpu="h100", precision="bf16", lora=8, ranks=ranks)
        for ranks in (1, 8)
    )
    held = shared.by_category["weights"]
    assert alone.by_category["weights"] / 8 < held < alone.by_category["weights"] / 4


def test_estimate_says_what_is_sent():
    found = lab.estimate("SmolLM2-135M", gpu="t4", ranks=4)
    parameters = lab.model_info("SmolLM2-135M").parameters
    # Gathered for forward, again for backward (but for the root and the last layer), summed once.
    most = 3 * 4 * parameters * 3 // 4
    sent_bytes = found.run.sent_bytes
    assert 0.7 * most < sent_bytes < most
    assert f"Each GPU sends {sent_bytes / 1e9:.4g} GB" in str(found)
    assert found.to_dict()["sent_bytes"] == sent_bytes


def test_a_recipe_for_many_is_not_run_by_one():
    experiment = lab.training("SmolLM2-tiny", Recipe(ranks=2))
    with pytest.raises(InputError, match="shares a model among 2 ranks, not 1"):
        lab.simulate(experiment)


# --- advice ---------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_several_gpus_may_share_what_one_cannot_hold():
    best = lab.advise("Llama-3.2-1B", "t4", gpus=4, only="full").best["same"]
    assert best.recipe.ranks == 4
    shapes, room_bytes = shapes_of(find_config("Llama-3.2-1B")[1]), GPUS["t4"].budget_bytes
    assert recipes_to_try.least_bytes(best.recipe.but(ranks=1), shapes) > room_bytes
    assert best.sent_bytes > 0
    assert any("one model for all 4 GPUs" in sentence for sentence in best.costs)


def test_bounds_that_need_no_simulation_are_bounds():
    shapes = shapes_of(CONFIG)
    for configuration in recipes_to_try.configurations(H100, 32, None)[::3]:
        for level in recipes_to_try.levels(configuration, H100, 8):
            least = recipes_to_try.least_bytes(level, shapes, 8)
            if level.ranks > 1:
                found = lab.estimate(CONFIG, gpu=H100, recipe=level)
                assert least <= found.peak_reserved_bytes

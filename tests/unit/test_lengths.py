"""Steps of varied length: one trace spliced from two-step traces, and what it reserves."""

import pytest

import labkit as lab
from benchmarks.setups import tiny_config, training_of_lengths
from gpumem.allocator.replay import ReplayedCuda
from gpumem.estimation.estimate import recipe_log
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.training import training
from gpumem.fake_cuda.step_extension import continued
from gpumem.inputs import InputError
from gpumem.measure_or_simulate import measured_or_replayed
from gpumem.simulation import simulated_log

GPU = lab.gpu("a100-80gb")
LENGTHS = (64, 200, 130, 64, 200)
RECIPES = {
    "plain": Recipe(batch_size=2),
    "LoRA": Recipe(batch_size=2, precision="bf16", lora=4, quantize="nf4", checkpointing=True),
    "on the host": Recipe(batch_size=2, offload="activations", optimizer="sgd"),
}


def changes(trace):
    """Each change with what it changes: a storage is known by the place of its first event."""
    first = {}
    for index, event in enumerate(trace.events):
        first.setdefault(event.storage, index)
    return [
        (trace.storages[e.storage].device, first[e.storage], e.change_bytes) for e in trace.events
    ]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=name, marks=pytest.mark.nightly if name == "plain" else ())
        for name, recipe in RECIPES.items()
    ],
)
def test_spliced_and_simulated_steps_are_the_same_events(recipe):
    config = tiny_config()
    train = training_of_lengths(config, recipe, LENGTHS)
    whole = simulated_log(train, gpu=GPU, steps=len(LENGTHS))
    traces = {
        length: recipe_log(config, recipe.but(seq_len=length), GPU, exact=True).log.trace
        for length in set(LENGTHS)
    }
    spliced = continued(traces, LENGTHS)
    assert changes(spliced) == changes(whole.trace)
    assert len(spliced.step_starts) == len(LENGTHS)


def test_a_splice_needs_two_steps():
    trace = simulated_log(training(tiny_config(), Recipe()), gpu=GPU, steps=1).trace
    with pytest.raises(InputError, match="two steps"):
        continued({1: trace}, (1, 1))


@pytest.mark.parametrize("expandable", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_without_a_gpu_the_steps_of_an_experiment_are_replayed(expandable):
    recipe = Recipe(batch_size=4)

    def train(device, lengths):
        yield from training_of_lengths(tiny_config(), recipe, lengths)(device)

    cuda, steps = measured_or_replayed(
        train, list(LENGTHS), gpu="t4", expandable_segments=expandable
    )
    run = lab.simulate(train, gpu="t4", steps=len(LENGTHS), lengths=LENGTHS)
    whole = ReplayedCuda(run.trace, "t4", expandable_segments=expandable)
    reserved = [cuda.memory_reserved() for _ in steps]
    assert reserved == [whole.memory_reserved() for _ in whole.steps()]
    assert reserved[0] < reserved[-1]

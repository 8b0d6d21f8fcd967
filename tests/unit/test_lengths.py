"""Steps of varied length: one trace spliced from two-step traces, and what it reserves."""

import json

import pytest

import labkit as lab
from benchmarks.setups import tiny_config
from labkit.cli.main import main
from labkit.dispatch import measured_or_replayed
from labkit.fake.repeated_steps import continued
from labkit.plan.estimate import recipe_log
from labkit.plan.lengths import drawn_lengths, over_lengths
from labkit.plan.recipe import Recipe
from labkit.plan.training import training
from labkit.simulation import simulated_log
from labkit.values import InputError

GPU = lab.gpu("a100-80gb")
LENGTHS = (64, 200, 64, 130, 129, 300, 64, 200)
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


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_spliced_and_simulated_steps_are_the_same_events(recipe):
    config = tiny_config()
    whole = simulated_log(training(config, recipe, lengths=LENGTHS), gpu=GPU, steps=len(LENGTHS))
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


def test_lengths_are_drawn_as_they_are_described(tmp_path):
    drawn = drawn_lengths("60-768", steps=1000)
    assert drawn == drawn_lengths("60-768", steps=1000) != drawn_lengths("60-768", seed=1)
    assert (min(drawn), max(drawn)) == (60, 768)
    assert len(drawn_lengths("60-768")) == 300
    padded = drawn_lengths("60-768", steps=1000, batch_size=4)
    assert sum(padded) / 1000 == pytest.approx(60 + 709 * 4 / 5, rel=0.02)  # the longest of four
    by_mean = drawn_lengths("400", steps=10_000)
    assert sum(by_mean) / 10_000 == pytest.approx(400, rel=0.02)
    assert max(by_mean) <= 1600
    rows = tmp_path / "rows.txt"
    rows.write_text("10 20\n30\n")
    assert drawn_lengths(str(rows)) == (10, 20, 30)
    assert drawn_lengths(str(rows), batch_size=2) == (20, 30)
    assert drawn_lengths(str(rows), steps=4) == (10, 20, 30, 10)


@pytest.mark.parametrize("text", ["768-60", "0-5", "0", "no/such/file", "9999999-99999999"])
def test_other_lengths_are_refused(text):
    with pytest.raises(InputError, match="length"):
        drawn_lengths(text)


@pytest.mark.parametrize("content", ["", "12 twelve", "-3"])
def test_files_without_lengths_are_refused(content, tmp_path):
    rows = tmp_path / "rows.txt"
    rows.write_text(content)
    with pytest.raises(InputError, match="whole numbers, one for each row"):
        drawn_lengths(str(rows))


def test_what_is_reserved_grows_until_every_length_has_been_there():
    found = over_lengths(tiny_config(), lengths=LENGTHS, gpu="t4", batch_size=4)
    ordinary = found.ways["ordinary"]
    assert found.fits
    assert len(ordinary.after_step_bytes()) == len(LENGTHS)
    assert ordinary.after_step_bytes()[0] < ordinary.after_step_bytes()[-1]
    assert ordinary.peak_reserved_bytes > found.ways["longest first"].peak_reserved_bytes
    assert "rows of 64 to 300 tokens, 8 steps" in str(found)
    same = over_lengths(tiny_config(), lengths=[300, 300], gpu="t4", batch_size=4).ways
    estimate = lab.estimate(tiny_config(), gpu="t4", batch_size=4, seq_len=300)
    assert same["ordinary"].peak_reserved_bytes == estimate.peak_reserved_bytes


def test_without_a_gpu_the_steps_of_an_experiment_are_replayed():
    recipe = Recipe(batch_size=4)
    ways = over_lengths(tiny_config(), lengths=LENGTHS, gpu="t4", recipe=recipe).ways

    def train(device, lengths, layers=None):
        yield from training(tiny_config(), recipe, lengths=lengths)(device, layers)

    for way, expandable in {"ordinary": False, "expandable segments": True}.items():
        cuda, steps = measured_or_replayed(
            train, list(LENGTHS), gpu="t4", expandable_segments=expandable
        )
        assert tuple(cuda.memory_reserved() for _ in steps) == ways[way].after_step_bytes()


def test_the_command_says_what_fits(capsys):
    command = ["estimate", "SmolLM2-135M", "--gpu", "t4", "--lengths", "500-768", "--json"]
    assert main([*command, "--steps", "3", "--batch-size", "10"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["ways"]["ordinary"]["failure"].startswith("out of memory")
    assert len(record["lengths"]) == 3

    for more, reason in {
        ("--steps", "0"): "steps must be",
        ("--exact",): "--lengths goes with neither",
        ("--accumulate", "2"): "leave out accumulate",
    }.items():
        assert main([*command, *more]) == 2
        assert reason in capsys.readouterr().err
    assert main(["estimate", "SmolLM2-135M", "--steps", "3"]) == 2

"""Benchmarks of a tiny model on the CPU, end to end; their records; the table, by simulation."""

import itertools
import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from lesson_files import run

from benchmarks.setups import tiny_config
from labkit.hardware import catalogue, this_machine
from labkit.hardware.catalogue import GPUS
from labkit.hardware.this_machine import gpu_key, this_gpu
from labkit.models import catalogue as models
from labkit.plan.estimate import estimate
from labkit.plan.recipe import Recipe
from labkit.recording import benchmark_worker, benchmarks
from labkit.recording.benchmark_worker import CANNOT, STEPS, run_benchmark
from labkit.recording.benchmarks import BENCHMARKS, Benchmark, BenchmarkResult, Entry
from labkit.runs import OutOfMemory
from labkit.support.files import write_atomic
from labkit.values import MIB, InputError

SMALL = Recipe(batch_size=4, seq_len=96)
CHECKPOINTED = SMALL.but(checkpointing=True)
DATE = "2026-01-02T03:04:05+00:00"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with the config of a tiny model."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    return str(folder)


def benchmark(**changes):
    recipes = (("plain", SMALL), ("checkpointed", CHECKPOINTED))
    values = {"name": "stack", "shows": "It fits.", "model": "nobody's", "recipes": recipes}
    return Benchmark(**{**values, **changes})


def made(model, **changes):
    return run_benchmark(benchmark(model=model, **changes))


def read_back(found):
    return BenchmarkResult.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))


# --- running, on the CPU ------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    """A GPU, where there is one, has workspaces that the small budgets here have no room for."""
    cpu = {"kind": "cpu", "name": "A CPU", "capacity_bytes": None, "bf16_native": False, "note": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(this_machine, "_accelerator", lambda: cpu)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def test_a_benchmark_has_a_run_and_its_prediction_for_each_recipe(model):
    found = made(model)
    plain, checkpointed = found.entries
    assert [(entry.label, entry.recipe) for entry in found.entries] == [
        ("plain", SMALL),
        ("checkpointed", CHECKPOINTED),
    ]
    for entry in found.entries:
        assert entry.fitted
        assert len(entry.run.losses) == STEPS
        assert abs(entry.peak_error_percent) < 1
        assert entry.tokens_per_second > 0
        assert entry.run.trace is None
    assert plain.run.peak_bytes > checkpointed.run.peak_bytes
    # Equal seeds give equal weights and data.
    assert plain.run.losses == pytest.approx(checkpointed.run.losses, rel=1e-5)
    assert found.machine["name"] == this_machine.machine().name
    assert read_back(found) == found


def test_what_does_not_fit_is_a_record_too(model):
    found = made(model, recipes=(("plain", SMALL),), budget_bytes=8 * MIB, within="8 MiB")
    (entry,) = found.entries
    assert not entry.fitted
    assert str(entry.run.oom).startswith("out of memory: asked for")
    assert (entry.peak_error_percent, entry.tokens_per_second) == (None, None)
    assert entry.run.capacity_bytes == entry.predicted.capacity_bytes == 8 * MIB
    assert read_back(found) == found


@pytest.mark.nightly
def test_the_largest_batch_is_found_in_two_runs_where_the_prediction_is_right(model, monkeypatch):
    ran, run_it = [], benchmark_worker._run

    def noted(one, recipe):
        ran.append(recipe.batch_size)
        return run_it(one, recipe)

    monkeypatch.setattr(benchmark_worker, "_run", noted)
    found = made(model, budget_bytes=32 * MIB, within="32 MiB", largest_batch=True)
    plain, checkpointed = found.entries
    assert 1 < plain.recipe.batch_size < checkpointed.recipe.batch_size
    largest = [entry.recipe.batch_size for entry in found.entries]
    assert ran == [largest[0], largest[0] + 1, largest[1], largest[1] + 1]
    assert all(entry.fitted and entry.run.peak_bytes <= 32 * MIB for entry in found.entries)
    assert read_back(found) == found


@pytest.mark.slow
def test_a_search_where_nothing_fits_reports_the_batch_of_one(model):
    found = made(model, recipes=(("plain", SMALL),), budget_bytes=5 * MIB, largest_batch=True)
    (entry,) = found.entries
    assert (entry.recipe.batch_size, entry.fitted) == (1, False)


@pytest.mark.parametrize(
    ("predicted", "real", "tried"),
    [
        (5, 7, [5, 6, 7, 8]),
        (5, 3, [5, 4, 3]),
        (0, 2, [1, 2, 3]),
        (9999, 4096, [4096]),
    ],
)
def test_the_search_goes_on_where_the_prediction_is_wrong(monkeypatch, predicted, real, tried):
    ran = []

    def stand_in(largest, found, batches):
        def answer(benchmark, recipe):
            batches.append(recipe.batch_size)
            return found if recipe.batch_size <= largest else replace(found, oom=OOM)

        return answer

    one = entry()
    monkeypatch.setattr(benchmark_worker, "_predict", stand_in(predicted, one.predicted, []))
    monkeypatch.setattr(benchmark_worker, "_run", stand_in(real, one.run, ran))
    (found,) = made("any", recipes=(("plain", SMALL),), largest_batch=True).entries
    assert found.recipe.batch_size == real
    assert ran == tried


def test_on_a_gpu_the_prediction_is_for_this_gpu_with_the_pretended_budget(monkeypatch, model):
    gpu, budget_bytes = GPUS["h200"], 64 * MIB + 64 * MIB  # two workspaces of 32 MiB and room
    measured = []

    def measure(experiment, *, steps, track):
        measured.append((this_machine.current_budget_bytes(), steps, track))
        return replace(entry().run, capacity_bytes=budget_bytes)

    monkeypatch.setattr(this_machine, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(this_machine, "_cap", lambda pretence: None)
    monkeypatch.setattr(this_machine, "this_gpu", lambda: gpu)
    monkeypatch.setattr(benchmark_worker, "measure", measure)
    found = made(model, recipes=(("plain", SMALL),), budget_bytes=budget_bytes, within="small")
    predicted = found.entries[0].predicted
    plain = estimate(tiny_config(), gpu=gpu, recipe=SMALL).run
    assert measured == [(budget_bytes, STEPS, True)]
    assert predicted.device == gpu.name
    assert predicted.peak_bytes == plain.peak_bytes
    assert predicted.reserved_bytes == plain.reserved_bytes
    assert predicted.capacity_bytes == budget_bytes


# --- in a separate process ----------------------------------------------------------------------


def in_a_process(one, out):
    command = [sys.executable, "-P", "-m", "labkit.recording.benchmark_worker"]
    command += [json.dumps(asdict(one)), str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_process_writes_the_result(tmp_path, model):
    out = tmp_path / "headline-stack.json"
    one = benchmark(model=model, recipes=(("plain", SMALL),), budget_bytes=64 * MIB, within="64")
    done = in_a_process(one, out)
    assert done.returncode == 0, done.stderr
    found = benchmarks.load(out)
    assert found.benchmark == one
    assert found.entries[0].run.capacity_bytes == 64 * MIB
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.nightly
def test_a_process_that_cannot_says_so_in_a_sentence(tmp_path):
    done = in_a_process(benchmark(model="no-such-model"), tmp_path / "x.json")
    assert done.returncode == CANNOT
    assert "unknown model" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- records ------------------------------------------------------------------------------------

LIMIT = 100 * MIB
OOM = OutOfMemory(MIB, MIB, LIMIT, {"weights": MIB}, 1, "forward", "", "")


def entry(**changes):
    measured = run(
        mode="measured",
        device="NVIDIA H200",
        capacity_bytes=LIMIT,
        losses=(3.0, 2.0),
        reserved_bytes=20 * MIB,
        step_seconds=(0.5, 0.25, 1.0),
    )
    predicted = run(capacity_bytes=LIMIT, reserved_bytes=22 * MIB)
    return replace(Entry("plain", SMALL, measured, predicted), **changes)


def result(**changes):
    one = benchmark(recipes=(("plain", SMALL),), budget_bytes=LIMIT, within="a small GPU")
    machine = {"kind": "cuda", "name": "NVIDIA H200", "versions": {"torch": "2.13.0"}}
    return replace(BenchmarkResult(one, (entry(),), machine, 12.5, DATE), **changes)


def test_what_follows_from_a_run():
    found = entry()
    assert found.tokens_per_second == SMALL.tokens / 0.5  # the median step
    assert found.peak_error_percent == 0
    assert found.reserved_error_percent == pytest.approx(10.0)
    failed = entry(run=replace(found.run, oom=OOM))
    assert (failed.peak_error_percent, failed.reserved_error_percent) == (None, None)


def changed(path, value):
    """The record of a result with ``value`` at ``path``."""
    record = json.loads(json.dumps(result().to_dict()))
    place = record
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return record


FIRST = ("entries", 0)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("schema",), 1, "schema"),
        (("surprise",), 1, "'surprise'"),
        (("benchmark", "recipes"), [["plain"]], "recipes"),
        (("entries",), [], "those of the benchmark's recipes"),
        ((*FIRST, "run", "losses"), [], "no losses"),
        ((*FIRST, "run", "reserved_bytes"), 1, "reserved fewer"),
        ((*FIRST, "predicted", "mode"), "measured", "a simulation as its prediction"),
    ],
)
def test_a_broken_field_is_named(path, value, words):
    with pytest.raises(InputError, match=words):
        BenchmarkResult.from_dict(changed(path, value))


def test_recorded_reads_every_gpu_and_names_what_it_leaves_out(tmp_path):
    stack = result()
    new = replace(stack, benchmark=replace(stack.benchmark, name="new"))
    for place, found in (
        ("h200/headline-stack", stack),
        ("t4/headline-stack", stack),
        ("t4/headline-8b-full-24gb", stack),
        ("l4/headline-new", new),
    ):
        write_atomic(tmp_path / f"{place}.json", json.dumps(found.to_dict()))
    with pytest.warns(UserWarning, match="left out") as warned:
        found = benchmarks.recorded(tmp_path)
    names = {gpu: [each.benchmark.name for each in results] for gpu, results in found.items()}
    assert names == {"h200": ["stack"], "t4": ["stack"]}
    texts = " ".join(str(each.message) for each in warned)
    assert len(warned) == 2
    assert "headline-new.json holds 'new', not the benchmark of that name" in texts
    assert "8b-full-24gb.json holds 'stack'" in texts


# --- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_of_the_table_can_be_run(name):
    one = BENCHMARKS[name]
    assert one.model in models.MODELS
    gpus = [gpu for gpu in GPUS.values() if gpu.name == one.within]
    for _, recipe in one.recipes:
        for gpu in [GPUS["h200"], *gpus]:  # what is shown for a GPU must be possible on it
            recipe.check(gpu)
        assert recipe.offload == "none"
        assert "paged" not in recipe.optimizer  # CPU memory would hold what the GPU should


WITHIN = [name for name, one in BENCHMARKS.items() if one.budget_bytes and not one.largest_batch]


@pytest.mark.parametrize("name", WITHIN)
@pytest.mark.slow
def test_a_tenth_of_the_budget_stays_free_by_simulation(name):
    """With the kernels of the GPU that records, an H200."""
    one, gpu = BENCHMARKS[name], GPUS["h200"]
    gpu = replace(gpu, usable_bytes=one.budget_bytes + gpu.context_bytes)
    for _, recipe in one.recipes:
        found = estimate(one.model, gpu=gpu, recipe=recipe).run
        assert found.fits
        assert found.reserved_bytes <= 0.9 * gpu.budget_bytes
        assert found.host_bytes < 64 * MIB  # a model of 70B is never whole in CPU memory


def test_recipes_can_be_compared():
    assert {recipe.tokens for _, recipe in BENCHMARKS["stack"].recipes} == {16 * 1024}
    recipes = [recipe.to_dict() for _, recipe in BENCHMARKS["t4-batches"].recipes]
    for before, after in itertools.pairwise(recipes):
        assert len([key for key in before if before[key] != after[key]]) == 1


# --- this GPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("NVIDIA A100", 39.4, "a100-40gb"),
        ("NVIDIA A100", 79.2, "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB", None, "a100-80gb"),
        ("NVIDIA A100", None, "nvidia-a100"),
        ("NVIDIA GeForce RTX 4090", 47.4, "nvidia-geforce-rtx-4090-48gib"),  # a rebuilt one
        ("NVIDIA H200 MIG 1g.18gb", 16.3, "nvidia-h200-mig-1g-18gb-17gib"),
        ("Strange/Card: 9000 ../", 7.5, "strange-card-9000-8gib"),
        ("...", None, "gpu"),
    ],
)
def test_a_folder_for_each_gpu_and_size(name, gib, key):
    assert gpu_key(name, gib and int(gib * (1 << 30))) == key


def test_this_gpu_is_the_catalogues_or_one_with_its_own_memory(monkeypatch):
    here = replace(this_machine.machine(), name="NVIDIA Imaginary 9000", capacity_bytes=7 * MIB)
    monkeypatch.setattr(this_machine, "machine", lambda: here)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    gpu = this_gpu()
    assert (gpu.name, gpu.usable_bytes) == ("NVIDIA Imaginary 9000", 7 * MIB)
    assert (gpu.compute_capability, gpu.bf16_native) == ((7, 5), False)
    whole = replace(here, name="NVIDIA H200", capacity_bytes=GPUS["h200"].usable_bytes)
    monkeypatch.setattr(this_machine, "machine", lambda: whole)
    assert this_gpu() is catalogue.gpu("h200")

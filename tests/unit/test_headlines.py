"""Headline runs on a tiny model on the CPU, end to end; their records, nothing of which is trusted;
the table, by simulation."""

import contextlib
import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lesson_files import run

from benchmarks.setups import tiny_config
from labkit import hardware, headline_runs, headlines, models
from labkit.catalogue import GPUS
from labkit.estimates import estimate
from labkit.headline_records import Entry, Headline, Job
from labkit.headline_runs import CANNOT, largest, make
from labkit.headlines import HEADLINES
from labkit.memory import MIB, InputError, OutOfMemory
from labkit.recipes import Recipe
from labkit.this_gpu import gpu_key, this_card

SMALL = Recipe(batch_size=4, seq_len=96)
MACHINE = {"kind": "cuda", "name": "NVIDIA H200", "versions": {"torch": "2.13.0"}}
DATE = "2026-01-02T03:04:05+00:00"


def job(**changes):
    values = {"name": "stack", "shows": "It fits.", "model": "nobody's",
              "recipes": (("plain", SMALL), ("checkpointed", SMALL.but(checkpointing=True))),
              **changes}  # fmt: skip
    return Job(**values)


def silent(line):
    """Takes the place of print."""


# --- running, on the CPU ------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    """A GPU, where there is one, has workspaces that the small budgets here have no room for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "_accelerator", lambda: ("cpu", "A CPU", None, False, "tracked"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="module")
def made():
    return make(job(), model=tiny_config(), steps=3, tell=silent)


def test_a_headline_has_a_run_and_its_prediction_for_each_recipe(made):
    assert [entry.label for entry in made.entries] == ["plain", "checkpointed"]
    for entry, (_, recipe) in zip(made.entries, job().recipes, strict=True):
        assert entry.recipe == recipe
        assert entry.fitted
        assert len(entry.run.losses) == 3
        assert abs(entry.peak_error_percent) < 1
        assert entry.tokens_per_second > 0
        assert entry.run.trace is None
    assert made.machine["name"] == hardware.machine().name
    assert made.factors.keys() == {"checkpointed"}
    plain, checkpointed = (entry.run.peak_bytes for entry in made.entries)
    assert made.factors["checkpointed"] == plain / checkpointed > 1


def test_equal_seeds_give_equal_weights_and_data(made):
    plain, checkpointed = (entry.run.losses for entry in made.entries)
    assert plain == pytest.approx(checkpointed, rel=1e-5)


def test_it_survives_the_way_through_json(made):
    assert Headline.from_dict(json.loads(json.dumps(made.to_dict(), allow_nan=False))) == made


def test_what_does_not_fit_is_a_record_too():
    found = make(job(recipes=(("plain", SMALL),), budget_bytes=8 * MIB, within="8 MiB"),
                 model=tiny_config(), steps=2, tell=silent)  # fmt: skip
    (entry,) = found.entries
    assert not entry.fitted
    assert entry.oom.startswith("out of memory: asked for")
    assert (entry.peak_error_percent, entry.tokens_per_second) == (None, None)
    assert entry.run.capacity_bytes == entry.predicted.capacity_bytes == 8 * MIB
    assert found.factors == {}
    assert Headline.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_the_largest_batch_is_found_in_two_runs_where_the_prediction_is_right():
    searched = job(recipes=(("plain", SMALL), ("checkpointed", SMALL.but(checkpointing=True))),
                   budget_bytes=32 * MIB, within="32 MiB", largest_batch=True)  # fmt: skip
    found = make(searched, model=tiny_config(), steps=2, tell=silent)
    plain, checkpointed = found.entries
    assert 1 < plain.recipe.batch_size < checkpointed.recipe.batch_size
    for entry in found.entries:
        batch = entry.recipe.batch_size
        assert entry.fitted
        assert entry.run.peak_bytes <= 32 * MIB
        assert entry.tried == ((batch, True), (batch + 1, False))
    assert Headline.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_a_search_where_nothing_fits_keeps_the_batch_of_one():
    searched = job(recipes=(("plain", SMALL),), budget_bytes=5 * MIB, largest_batch=True)
    (entry,) = make(searched, model=tiny_config(), steps=2, tell=silent).entries
    assert (entry.recipe.batch_size, entry.fitted, entry.tried) == (1, False, ((1, False),))


@given(st.integers(0, 60), st.integers(-3, 70), st.integers(1, 60), st.integers(0, 60))
def test_the_search_finds_the_border_and_asks_of_none_twice(border, start, most, known):
    known, asked = min(known, border, most), []

    def fits(batch):
        assert known < batch <= most
        asked.append(batch)
        return batch <= border

    assert largest(fits, start, most, known=known) == min(border, most)
    assert len(set(asked)) == len(asked)
    if known < start == border < most:
        assert len(asked) == 2
    assert len(asked) <= 14


def test_on_a_gpu_the_prediction_is_for_this_card_with_the_pretended_budget(monkeypatch):
    card, budget_bytes = GPUS["h200"], 64 * MIB + 64 * MIB  # two workspaces of 32 MiB and room
    monkeypatch.setattr(hardware, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(headline_runs, "this_card", lambda: card)
    asked = []

    def measure(experiment, *, steps):
        asked.append((hardware.current_budget_bytes(), steps))
        return replace(entry().run, capacity_bytes=budget_bytes)

    monkeypatch.setattr(headline_runs, "measure", measure)
    monkeypatch.setattr(hardware, "_cap", lambda pretence: None)
    one = job(recipes=(("plain", SMALL),), budget_bytes=budget_bytes, within="a small card")
    found = make(one, model=tiny_config(), tell=silent).entries[0]
    plain = estimate(tiny_config(), gpu=card, recipe=SMALL)
    assert asked == [(budget_bytes, headline_runs.STEPS)]
    assert found.predicted.device == card.name
    assert found.predicted.peak_bytes == plain.peak_allocated_bytes
    assert found.predicted.reserved_bytes == plain.peak_reserved_bytes
    assert found.predicted.capacity_bytes == budget_bytes


def test_what_a_later_recipe_lacks_is_said_before_the_first_is_measured(monkeypatch):
    monkeypatch.setattr(headline_runs, "measure", lambda *a, **k: pytest.fail("it measured"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    eight_bit = SMALL.but(optimizer="adamw8bit")
    with pytest.raises(InputError, match="this recipe needs bitsandbytes"):
        make(job(recipes=(("a", SMALL), ("b", eight_bit))), model=tiny_config(), tell=silent)
    monkeypatch.undo()
    monkeypatch.setattr(hardware, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(headline_runs, "this_card", lambda: GPUS["t4"])
    monkeypatch.setattr(hardware, "_cap", lambda pretence: None)
    with pytest.raises(InputError, match="no bfloat16 in hardware"):
        make(job(recipes=(("a", SMALL), ("b", SMALL.but(precision="bf16")))),
             model=tiny_config(), tell=silent)  # fmt: skip


def test_a_search_without_a_budget_has_no_end():
    with pytest.raises(InputError, match="budget_bytes"):
        job(largest_batch=True)


# --- in a process of its own --------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(tiny_config().to_dict()))
    return folder


def child(out):
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.headline_runs", str(out)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def order(process, one):
    process.stdin.write(json.dumps(one.to_dict()) + "\n")
    process.stdin.flush()
    code = process.wait(timeout=300)
    return code, process.stdout.read(), process.stderr.read()


def test_a_process_makes_the_record(tmp_path, folder):
    out = tmp_path / "headline-stack.json"
    one = job(model=str(folder), recipes=(("plain", SMALL),), budget_bytes=64 * MIB, within="64")
    with child(out) as process:
        code, printed, _ = order(process, one)
    assert code == 0
    assert "plain (4 × 96, fp32, adamw): peak" in printed
    found = headlines.load(out)
    assert found.job == one
    assert found.entries[0].run.capacity_bytes == 64 * MIB
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_process_that_cannot_says_so_in_a_sentence(tmp_path):
    with child(tmp_path / "x.json") as process:
        code, _, error = order(process, job(model="no-such-model"))
    assert code == CANNOT
    assert "unknown model" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_process_ends_with_whoever_started_it(tmp_path, folder):
    endless = job(model=str(folder), recipes=tuple((str(n), SMALL) for n in range(40)))
    with child(tmp_path / "x.json") as process:
        process.stdin.write(json.dumps(endless.to_dict()) + "\n")
        process.stdin.flush()
        process.stdout.readline()  # it is at work
        process.stdin.close()
        process.wait(timeout=20)
    assert process.returncode == 1
    assert list(tmp_path.iterdir()) == []


# --- records, nothing trusted -------------------------------------------------------------------

LIMIT = 100 * MIB


def entry(**changes):
    real = run(mode="measured", device="NVIDIA H200", capacity_bytes=LIMIT, losses=(3.0, 2.0),
               reserved_bytes=20 * MIB, step_seconds=(0.5, 0.25, 1.0))  # fmt: skip
    predicted = run(capacity_bytes=LIMIT, reserved_bytes=22 * MIB)
    return replace(Entry("plain", SMALL, real, predicted), **changes)


def headline(**changes):
    one = job(recipes=(("plain", SMALL),), budget_bytes=LIMIT, within="a small card")
    return replace(Headline(one, (entry(),), MACHINE, 12.5, DATE), **changes)


def test_what_follows_from_a_run():
    found = entry()
    assert found.tokens_per_second == SMALL.tokens / 0.5  # the median step
    assert found.peak_error_percent == 0
    assert found.reserved_error_percent == pytest.approx(10.0)
    assert found.oom is None
    failed = entry(run=replace(found.run, oom=OutOfMemory(MIB, MIB, LIMIT, {"weights": MIB}, 1,
                                                         "forward", "", "")))  # fmt: skip
    assert "asked for 1.00 MiB" in failed.oom
    assert (failed.peak_error_percent, failed.reserved_error_percent) == (None, None)


def test_the_file_says_what_follows_and_what_makes_it():
    record = headline().to_dict()
    assert record["command"] == "labkit record --headlines stack"
    assert record["entries"][0]["tokens_per_second"] == SMALL.tokens / 0.5
    assert record["entries"][0]["recipe"]["seq_len"] == 96
    assert Headline.from_dict(json.loads(json.dumps(record))) == headline()


def broken(path, value):
    """The record with ``value`` at ``path``; the last step of it left out where that is DROP."""
    record = json.loads(json.dumps(headline().to_dict()))
    place = record
    for step in path[:-1]:
        place = place[step]
    if value is DROP:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return record


DROP = object()
FIRST = ("entries", 0)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("schema",), 2, "schema 2 is not 1"),
        (("schema",), True, "schema True is not 1"),
        (("surprise",), 1, "'surprise'"),
        (("date",), DROP, "'date'"),
        (("date",), "yesterday", "ISO 8601"),
        (("seconds",), -1, "not negative"),
        (("machine",), {"kind": "cuda"}, "'name'"),
        (("command",), "rm -rf /", "command must be"),
        (("job", "budget_bytes"), 0, "number of bytes"),
        (("job", "budget_bytes"), 50 * MIB, "under the budget"),
        (("job", "largest_batch"), 1, "true or false"),
        (("job", "recipes"), [], "1 to 40"),
        (("job", "recipes"), [["plain"]], "pairs"),
        (("job", "name"), "x" * 301, "at most 300"),
        (("job", "recipes", 0, 1, "batch_size"), 2, "not run by the job's recipe"),
        (("entries",), [], "those of the job's recipes"),
        (("entries",), 5, "must be a list"),
        ((*FIRST, "label"), "other", "those of the job's recipes"),
        ((*FIRST, "run"), DROP, "'run'"),
        ((*FIRST, "run", "peak_bytes"), -1, "peak_bytes"),
        ((*FIRST, "run", "peak_bytes"), 200 * MIB, "sum to"),
        ((*FIRST, "run", "mode"), "simulated", "neither losses nor seconds"),
        ((*FIRST, "run", "losses"), [], "no losses"),
        ((*FIRST, "run", "reserved_bytes"), 1, "reserved fewer"),
        ((*FIRST, "predicted", "mode"), "measured", "a simulation as its prediction"),
        ((*FIRST, "predicted", "capacity_bytes"), None, "under the budget"),
        ((*FIRST, "recipe", "batch_size"), 0, "batch_size"),
        ((*FIRST, "tried"), [[1]], "pairs"),
        ((*FIRST, "tried"), [[1, 1]], "pairs"),
        ((*FIRST, "tried"), [[0, True]], "from 1 to"),
        ((*FIRST, "tried"), 5, "tried must be a list"),
    ],
)
def test_a_broken_field_is_named(path, value, words):
    with pytest.raises(InputError, match=words):
        Headline.from_dict(broken(path, value))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
PLACES = [
    *((key,) for key in headline().to_dict()),
    *(("job", key) for key in job().to_dict()),
    *((*FIRST, key) for key in headline().to_dict()["entries"][0]),
]


@given(st.sampled_from(PLACES), json_values)
def test_any_json_in_a_field_is_read_or_refused_never_a_crash(path, value):
    with contextlib.suppress(InputError):
        Headline.from_dict(broken(path, value))


def write(folder, gpu, name, record):
    (folder / gpu).mkdir(parents=True, exist_ok=True)
    path = folder / gpu / f"headline-{name}.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record.to_dict()))
    return path


def test_recorded_reads_every_gpu_and_names_what_it_leaves_out(tmp_path):
    other = headline(job=replace(headline().job, name="8b-full-24gb"))
    write(tmp_path, "h200", "stack", headline())
    write(tmp_path, "h200", "8b-full-24gb", other)
    write(tmp_path, "t4", "stack", headline())
    write(tmp_path, "t4", "t4-batches", "{")
    write(tmp_path, "t4", "8b-full-24gb", headline())  # another's name
    write(tmp_path, "l4", "new", headline(job=replace(headline().job, name="new")))
    with pytest.warns(UserWarning, match="left out") as warned:
        found = headlines.recorded(tmp_path)
    assert {gpu: [each.name for each in held] for gpu, held in found.items()} == {
        "h200": ["8b-full-24gb", "stack"], "t4": ["stack"]}  # fmt: skip
    texts = sorted(str(each.message) for each in warned)
    assert len(texts) == 3
    assert "unknown headline 'new'" in " ".join(texts)
    assert "t4/headline-t4-batches.json is not a headline" in " ".join(texts)
    assert "8b-full-24gb.json holds the headline 'stack'" in " ".join(texts)
    assert headlines.recorded(tmp_path / "nowhere") == {}


# --- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADLINES)
def test_a_headline_is_sound(name):
    one = HEADLINES[name]
    assert one.name == name
    assert one.model in models.MODELS
    assert Job.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert one.file == f"headline-{name}.json"
    for _, recipe in one.recipes:
        recipe.check(GPUS["h200"])
        assert recipe.offload == "none"
        assert "paged" not in recipe.optimizer  # or the host would hold what the card is said to
    if one.within in {gpu.name for gpu in GPUS.values()}:
        (card,) = [gpu for gpu in GPUS.values() if gpu.name == one.within]
        assert one.budget_bytes == card.budget_bytes
        for _, recipe in one.recipes:  # what is said of a card can be done on it
            recipe.check(card)


def test_equal_sequences_make_a_step_of_the_stack():
    assert {recipe.tokens for _, recipe in HEADLINES["stack"].recipes} == {16 * 1024}


WITHIN = [name for name, one in HEADLINES.items() if one.budget_bytes and not one.largest_batch]


@pytest.mark.parametrize("name", WITHIN)
def test_a_tenth_of_the_budget_stays_free_by_simulation(name):
    """With the kernels of the GPU that records, an H200."""
    one, card = HEADLINES[name], GPUS["h200"]
    card = replace(card, usable_bytes=one.budget_bytes + card.context_bytes)
    for _, recipe in one.recipes:
        found = estimate(one.model, gpu=card, recipe=recipe)
        assert found.fits
        assert found.peak_reserved_bytes <= 0.9 * card.budget_bytes
        assert found.host_bytes < 64 * MIB  # a model of 70B is never whole on the host


def test_each_step_of_the_ladder_adds_one_technique():
    steps = [recipe.to_dict() for _, recipe in HEADLINES["t4-batches"].recipes]
    for before, after in itertools.pairwise(steps):
        assert len([key for key in before if before[key] != after[key]]) == 1


# --- this GPU -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gib", "key"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100", 39.4, "a100-40gb"),
        ("NVIDIA A100", 79.2, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39.39, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", None, "a100-80gb"),
        ("NVIDIA A100", None, "nvidia-a100"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32gb"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", 47.4, "nvidia-geforce-rtx-4090-48gib"),  # a rebuilt one
        ("NVIDIA H200 MIG 1g.18gb", 16.3, "nvidia-h200-mig-1g-18gb-17gib"),
        ("Strange/Card: 9000 ../", None, "strange-card-9000"),
        ("Strange/Card: 9000 ../", 7.5, "strange-card-9000-8gib"),
        ("...", None, "gpu"),
    ],
)
def test_a_folder_for_each_gpu_and_size(name, gib, key):
    assert gpu_key(name, gib and int(gib * (1 << 30))) == key


def test_this_card_is_the_catalogues_or_one_with_its_own_memory(monkeypatch):
    here = replace(hardware.machine(), name="NVIDIA Imaginary 9000", capacity_bytes=7 * MIB)
    monkeypatch.setattr(hardware, "machine", lambda: here)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    card = this_card()
    assert (card.name, card.usable_bytes) == ("NVIDIA Imaginary 9000", 7 * MIB)
    assert (card.compute_capability, card.bf16_native) == ((7, 5), False)
    whole = replace(here, name="NVIDIA H200", capacity_bytes=GPUS["h200"].usable_bytes)
    monkeypatch.setattr(hardware, "machine", lambda: whole)
    assert this_card() is hardware.gpu("h200")

"""One simulated rank of many holds what it would hold among real ones."""

from types import SimpleNamespace

import pytest
import rank_jobs
import torch
import torch.distributed as dist

import labkit as lab
from gpumem.fake_cuda.process_group import fake_ranks
from gpumem.hardware import this_machine
from gpumem.inputs import InputError
from gpumem.ranks import launch as launching

LAYER_BYTES = 4 * (2 * 64 * 256 + 64 + 256)  # its gradients, float32
GLOO_THREADS = 2  # each keeps the tensors of its last collective until it looks for another


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mixed"), [(2, True), pytest.param(4, False, marks=pytest.mark.nightly)]
)
def test_simulated_ranks_hold_what_real_ones_do(ranks, mixed):
    real = lab.launch(rank_jobs.sharded, ranks=ranks, steps=5, mixed=mixed)
    mesh_bytes = 4 * ranks  # the list of who is where, which is no part of the model
    more_bytes = []  # in a real step than in a simulated one, for each rank and step but the first
    for rank, run in enumerate(real):
        fake = lab.simulate(rank_jobs.sharded, ranks=ranks, rank=rank, mixed=mixed)
        repeated_bytes = fake.step_peaks_bytes[-1] + mesh_bytes
        more_bytes += [peak_bytes - repeated_bytes for peak_bytes in run.step_peaks_bytes[1:]]
        assert fake.sent_bytes == run.sent_bytes > 0
        assert fake.bytes_of("optimizer") == run.bytes_of("optimizer")
        assert dict(fake.parameters) == dict(run.parameters)
    # Gloo copies what it is to reduce. A busy machine keeps its threads from dropping the copies.
    assert min(more_bytes) >= 0
    assert max(more_bytes) <= GLOO_THREADS * LAYER_BYTES
    assert min(more_bytes) < LAYER_BYTES / 2  # not in each step of each rank


@pytest.mark.slow
def test_shards_add_up_and_the_loss_is_that_of_one():
    (whole,) = lab.launch(rank_jobs.sharded, ranks=1, steps=4, shard=False)
    parts = lab.launch(rank_jobs.sharded, ranks=2, steps=4)
    assert parts[0].losses == pytest.approx(whole.losses, rel=1e-5)  # sums in another order
    tensors = 14  # each with a step counter of four bytes, which every rank keeps
    assert sum(run.bytes_of("optimizer") for run in parts) == (
        whole.bytes_of("optimizer") + 4 * tensors
    )


def test_on_a_gpu_the_shards_may_live_on_the_host():
    on_card = lab.simulate(rank_jobs.sharded, gpu="t4", ranks=2)
    on_host = lab.simulate(rank_jobs.sharded, gpu="t4", ranks=2, offload=True)
    assert on_card.bytes_of("optimizer") > 0 == on_host.bytes_of("optimizer")
    held = on_host.trace.peak("cpu").by_category
    counters_bytes = 4 * 14  # on a card they are on the host anyway
    assert held["optimizer"] == on_card.bytes_of("optimizer") + counters_bytes
    assert on_host.peak_bytes < on_card.peak_bytes


def test_the_group_is_there_inside_and_gone_outside():
    lab.simulate(rank_jobs.shared, ranks=512, rank=511)
    assert not dist.is_initialized()
    with pytest.raises(TypeError):
        lab.simulate(rank_jobs.sharded, ranks=2, width=None)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("ranks", "rank", "message"),
    [
        (1.5, 0, "ranks must be"),
        (2, 2, "rank must be from 0 to 1"),
    ],
)
def test_bad_ranks(ranks, rank, message):
    with pytest.raises(InputError, match=message):
        lab.simulate(rank_jobs.shared, ranks=ranks, rank=rank)


def test_a_rank_without_ranks_is_the_experiments_own():
    def adapters(device, rank=4):
        weight = torch.zeros(rank, 1 << 10, device=device, requires_grad=True)
        while True:
            yield weight.sum()

    runs = [lab.simulate(adapters, rank=rank) for rank in (4, 8)]
    assert [run.parameters["rank"] for run in runs] == [4, 8]
    assert runs[0].peak_bytes < runs[1].peak_bytes
    with pytest.raises(InputError, match="unknown argument of sharded 'rank'"):
        lab.simulate(rank_jobs.sharded, rank=1)


def test_a_process_that_is_a_rank_already_is_told_so():
    with fake_ranks(2, 0, as_cuda=False), pytest.raises(InputError, match="is there already"):
        lab.simulate(rank_jobs.shared, ranks=2)


# --- many layers from few ------------------------------------------------------------------------


def test_a_deep_model_from_two_shallow_ones():
    """Of recipes, with mixed precision and with shards on the host: test_sharded_recipes."""
    settings = {"gpu": "h100", "ranks": 8, "layers": 9, "batch_size": 8}
    whole = lab.simulate(rank_jobs.sharded, **settings)
    made = lab.simulate(rank_jobs.sharded, alike="layers", **settings)
    assert made.parameters["layers"] == 9
    assert made.peak_bytes == whole.peak_bytes
    assert dict(made.by_category) == dict(whole.by_category)
    assert made.step_peaks_bytes == whole.step_peaks_bytes
    assert made.host_bytes == whole.host_bytes
    assert (made.flops, made.moved_bytes) == (whole.flops, whole.moved_bytes)
    assert made.sent_bytes == whole.sent_bytes > 0


@pytest.mark.parametrize("ranks", [None, 2])
def test_layers_that_are_not_alike_are_simulated_one_by_one(ranks):
    """The check is the layer after the two depths: 1 and 2, or 2 and 3 among ranks."""
    depths = [3, 2, 1] if ranks is None else [4, 3, 2]
    tried = []

    def experiment(device, layers, wide):
        tried.append(layers)
        weights = [torch.ones(256 if n == wide else 64, device=device) for n in range(layers)]
        while True:
            yield weights[-1].sum()

    checked = depths[0]
    for wide, expected, right in (
        (None, depths, True),
        (checked - 1, [*depths, 9], True),
        (checked, depths, False),  # further up it is not noticed, as the docstring says
    ):
        tried.clear()
        made = lab.simulate(experiment, ranks=ranks, layers=9, alike="layers", wide=wide)
        assert tried == expected
        whole = lab.simulate(experiment, ranks=ranks, layers=9, wide=wide)
        assert (made.peak_bytes == whole.peak_bytes) is right


@pytest.mark.parametrize("layers", [3, 4])
def test_a_shallow_model_is_simulated_as_it_is(layers):
    settings = {"ranks": 2, "layers": layers}
    whole = lab.simulate(rank_jobs.sharded, **settings)
    assert lab.simulate(rank_jobs.sharded, alike="layers", **settings).trace == whole.trace


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alike": "layers"}, "names no argument that is given"),
        ({"alike": "depth", "layers": 9}, "names no argument that is given"),
        ({"alike": "layers", "layers": 0}, "layers must be"),
    ],
)
def test_bad_depths(settings, message):
    with pytest.raises(InputError, match=message):
        lab.simulate(rank_jobs.sharded, ranks=2, **settings)


# --- where there are no GPUs ---------------------------------------------------------------------


def test_run_launches_where_there_are_enough_gpus_and_simulates_elsewhere(monkeypatch):
    launched = []

    def launch(experiment, **options):
        launched.append(options)
        return [lab.simulate(experiment, ranks=2, rank=rank, steps=1) for rank in (0, 1)]

    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr(this_machine, "machine", lambda: SimpleNamespace(can_measure=True))
    monkeypatch.setattr(launching, "gpu_for_each", lambda ranks: ranks <= 2)
    assert lab.run(rank_jobs.sharded, ranks=2, steps=1).parameters["ranks"] == 2
    run = lab.run(rank_jobs.sharded, gpu="t4", ranks=4, steps=1)
    assert (run.mode, run.parameters["ranks"]) == ("simulated", 4)
    assert launched == [{"ranks": 2, "steps": 1}]

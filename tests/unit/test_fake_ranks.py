"""One simulated rank of many holds what it would hold among real ones."""

import pytest
import rank_jobs
import torch.distributed as dist

import labkit as lab
from labkit.memory import InputError

LAYER_BYTES = 4 * (2 * 64 * 256 + 64 + 256)  # its gradients, float32


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mixed", [False, True])
def test_simulated_ranks_hold_what_real_ones_do(ranks, mixed):
    real = lab.launch(rank_jobs.sharded, ranks=ranks, steps=2, mixed=mixed)
    for rank, run in enumerate(real):
        fake = lab.simulate(rank_jobs.sharded, ranks=ranks, rank=rank, mixed=mixed)
        mesh_bytes = 4 * ranks  # the list of who is where, which is no part of the model
        # Gloo copies what it is to reduce, and another thread drops the copy a little later.
        late_bytes = run.peak_bytes - mesh_bytes - fake.peak_bytes
        assert 0 <= late_bytes <= LAYER_BYTES
        assert fake.sent_bytes == run.sent_bytes > 0
        assert fake.bytes_of("optimizer") == run.bytes_of("optimizer")
        assert dict(fake.parameters) == dict(run.parameters)


def test_shards_add_up_and_the_loss_is_that_of_one():
    (whole,) = lab.launch(rank_jobs.sharded, ranks=1, steps=4, shard=False)
    parts = lab.launch(rank_jobs.sharded, ranks=2, steps=4)
    assert parts[0].losses == pytest.approx(whole.losses, rel=1e-5)  # sums in another order
    tensors = 14  # each with a step counter of four bytes, which every rank keeps
    assert sum(run.bytes_of("optimizer") for run in parts) == (
        whole.bytes_of("optimizer") + 4 * tensors
    )


def test_states_fall_with_ranks_and_the_gathered_layer_does_not():
    few, many = (lab.simulate(rank_jobs.sharded, ranks=n, batch_size=n, width=512) for n in (2, 64))
    counters = 4 * 14
    shard = (few.bytes_of("optimizer") - counters) / (many.bytes_of("optimizer") - counters)
    assert shard == pytest.approx(32, rel=0.02)  # vectors are padded to a multiple of the ranks
    layer_bytes = 4 * (2 * 512 * 2048)
    assert many.peak_bytes > layer_bytes


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
        (0, 0, "ranks must be"),
        (2, 2, "rank must be from 0 to 1"),
        (2, -1, "rank must be from 0 to 1"),
        (2, True, "rank must be from 0 to 1"),
        (1.5, 0, "ranks must be"),
        (1 << 20, 0, "ranks must be"),
    ],
)
def test_bad_ranks(ranks, rank, message):
    with pytest.raises(InputError, match=message):
        lab.simulate(rank_jobs.shared, ranks=ranks, rank=rank)


def test_a_process_that_is_a_rank_already_is_told_so(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0,
                            world_size=1)  # fmt: skip
    try:
        with pytest.raises(InputError, match="is there already"):
            lab.simulate(rank_jobs.shared, ranks=2)
    finally:
        dist.destroy_process_group()

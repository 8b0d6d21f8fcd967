"""What each collective makes a rank send, against the ring algorithms' arithmetic."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from gpumem.costs import COLLECTIVES, sent_bytes
from gpumem.fake_cuda.process_group import fake_ranks
from gpumem.tracker import track

N, WHOLE = 4, 4 * 32  # ranks; bytes of 32 float32 numbers
SHARE = WHOLE * (N - 1) // N  # what a rank sends when the whole goes round a ring once


def parts():
    return [torch.empty(8) for _ in range(N)]


def world():
    return dist.group.WORLD


# On 32 numbers, and on a part of 8.
CALLS = {
    "all_reduce": (lambda x, _: dist.all_reduce(x), 2 * SHARE),
    "all_gather": (lambda _, part: dist.all_gather(parts(), part), SHARE),
    "all_gather_into_tensor": (lambda x, part: dist.all_gather_into_tensor(x, part), SHARE),
    "reduce_scatter_tensor": (lambda x, part: dist.reduce_scatter_tensor(part, x), SHARE),
    "all_to_all": (lambda x, _: dist.all_to_all_single(torch.empty(32), x), SHARE),
    "broadcast": (lambda x, _: dist.broadcast(x, 0), SHARE),
    "scatter by this rank": (lambda x, part: dist.scatter(part, list(x.chunk(N)), src=0), SHARE),
    "scatter by another": (lambda _, part: dist.scatter(part, src=1), 0),
    "gather by this rank": (lambda _, part: dist.gather(part, parts(), dst=0), 0),
    "gather by another": (lambda _, part: dist.gather(part, dst=1), WHOLE // N),
    "send": (lambda x, _: dist.send(x, 1), WHOLE),
    "receive": (lambda x, _: dist.recv(x, 1), 0),
    "barrier": (lambda *_: dist.barrier(), 0),
    "functional all_reduce": (lambda x, _: functional.all_reduce(x, "sum", world()), 2 * SHARE),
    "functional all_gather": (lambda _, x: functional.all_gather_tensor(x, 0, world()), SHARE),
    "functional reduce_scatter": (
        lambda x, _: functional.reduce_scatter_tensor(x, "sum", 0, world()),
        SHARE,
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_bytes_sent(name):
    call, expected = CALLS[name]
    with fake_ranks(N, 0, as_cuda=False), track(work=True) as tracker:
        done = call(torch.ones(32), torch.ones(8))
        if isinstance(done, functional.AsyncCollectiveTensor):
            done.wait()
    assert tracker.work_done().sent_bytes == expected


def test_one_rank_sends_nothing():
    with fake_ranks(1, 0, as_cuda=False), track(work=True) as tracker:
        dist.all_reduce(torch.ones(8))
    assert tracker.work_done().sent_bytes == 0


def test_every_collective_of_this_pytorch_has_its_rule():
    """Contract: an operator that PyTorch adds must not be counted as nothing in silence."""
    from gpumem.costs import _DIRECT, _rounds

    silent = {
        *("barrier", "check_for_nan", "monitored_barrier_", "recv_", "recv_any_source_"),
        *("wait_tensor", "_wrap_tensor_autograd", "irecv", "_make_wait_tensor"),
    }
    schemas = torch._C._jit_get_all_schemas()
    found = {s.name.split("::")[1] for s in schemas if s.name.split("::")[0] in COLLECTIVES}
    assert found
    assert {name for name in found if not _rounds(name)} <= {*_DIRECT, *silent}


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("isend", (torch.ones(32), 1, 0), WHOLE),
        ("irecv", (torch.ones(32), 1, 0), 0),
        (
            "batch_p2p_ops",
            (["isend", "irecv", "isend"], [1, 1, 2], [0] * 3, [torch.ones(8)] * 3),
            2 * WHOLE // N,
        ),
        ("all_gather_into_tensor_out", (torch.ones(8), N), SHARE),
        ("reduce_scatter_tensor_out", (torch.ones(32), "sum", N), SHARE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operators_that_only_compiled_code_calls(name, args, expected):
    """By name: not every PyTorch that is supported has them all."""
    with fake_ranks(N, 0, as_cuda=False):
        group = dist.group.WORLD.group_name
        assert sent_bytes(SimpleNamespace(__name__=f"{name}.default"), (*args, group)) == expected

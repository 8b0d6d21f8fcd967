"""Ranks on phantom GPUs get the values that the others sent, as they do by NCCL."""

import torch

from gpumem.fake_cuda.process_group import one_of

RANKS = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.group.WORLD
torch.cuda.set_device(rank)


def on_gpu(*values):
    return torch.tensor(values, device="cuda")


def empty(*shape):
    return torch.empty(shape, dtype=torch.int64, device="cuda")


def all_reduce(tensor, **options):
    dist.all_reduce(tensor, **options)
    return tensor.tolist()


def into(collective, target, *arguments, **options):
    collective(target, *arguments, **options)
    return [each.tolist() for each in target] if isinstance(target, list) else target.tolist()


def objects(collective, *arguments, **options):
    found = [None, None]
    collective(found, *arguments, **options)
    return found


def to_each_other():
    target = empty(1)
    receives = dist.P2POp(dist.irecv, target, 1 - rank)
    sends = dist.P2POp(dist.isend, on_gpu(rank), 1 - rank)
    for work in dist.batch_isend_irecv([receives, sends]):
        work.wait()
    return target.tolist()


def one_way():
    tensor = on_gpu(rank + 7)
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    return tensor.tolist()


def of_a_view():
    whole = torch.ones(2, 2, dtype=torch.int64, device="cuda")
    dist.all_reduce(whole[1])
    return whole.tolist()


def overwritten():
    tensor = on_gpu(1)
    dist.all_reduce(tensor, async_op=True)
    tensor.fill_(9)
    return tensor.tolist()


def all_gather_list():
    return into(dist.all_gather, [empty(1), empty(1)], on_gpu(rank + 5))


def gathered_on_0():
    found = [empty(1), empty(1)] if rank == 0 else None
    dist.gather(on_gpu(rank + 6), found, dst=0)
    return [each.item() for each in found or ()]


def object_from_0(collective, *arguments):
    found = [None]
    collective(found, *arguments, src=0)
    return found[0]


def of_a_dtensor():
    mesh = init_device_mesh("cuda", (2,))
    tensor = distribute_tensor(torch.arange(4).cuda(), mesh, [Shard(0)])
    return tensor.full_tensor().tolist(), tensor.sum().full_tensor().item()


def attention_of_dtensors():
    mesh = init_device_mesh("cuda", (2,))
    heads = distribute_tensor(torch.ones(1, 4, 16, 32), mesh, [Shard(1)])
    return list(torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).shape)


mine = {"rank": rank, "text": "a" * 10 * (rank + 1)}
theirs = [{"rank": 0, "text": "a" * 10}, {"rank": 1, "text": "a" * 20}]
uneven = ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
cases = [  # what a call gave, and what it gives on rank 0 and on rank 1
    (all_reduce(on_gpu(rank + 1)), [3], [3]),
    (all_reduce(on_gpu(rank + 1.0), op=dist.ReduceOp.AVG), [1.5], [1.5]),
    (all_reduce(on_gpu(rank == 0), op=dist.ReduceOp.MIN), [False], [False]),
    (all_reduce(torch.full((100,), 0.5, device="cuda"))[:2], [1, 1], [1, 1]),
    (all_reduce(on_gpu(1), group=dist.new_group([0, 1])), [2], [2]),
    (overwritten(), [9], [9]),
    (of_a_view(), [[1, 1], [2, 2]], [[1, 1], [2, 2]]),
    (into(dist.reduce, on_gpu(rank + 1), 0), [3], [2]),
    (into(dist.broadcast, on_gpu(rank), 1), [1], [1]),
    (all_gather_list(), [[5], [6]], [[5], [6]]),
    (into(dist.all_gather_into_tensor, empty(2), on_gpu(rank)), [0, 1], [0, 1]),
    (into(dist.reduce_scatter_tensor, empty(1), on_gpu(rank, 10 + rank)), [1], [21]),
    (into(dist.reduce_scatter, empty(1), [on_gpu(rank), on_gpu(10 + rank)]), [1], [21]),
    (into(dist.all_to_all_single, empty(3), on_gpu(*range(3 * rank, 3 * rank + 3)), *uneven),
     [0, 3, 4], [1, 2, 5]),
    (into(dist.all_to_all, [empty(1), empty(1)], [on_gpu(rank), on_gpu(10 + rank)]),
     [[0], [1]], [[10], [11]]),
    (into(dist.scatter, empty(1), [on_gpu(3), on_gpu(4)] if rank == 0 else None, src=0), [3], [4]),
    (gathered_on_0(), [6, 7], []),
    (to_each_other(), [1], [0]),
    (one_way(), [7], [7]),
    (functional.all_reduce(on_gpu(rank + 1), "sum", world).tolist(), [3], [3]),
    (functional.all_gather_tensor(on_gpu(rank), 0, world).tolist(), [0, 1], [0, 1]),
    (functional.reduce_scatter_tensor(on_gpu(rank, 9), "sum", 0, world).tolist(), [1], [18]),
    (functional.broadcast(on_gpu(rank + 4), 1, world).tolist(), [5], [5]),
    (functional.all_to_all_single(on_gpu(rank, 10 + rank), None, None, world).tolist(),
     [0, 1], [10, 11]),
    (objects(dist.all_gather_object, mine), theirs, theirs),
    (object_from_0(dist.broadcast_object_list) if rank else
     dist.broadcast_object_list([mine], src=0), None, theirs[0]),
    (object_from_0(dist.scatter_object_list, ["a", "b"] if rank == 0 else None), "a", "b"),
    (attention_of_dtensors(), [1, 4, 16, 32], [1, 4, 16, 32]),
    (of_a_dtensor(), ([0, 1, 2, 3], 6), ([0, 1, 2, 3], 6)),
]
for number, (found, *right) in enumerate(cases):
    assert found == right[rank], (number, found, right[rank])

unknown = torch.randn(3, device="cuda")
dist.all_reduce(unknown)
assert unknown.tolist() == [0, 0, 0]  # and says so in the report
print("all right", flush=True)
dist.destroy_process_group()
"""


def test_what_a_rank_sends_is_what_the_others_read(run):
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    verdict, printed = run(RANKS, launch=launch, gpu="t4", gpus=2)
    assert verdict.fits, str(verdict)
    assert printed.count("all right") == 2
    [line] = {read.line for answer in verdict.answers for read in answer.unknown}
    assert RANKS.splitlines()[int(line.rpartition(":")[2]) - 1].startswith("assert unknown")


def test_one_process_stands_for_all_ranks_of_a_fake_group():
    with one_of(4):
        counted = torch.ones(1, dtype=torch.int64, device="cuda")
        torch.distributed.all_reduce(counted)
        assert counted.item() == 4

"""Hand known values of small tensors from rank to rank: NCCL's stubs send nothing.

Each rank puts what it sends into the store of its process group. What the others have sent is
looked up when the program reads it, so that no rank waits earlier than it would on real GPUs.
"""

import base64
import ctypes
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gpumem.costs import tensors_in

#: Tensors with more elements are not handed on: each message stays in the memory of rank 0.
MOST_SENT = 1 << 16

Values = list[list[torch.Tensor | None]]  # of each rank: what it sent
REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "AVG": lambda stacked: stacked.mean(0),
    "PRODUCT": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
    "BAND": lambda stacked: functools.reduce(torch.bitwise_and, stacked),
    "BOR": lambda stacked: functools.reduce(torch.bitwise_or, stacked),
    "BXOR": lambda stacked: functools.reduce(torch.bitwise_xor, stacked),
}


@dataclass
class Collective:
    """One call of a collective by this rank.

    Attributes:
        group: its process group.
        sent: what this rank sends.
        targets: the tensors that are written.
        senders: the ranks of the group that send.
        combine: what the targets hold, from what each rank has sent.
        pair: who sends and who receives, of a transfer between two ranks.
        uneven: whether ranks may send tensors of different sizes.
    """

    group: Any
    sent: list[torch.Tensor]
    targets: list[torch.Tensor]
    senders: Iterable[int]
    combine: Callable[[Values], list[torch.Tensor | None]]
    pair: tuple[int, int] | None = None
    uneven: bool = False

    @property
    def has_message(self) -> bool:
        """Return whether values are sent: on all ranks alike, so that none waits in vain."""
        return self.uneven or any(map(is_sent, [*self.sent, *self.targets]))


def describe(func: Any, args: tuple, kwargs: dict, out: Any) -> Collective | None:
    """Return what a collective of c10d or of its functional twin does; None: it moves nothing."""
    name = func._schema.name.split("::")[1]
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    given |= kwargs
    if "process_group" in given:
        group = torch.distributed.ProcessGroup.unbox(given["process_group"])
    elif "group_name" in given:
        group = torch.distributed.distributed_c10d._resolve_process_group(given["group_name"])
    else:
        return None
    rank, ranks = group.rank(), range(group.size())
    sent = _given(
        given, "tensors", "input_tensors", "input_list", "input_tensor", "inputs", "input"
    )
    targets = _given(
        given, "output_tensors", "output_lists", "output_tensor", "outputs", "output", "out"
    )
    if func.namespace == "_c10d_functional":
        targets = list(tensors_in(out))
    root = given.get("root_rank", given.get("src"))
    kind = name.strip("_").replace("_coalesced", "").replace("_tensor", "").removesuffix("_out")

    def collective(combine, sent=sent, targets=targets, senders=ranks, uneven=False):
        return Collective(group, sent, targets, senders, combine, uneven=uneven)

    match kind:
        case "allreduce" | "all_reduce" | "reduce":
            reduced = functools.partial(_reduced, given["reduce_op"])
            targets = targets or sent
            return collective(
                lambda values: [reduced(each) for each in zip(*values, strict=True)],
                targets=[] if kind == "reduce" and rank != root else targets,
            )
        case "reduce_scatter" if name == "reduce_scatter_":
            return collective(
                lambda values: [_reduced(given["reduce_op"], [each[rank] for each in values])]
            )
        case "reduce_scatter" | "reduce_scatter_base":
            return collective(
                lambda values: [
                    _part(_reduced(given["reduce_op"], each), rank, len(ranks))
                    for each in zip(*values, strict=True)
                ]
            )
        case "allgather" if name == "allgather_":
            return collective(
                lambda values: [value for each in zip(*values, strict=True) for value in each]
            )
        case "allgather_base" | "allgather_into" | "all_gather_into":
            return collective(lambda values: [_joined(each) for each in zip(*values, strict=True)])
        case "allgather" | "gather":
            return collective(lambda values: [value for each in values for value in each])
        case "broadcast":
            others = [] if rank == root else sent
            return collective(lambda values: values[root], sent, targets or others, [root])
        case "scatter":
            return collective(lambda values: [values[root][rank]], senders=[root])
        case "alltoall":
            return collective(lambda values: [each[rank] for each in values], uneven=True)
        case "alltoall_base" | "all_to_all_single":
            sizes = given["input_split_sizes"] or len(sent[0]) // len(ranks)
            return collective(
                lambda values: [_joined([each[rank] for each in values])],
                sent=list(sent[0].split(sizes)),
                uneven=True,
            )
        case "send":
            pair = (rank, given["dst"])
            return Collective(group, sent, [], [], lambda values: [], pair)
        case "recv":
            source = given["src"]
            return Collective(
                group, [], sent, [source], lambda values: values[source], (source, rank)
            )
    return None


def _given(given: dict, *names: str) -> list[torch.Tensor]:
    return list(tensors_in([given[name] for name in names if name in given]))


def _reduced(named: Any, values: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the reduction of what all ranks sent; ``named`` is c10d's object, or a word."""
    values = list(values)
    if not isinstance(named, str):
        named = torch.distributed.ReduceOp.RedOpType(named._get_method("op")()).name
    reduction = REDUCTIONS.get(named.upper())
    if reduction is None or any(value is None for value in values):
        return None
    return reduction(torch.stack(values))


def _joined(values: list[torch.Tensor | None]) -> torch.Tensor | None:
    if any(value is None for value in values):
        return None
    return torch.cat([value.flatten() for value in values])


def _part(value: torch.Tensor | None, rank: int, ranks: int) -> torch.Tensor | None:
    return None if value is None else value.flatten().chunk(ranks)[rank]


def is_sent(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is small enough for its values to be sent."""
    return tensor.numel() <= MOST_SENT


class Exchange:
    """The messages of this rank, numbered as all ranks of a group number them."""

    def __init__(self) -> None:
        self._calls: Counter[Any] = Counter()

    def post(
        self, call: Collective, values: list[torch.Tensor | None], assumed: bool
    ) -> Callable[[], tuple[list[torch.Tensor | None], bool]]:
        """Send ``values`` of the CPU, None for unknown ones; return a function that waits for what
        arrives, and says whether it comes from assumed values."""
        backend, store = torch.distributed.distributed_c10d._world.pg_map[call.group]
        counted = (call.group.group_name, call.pair)
        self._calls[counted] += 1
        key = f"phantom-{call.pair}-{self._calls[counted]}"
        rank = call.group.rank()
        sends = call.pair[0] == rank if call.pair else rank in call.senders
        message = json.dumps([[None if v is None else _packed(v) for v in values], assumed])
        if sends and backend != "fake":
            store.set(f"{key}-{rank}", message)

        @functools.cache
        def arrived() -> tuple[list[torch.Tensor | None], bool]:
            received: Values = [[] for _ in range(call.group.size())]
            some_assumed = False
            for sender in call.senders:
                # A fake group has one process, which stands for all ranks.
                sent = message if backend == "fake" else store.get(f"{key}-{sender}")
                packed, theirs = json.loads(sent)
                received[sender] = [None if each is None else _unpacked(each) for each in packed]
                some_assumed |= theirs
            return call.combine(received), some_assumed

        return arrived


def _packed(value: torch.Tensor) -> tuple[str, list[int], str]:
    flat = value.contiguous()
    data = ctypes.string_at(flat.data_ptr(), flat.nbytes)
    return (
        str(value.dtype).removeprefix("torch."),
        list(value.shape),
        base64.b64encode(data).decode(),
    )


def _unpacked(message: tuple[str, list[int], str]) -> torch.Tensor:
    dtype, shape, data = message
    dtype = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype).reshape(shape)

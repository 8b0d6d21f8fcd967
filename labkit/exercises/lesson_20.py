"""Exercises of lesson 20: a map for two unequal GPUs, and a pipeline's order of work."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import labkit as lab
from gpumem.inputs import shown
from gpumem.units import GIB, MIB, format_bytes
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

# (layers, room of GPU 0, room of GPU 1)
PAIRS = ((32, 11 * GIB, 6 * GIB), (24, 4400 * MIB, 9 * GIB))
ROWS, TOKENS = 2, 1024
bring_inputs = from_notebook("20", "bring_inputs", globals())
#: (GPUs, micro-batches); one has fewer micro-batches than GPUs.
PIPELINES = ((2, 8), (4, 8), (1, 3), (5, 2))
SLOTS = {"forward": 1, "backward": 2}


def place(model, room):
    places, number, left = {}, 0, room[0] - 256 * 2**20
    layers = [f"model.layers.{i}" for i in range(len(model.model.layers))]
    for name in ["model.embed_tokens", "model.rotary_emb", *layers, "model.norm", "lm_head"]:
        nbytes = sum(x.nbytes for x in model.get_submodule(name).parameters())
        if number == 0 and nbytes > left:
            number = 1  # and all that follows: one border, crossed once
        left -= nbytes
        places[name] = number
    return places


def infer(device, layers, places):
    """A pass over GPUs with numbers, each block's inputs moved to it."""
    model = _llama(layers, "cpu").eval()
    for name, number in places.items():
        block = model.get_submodule(name)
        block.place = torch.device(device.type, number)
        block.to(block.place).register_forward_pre_hook(bring_inputs, with_kwargs=True)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device=device)
    with torch.no_grad():
        yield model(input_ids=ids, logits_to_keep=1).logits.mean()


def _llama(layers: int, device: str) -> nn.Module:
    return lab.model("Llama-3.1-8B", layers=layers, dtype=torch.bfloat16, device=device)


@check_of("20-1", place)
def check_place(answer):
    for layers, *rooms in PAIRS:
        model = _llama(layers, "meta")
        given = checks.settings_of(checks.call(answer, model, dict(enumerate(rooms))))
        where = f"For {layers} layers and GPUs of {' and '.join(map(format_bytes, rooms))}"
        blocks = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(layers))]
        blocks += ["model.norm", "lm_head"]
        places = {block: _gpu_of(block, given) for block in blocks}
        places["model.rotary_emb"] = places["model.embed_tokens"]
        problem = _not_a_map(given, places) or _too_much(layers, rooms, places)
        crossings = len([1 for a, b in pairwise(places[block] for block in blocks) if a != b])
        if problem is None and crossings > 1:
            problem = f"it fits, but the hidden state crosses {crossings} times, not once."
        if problem:
            return f"{where}: {problem}"
    return None


def _gpu_of(name: str, given: Mapping[str, Any]) -> Any:
    """Return the entry for ``name``, or for the nearest module that it is part of."""
    while name and name not in given:
        name = name.rpartition(".")[0]
    return given.get(name)


def _not_a_map(given: Mapping[str, Any], places: Mapping[str, Any]) -> str | None:
    for block, number in places.items():
        if number not in (0, 1):
            return f"{block} must be on GPU 0 or 1, not on {shown(number)}."
        if any(name.startswith(f"{block}.") for name in given):
            return f"{block} is cut in two: its residual would cross back and forth."
    return None


def _too_much(layers: int, rooms: list[int], places: dict[str, int]) -> str | None:
    """Return which GPU the pass itself fills beyond its room."""
    first = min(places.values())  # a map may leave one GPU empty
    shifted = {name: number - first for name, number in places.items()}
    with lab.pretend():
        run = lab.simulate(infer, gpu="a100-80gb", steps=1, layers=layers, places=shifted)
    for number, room_bytes in enumerate(rooms):
        at = f"cpu:{number - first}"
        taken_bytes = run.trace.peak(at).total_bytes if at in run.trace.devices else 0
        if taken_bytes > room_bytes:
            return f"GPU {number} peaks at {format_bytes(taken_bytes)}. A pass needs room, too."
    return None


def work(rank, ranks, pieces):
    tasks, back = [], 0
    for piece in range(pieces):
        tasks.append(("forward", piece))
        if piece - back + 1 == ranks - rank:  # as many as may be on their way
            tasks.append(("backward", back))
            back += 1
    return [*tasks, *(("backward", piece) for piece in range(back, pieces))]


@check_of("20-2", work)
def check_work(answer):
    for ranks, pieces in PIPELINES:
        lists = []
        for rank in range(ranks):
            given = checks.call(answer, rank, ranks, pieces)
            where = f"`work({rank}, {ranks}, {pieces})`"
            if problem := _not_a_list_of_work(given, pieces):
                return f"{where}: {problem}"
            lists.append([(kind, int(piece)) for kind, piece in given])
            held = most = 0
            for kind, _ in lists[-1]:
                held += 1 if kind == "forward" else -1
                most = max(most, held)
            if most > ranks - rank:
                return (
                    f"{where} holds the activations of {most} micro-batches at a time; at most "
                    f"{ranks - rank}. What could come back earlier?"
                )
        slots = _slots(lists)
        if isinstance(slots, str):
            return f"With {ranks} GPUs and {pieces} micro-batches {slots}"
        if slots > 3 * (pieces + ranks - 1):
            return (
                f"With {ranks} GPUs and {pieces} micro-batches a step takes {slots} slots; "
                f"{3 * (pieces + ranks - 1)} are enough. Which GPU waits while it has work to do?"
            )
    return checks.Correct(
        "That is right: the formula's time, and the first GPU holds p micro-batches instead of all "
        "m. PyTorch's name for such an order is 1F1B."
    )


def _not_a_list_of_work(given: Any, pieces: int) -> str | None:
    """Return what is wrong with one GPU's list, whatever the others do."""
    try:
        tasks = [(kind, int(piece)) for kind, piece in given]
    except (TypeError, ValueError):
        return f'a list of pairs such as ("forward", 0) is asked for, not {shown(given)}.'
    wanted = {(kind, piece) for kind in SLOTS for piece in range(pieces)}
    for task in tasks:
        if task not in wanted:
            return f"{task} is no task: forward or backward, of micro-batch 0 to {pieces - 1}."
    if len(tasks) != len(wanted) or set(tasks) != wanted:
        return f"{len(tasks)} tasks are there; each of {len(wanted)} different ones is due once."
    for piece in range(pieces):
        if tasks.index(("forward", piece)) > tasks.index(("backward", piece)):
            return f"micro-batch {piece} goes backward before it has gone forward."
    return None


def _slots(lists: Sequence[Sequence[tuple[str, int]]]) -> int | str:
    """Return when the last GPU is done, or which one waits for ever."""
    ended: dict[tuple[str, int, int], int] = {}
    free = [0] * len(lists)
    left = [list(tasks) for tasks in lists]
    while any(left):
        waiting, before = [], len(ended)
        for rank, tasks in enumerate(left):
            if not tasks:
                continue
            kind, piece = tasks[0]
            source = rank - 1 if kind == "forward" else rank + 1
            if source in range(len(lists)) and (kind, piece, source) not in ended:
                waiting.append(f"GPU {rank} waits for ever for {kind} {piece} of GPU {source}.")
                continue
            free[rank] = max(free[rank], ended.get((kind, piece, source), 0)) + SLOTS[kind]
            ended[kind, piece, rank] = free[rank]
            del tasks[0]
        if len(ended) == before:
            return waiting[0]
    return max(free)

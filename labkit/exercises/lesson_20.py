"""Exercises of lesson 20: a map for two unequal GPUs, and a pipeline within a memory target."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import labkit as lab
from gpumem.inputs import one_of, shown
from gpumem.runs import Run
from gpumem.units import GIB, format_bytes
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook
from labkit.pipelines import ORDERS, train_first_stage

# (layers, room of GPU 0, room of GPU 1)
PAIRS = ((32, 11 * GIB, 6 * GIB), (24, 4 * GIB, 9 * GIB))
ROWS, TOKENS = 2, 1024
bring_inputs = from_notebook("20", "bring_inputs", globals())
STAGES, TEXTS = 4, 32
BASELINE_PIECES = 4  # micro-batches of the GPipe whose peak is to be halved
MOST_IDLE, FEWEST_TEXTS, MOST_PEAK = 0.20, 2, 0.50


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


@check_of(
    "20-1",
    place,
    "Go through the modules in the order in which they run, and count bytes.",
    "GPU 0 takes modules until the next one would not fit, GPU 1 takes the rest. Leave "
    "256 MiB of GPU 0 for the pass.",
)
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


def plan():
    # (4 - 1) / (m + 4 - 1) <= 0.2 from m = 12 on, and 32 / m >= 2 up to m = 16
    return {"order": "1F1B", "pieces": 16}


def first_stage(order: str, pieces: int) -> Run:
    ranks = {"ranks": STAGES, "rank": 0}
    return checks.simulated(train_first_stage, order=order, pieces=pieces, **ranks)


@check_of(
    "20-2",
    plan,
    "(p - 1) / (m + p - 1) with p = 4: from which m on is it at most 0.2?",
    "Which order of work sends a micro-batch back before all have gone forward?",
)
def check_plan(answer):
    chosen = checks.settings_of(answer, ("order", "pieces"))
    order = one_of(chosen["order"], ORDERS, "order")
    pieces = checks.whole_number(chosen["pieces"], "the number of pieces", most=TEXTS)
    if TEXTS % pieces:
        return f"{TEXTS} texts cannot be cut into {pieces} equal micro-batches."
    idle = (STAGES - 1) / (pieces + STAGES - 1)
    if idle > MOST_IDLE:
        return f"With {pieces} micro-batches each stage is idle {idle:.0%} of the time: too long."
    if TEXTS // pieces < FEWEST_TEXTS:
        return f"{TEXTS // pieces} text in a micro-batch is too few: at least {FEWEST_TEXTS}."
    run, reference = first_stage(order, pieces), first_stage("GPipe", BASELINE_PIECES)
    share = run.peak_bytes / reference.peak_bytes
    if share > MOST_PEAK:
        return (
            f"Each stage is idle {idle:.0%} of the time, little enough. But the first one peaks at "
            f"{share:.0%} of what it takes now. What share of the batch is on its way at once?"
        )
    return checks.Correct(
        f"That is right: {share:.0%} of the peak, and idle {idle:.0%} of the time."
    )

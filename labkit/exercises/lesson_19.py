"""Exercises of lesson 19: a map for two unequal cards, and a pipeline within a memory target."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from labkit import models
from labkit.exercises import Exercise
from labkit.exercises.checks import (
    Feedback,
    NotAttempted,
    call,
    quote,
    reference_run,
    run_experiment,
)
from labkit.hardware import pretend
from labkit.memory import GIB, MIB, Run, format_bytes

# --- 1: a map that fits two unequal cards --------------------------------------------------------

SPARE_BYTES = 256 * MIB  # what the notebook says that a pass needs beside the weights
# (layers, room of card 0, room of card 1)
PAIRS = ((32, 11 * GIB, 6 * GIB), (24, 4 * GIB, 9 * GIB))
ROWS, TOKENS = 2, 1024


def place(model, room):
    places, card, left = {}, 0, room[0] - 256 * 2**20
    layers = [f"model.layers.{i}" for i in range(len(model.model.layers))]
    for name in ["model.embed_tokens", "model.rotary_emb", *layers, "model.norm", "lm_head"]:
        nbytes = sum(x.nbytes for x in model.get_submodule(name).parameters())
        if card == 0 and nbytes > left:
            card = 1  # and all that follows: one border, crossed once
        left -= nbytes
        places[name] = card
    return places


def infer(device, layers, places, sent):
    """A pass over cards with numbers, each block's inputs brought to it."""
    model = _llama(layers, "cpu").eval()
    for name, card in places.items():
        at = torch.device(device.type, card)
        block = model.get_submodule(name).to(at)
        block.register_forward_pre_hook(_bringing(at, sent), with_kwargs=True)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device=device)
    with torch.no_grad():
        yield model(input_ids=ids, logits_to_keep=1).logits.mean()


def _llama(layers: int, device: str) -> nn.Module:
    return models.model("Llama-3.1-8B", layers=layers, dtype=torch.bfloat16, device=device)


def _bringing(device: torch.device, sent: list[int]) -> Any:
    def move(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(move, x))
        if not isinstance(x, torch.Tensor) or x.device == device:
            return x
        sent.append(x.nbytes)
        return x.to(device)

    return lambda block, args, named: (move(args), {key: move(x) for key, x in named.items()})


def check_place(answer):
    for layers, *rooms in PAIRS:
        model = _llama(layers, "meta")
        given = call(answer, model, dict(enumerate(rooms)))
        where = f"For {layers} layers and cards of {' and '.join(map(format_bytes, rooms))}"
        if not isinstance(given, Mapping):
            return f"A map from module names to cards is asked for; you return {quote(given)}."
        places, problem = _blocks(model, given)
        problem = problem or _too_much(layers, rooms, places)
        if problem:
            return f"{where}: {problem}"
    return None


def _blocks(model: nn.Module, given: Mapping[Any, Any]) -> tuple[dict[str, int], str | None]:
    """The card of each block, and what is wrong with the map."""
    names = {name: name for name, _ in model.named_parameters()}
    for name in given:
        if not isinstance(name, str) or (name and not _has(model, name)):
            return {}, f"the model has no module {quote(name)}."
    cards = {}
    for name in names:
        owners = [key for key in given if key == "" or name == key or name.startswith(f"{key}.")]
        if not owners:
            return {}, f"your map does not say where {name.rpartition('.')[0]} goes."
        cards[name] = given[max(owners, key=len)]
    outside = {card for card in cards.values() if type(card) is not int or card not in (0, 1)}
    if outside:
        return {}, (
            f"your map puts something on {quote(outside.pop())}. All of it fits the cards 0 and 1. "
            "(`infer_auto_device_map` goes on to the CPU and the disk without a word.)"
        )
    layers = [f"model.layers.{i}" for i in range(len(model.model.layers))]
    places = {}
    for block in ["model.embed_tokens", *layers, "model.norm", "lm_head"]:
        own = {card for name, card in cards.items() if name.startswith(f"{block}.")}
        if len(own) > 1:
            return {}, f"{block} is cut in two: its residual would cross back and forth. Keep it."
        places[block] = own.pop()
    return {"model.rotary_emb": places["model.embed_tokens"], **places}, None


def _has(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:
        return name in dict(model.named_parameters())
    return True


def _too_much(layers: int, rooms: list[int], places: dict[str, int]) -> str | None:
    """Whether the pass itself keeps within the rooms, and how often it crosses."""
    sent: list[int] = []
    first = min(places.values())  # a map may leave one card empty
    shifted = {name: card - first for name, card in places.items()}
    with pretend():
        run = run_experiment(
            infer, world="simulate", gpu="a100-80gb", steps=1, layers=layers, places=shifted,
            sent=sent,
        )  # fmt: skip
    for card, room_bytes in enumerate(rooms):
        at = f"cpu:{card - first}"
        taken_bytes = run.trace.peak(at).total_bytes if at in run.trace.devices else 0
        if taken_bytes > room_bytes:
            weights = sum(x.nbytes for x in _on(layers, places, card))
            hint = (
                "The weights alone would fit; a pass needs room, too."
                if weights <= room_bytes
                else "Its weights are too many already."
            )
            return f"card {card} comes to {format_bytes(taken_bytes)}. {hint}"
    crossings = sum(nbytes == ROWS * TOKENS * 4096 * 2 for nbytes in sent)
    if crossings > 1:
        return f"it fits, but the hidden state crosses {crossings} times. One border is enough."
    return None


def _on(layers: int, places: dict[str, int], card: int) -> Iterator[torch.Tensor]:
    model = _llama(layers, "meta")
    for name, at in places.items():
        if at == card:
            yield from model.get_submodule(name).parameters()


# --- 2: a pipeline within a memory target --------------------------------------------------------

STAGES, TEXTS, NOW = 4, 32, 4  # NOW: micro-batches of the GPipe that is to be bettered
MOST_IDLE, FEWEST_TEXTS, MOST_PEAK = 0.20, 2, 0.50
SIZES = (192, 256)  # of a hidden state, and of the vocabulary
ORDERS = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def plan():
    # (4 - 1) / (m + 4 - 1) <= 0.2 from m = 12 on, and 32 / m >= 2 up to m = 16
    return {"order": "1F1B", "pieces": 16}


class Share(nn.Module):
    """One stage's layers, as in the notebook."""

    def __init__(self, model: nn.Module, part: int, parts: int) -> None:
        super().__init__()
        body, count = model.model, len(model.model.layers)
        body.layers = body.layers[part * count // parts : (part + 1) * count // parts]
        if part:
            body.embed_tokens = None
        if part < parts - 1:
            body.norm, model.lm_head = nn.Identity(), nn.Identity()
        self.model, self.takes = model, "inputs_embeds" if part else "input_ids"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(**{self.takes: x}).logits


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(device, order="GPipe", pieces=16):
    """A step of the pipeline that the notebook runs, with 8 layers in 4 stages."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = models.model("SmolLM2-tiny", layers=8, vocab_size=SIZES[1], tie_word_embeddings=False)
    ids = torch.empty(TEXTS // pieces, 256, dtype=torch.int64, device="meta")
    hidden, logits = (
        ids.new_empty(*ids.shape, n, dtype=model.dtype).requires_grad_() for n in SIZES
    )
    share = Share(model, rank, ranks).to(device)
    ends = hidden if rank else ids, logits if rank == ranks - 1 else hidden
    stage = PipelineStage(share, rank, ranks, device, *ends)
    schedule = ORDERS[order](stage, pieces, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(share.parameters())
    for batch in models.batches(device=device, batch_size=TEXTS, seq_len=256):
        losses: list[torch.Tensor] = []
        inputs = [batch] if rank == 0 else []
        schedule.step(*inputs, target=batch, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        yield sum(losses) / pieces


def first_stage(order: str, pieces: int) -> Run:
    """The first of the four stages, simulated; kept for the session."""
    return reference_run(train, world="simulate", ranks=STAGES, rank=0, order=order, pieces=pieces)


def check_plan(answer):
    if not isinstance(answer, Mapping) or set(answer) != {"order", "pieces"}:
        return f'Give {{"order": ..., "pieces": ...}}; you gave {quote(answer)}.'
    order, pieces = answer["order"], answer["pieces"]
    if order is ... or pieces is ...:
        raise NotAttempted("Put an order and a number of micro-batches in place of the `...`.")
    if order not in tuple(ORDERS):
        return f"The orders of work are 'GPipe' and '1F1B'; you gave {quote(order)}."
    if type(pieces) is not int or pieces < 1 or TEXTS % pieces:
        return f"{TEXTS} texts cannot be cut into {quote(pieces)} equal micro-batches."
    idle = _idle(pieces)
    if idle > MOST_IDLE:
        return (
            f"With {pieces} micro-batches each stage waits {idle:.0%} of the time; at most "
            f"{MOST_IDLE:.0%} is allowed. What does the formula ask of m?"
        )
    if TEXTS // pieces < FEWEST_TEXTS:
        return f"{TEXTS // pieces} text in a micro-batch is too few: at least {FEWEST_TEXTS}."
    return _within_target(order, pieces)


def _idle(pieces: int) -> float:
    """The share of its time that each stage waits, by the formula."""
    return (STAGES - 1) / (pieces + STAGES - 1)


def _within_target(order: str, pieces: int) -> str | Feedback:
    run, reference = first_stage(order, pieces), first_stage("GPipe", NOW)
    share, idle = run.peak_bytes / reference.peak_bytes, _idle(pieces)
    if share > MOST_PEAK:
        return (
            f"Each stage waits {idle:.0%} of the time, little enough. But the first one peaks at "
            f"{format_bytes(run.peak_bytes)}, {share:.0%} of what it takes now; the target is "
            f"{MOST_PEAK:.0%}. What share of the batch is on its way at once?"
        )
    return Feedback(
        True,
        f"That is right: {format_bytes(run.peak_bytes)} in place of "
        f"{format_bytes(reference.peak_bytes)}, and a wait of {idle:.0%} in place of "
        f"{_idle(NOW):.0%}.",
    )


EXERCISES = (
    Exercise(
        "19-1",
        question="A map of modules to two cards of unequal size that keeps within both.",
        hints=(
            "Go through the modules in the order in which they run, and count bytes.",
            "Card 0 takes modules until the next one would not fit, card 1 takes the rest. Leave "
            "256 MiB of card 0 for the pass.",
        ),
        solution=place,
        check=check_place,
        kind="function",
    ),
    Exercise(
        "19-2",
        question="Four stages: half of GPipe's peak, at most a fifth of the time idle.",
        hints=(
            "(p - 1) / (m + p - 1) with p = 4: from which m on is it at most 0.2?",
            "Which order of work sends a micro-batch back before all have gone forward?",
        ),
        solution=plan,
        check=check_plan,
    ),
)

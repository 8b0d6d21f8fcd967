"""Answers to lesson 20's exercises."""

from accelerate import infer_auto_device_map

from labkit.exercises.lesson_20 import place, work


def to_the_brim(model, room):
    return place(model, {0: room[0] + 256 * 2**20, 1: room[1]})


def without_the_head(model, room):
    return {name: card for name, card in place(model, room).items() if name != "lm_head"}


def auto(model, room):
    return infer_auto_device_map(model, dict(room), model._no_split_modules)


def auto_with_room_for_the_pass(model, room):
    return auto(model, {number: free_bytes - 256 * 2**20 for number, free_bytes in room.items()})


def as_pytorch_counts(rank, ranks, pieces):
    """Warm-up, then one forward and one backward, then the rest; lists in place of pairs."""
    first = min(pieces, ranks - rank - 1)
    found = [["forward", piece] for piece in range(first)]
    for piece in range(first, pieces):
        found += [["forward", piece], ["backward", piece - first]]
    return found + [["backward", piece] for piece in range(pieces - first, pieces)]


def gpipe(rank, ranks, pieces):
    return [(kind, piece) for kind in ("forward", "backward") for piece in range(pieces)]


def one_at_a_time(rank, ranks, pieces):
    return [(kind, piece) for piece in range(pieces) for kind in ("forward", "backward")]


def last_first(rank, ranks, pieces):
    """The second GPU takes the micro-batches in another order than the first sends them."""
    tasks = work(rank, ranks, pieces)
    return [(kind, pieces - 1 - piece) for kind, piece in tasks] if rank == 1 else tasks


RIGHT = [("20-1", auto), ("20-1", auto_with_room_for_the_pass), ("20-2", as_pytorch_counts)]
MISTAKES = [
    ("20-1", lambda model, room: {"": 1}, "GPU 1 peaks at"),
    ("20-1", to_the_brim, "A pass needs room, too"),
    ("20-1", lambda model, room: {**place(model, room), "model.layers.3": 1}, "crosses 3 times"),
    ("20-1", lambda model, room: {**place(model, room), "model.layers.3.mlp": 1}, "cut in two"),
    ("20-1", without_the_head, "lm_head must be on GPU 0 or 1, not on None"),
    ("20-2", gpipe, "holds the activations of 8 micro-batches at a time; at most 2"),
    ("20-2", one_at_a_time, "Which GPU waits while it has work to do"),
    ("20-2", last_first, "waits for ever"),
    ("20-2", lambda rank, ranks, pieces: gpipe(0, 1, pieces)[::-1], "goes backward before"),
    ("20-2", lambda rank, ranks, pieces: work(rank, ranks, pieces)[1:], "is due once"),
    ("20-2", lambda rank, ranks, pieces: work(rank, ranks, pieces + 1), "is no task"),
    ("20-2", lambda rank, ranks, pieces: "1F1B", "a list of pairs"),
]

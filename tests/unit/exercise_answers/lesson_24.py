"""Answers to lesson 24's exercises."""

import labkit as lab

RIGHT_FIELDS = {"precision": "amp-fp16", "checkpointing": True, "chunked_loss": True}
PIECES = {"batch_size": 8, "accumulate": 2}


def alone(measure, names):
    """Ranks by each technique's figures on the plain job."""
    peak, seconds = measure([])
    worth = {}
    for name in names:
        saved, added = peak - measure([name])[0], measure([name])[1] - seconds
        if saved > 0:
            worth[name] = (True, saved) if added <= 0 else (False, saved / added)
    return sorted(worth, key=worth.get, reverse=True)


def greedy(measure, names, worth):
    """Adopt what is worth most; ``worth`` is given what a move saves, adds, and adds to plain."""
    adopted = []
    while True:
        peak, seconds = measure(adopted)
        best = {}
        for name in set(names) - set(adopted):
            new_peak, new_seconds = measure([*adopted, name])
            saved, added = peak - new_peak, new_seconds - seconds
            if saved > 0:
                best[name] = worth(saved, added, new_seconds - measure([])[1])
        if not best:
            return adopted
        adopted.append(max(best, key=best.get))


def right(saved, added, to_plain):
    return (added <= 0, saved / added if added > 0 else saved)


def against_plain(saved, added, to_plain):
    return right(saved, to_plain, to_plain)


def free_by_time(saved, added, to_plain):
    return (added <= 0, saved / added if added > 0 else -added)


RIGHT = [
    ("24-1", lambda: lab.Recipe(batch_size=16, seq_len=512, attention="eager", **RIGHT_FIELDS)),
    ("24-1", RIGHT_FIELDS | PIECES),
    ("24-2", lambda measure, names: tuple(greedy(measure, names, right))),
]
MISTAKES = [
    ("24-1", {"checkpointing": True}, "largest part of the peak is"),
    ("24-1", RIGHT_FIELDS | {"attention": "sdpa"}, "too long. Switch one field"),
    ("24-1", {"precision": "fp32", "checkpointing": True, "chunked_loss": True}, "too long"),
    ("24-1", RIGHT_FIELDS | {"optimizer": "adamw8bit"}, "another training: the optimizer's"),
    ("24-1", RIGHT_FIELDS | {"batch_size": 8}, "the same 16 texts"),
    ("24-1", RIGHT_FIELDS | {"checkpoint": True}, "Did you mean"),
    ("24-2", lambda measure, names: ["z"], "A list of the names"),
    ("24-2", lambda measure, names: [], "After [] you take: nothing more. Better: 'c' saves 3"),
    (
        "24-2",
        lambda measure, names: sorted(names),
        "After [] you take: 'a' saves 10 GiB for +0.2 s",
    ),
    ("24-2", alone, "With a peak that moves"),
    ("24-2", lambda *job: greedy(*job, against_plain), "After ['c'] you take: 'b'"),
    ("24-2", lambda *job: greedy(*job, free_by_time), "After [] you take: 'e' saves 1 GiB"),
]

"""Answers to lesson 09's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_09 import leaky, tight

NORM = 'records["norm"].append(hidden.detach().norm())'
ROW = 'records["row"].append(result[0].detach().clone())'
LOSS = 'records["loss"].append(loss)'
VALIDATION = 'records["validation"].append((model(x) - x).square().mean())'


def as_numbers():
    return changed(
        tight,
        (NORM, 'records["norm"].append(hidden.norm().item())'),
        (ROW, 'records["row"].append(result[0].tolist())'),
        (LOSS, 'records["loss"].append(loss.item())'),
        ("torch.no_grad()", "torch.enable_grad()"),
        (VALIDATION, VALIDATION.replace(".mean()", ".mean().item()")),
    )


RIGHT = [("09-1", {"f", "C", "d"}), ("09-1", ["C", "D, F"]), ("09-2", as_numbers())]
MISTAKES = [
    ("09-1", "ACDF", "what is then left of its history"),
    ("09-1", "CDEF", "needs a gradient"),
    ("09-1", "CD", "a view"),
    ("09-1", "XY", "letters from A to F"),
    ("09-1", 3, "letters from A to F"),
    ("09-2", leaky, "who keeps it?"),
    (
        "09-2",
        changed(
            tight,
            (NORM, 'records["norm"].append(hidden.norm().detach())'),
            (ROW, 'records["row"].append(result[0].detach())'),
        ),
        "(256, 64)",
    ),
    ("09-2", changed(tight, (NORM, 'records["norm"].append(hidden.norm())')), "(256, 512)"),
    ("09-2", changed(tight, ("no_grad()", "enable_grad()")), "more after step 7 than after step 3"),
    ("09-2", changed(tight, ("model[1].register", "model[0].register")), "records['norm']"),
    ("09-2", changed(tight, (NORM, f"if torch.is_grad_enabled(): {NORM}")), "validation pass, too"),
    ("09-2", changed(tight, (LOSS, "")), "0 entries, not 8"),
    ("09-2", changed(tight, ("range(steps)", "range(2)")), "after 2 of 8"),
    ("09-2", changed(tight, ("lr=1e-2", "lr=1e-3")), "should still hold"),
]

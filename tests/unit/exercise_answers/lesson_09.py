"""Answers to lesson 09's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_09 import leaky, tight

NORM = "norms.append(result.norm().item())"
MEAN = "means.append(result.mean().item())"


def with_history():
    return changed(
        tight, (".square().mean().item()", ".square().mean()"), ("no_grad()", "enable_grad()")
    )


RIGHT = [("09-2", changed(tight, (NORM, "norms.append(result.detach().abs().max())")))]
MISTAKES = [
    ("09-1", 3.0, "the old and the new logits"),
    ("09-2", leaky, "who keeps it?"),
    ("09-2", changed(tight, (NORM, "norms.append(result.detach())")), "(256, 512)"),
    ("09-2", changed(tight, (MEAN, "means.append(result)")), "(256, 64)"),
    ("09-2", with_history(), "more after step 7 than after step 3"),
    ("09-2", changed(tight, ("lr=1e-2", "lr=1e-3")), "should still be"),
]

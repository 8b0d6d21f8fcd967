"""Answers to lesson 14's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_14 import light

OTHER_OPTIMIZER = ("bnb.optim.AdamW8bit", "torch.optim.AdamW")
MISTAKES = [
    ("14-1", 2, "scales are missing"),
    ("14-1", 1.015625, "AdamW has two"),
    ("14-1", 2.015625, "Each of the two moments"),
    ("14-1", 8, "32-bit AdamW"),
    ("14-2", changed(light, ("lr=1e-3", "lr=1e-5")), "Your last losses are"),
    ("14-2", changed(light, OTHER_OPTIMIZER), "largest part of your peak is optimizer"),
]

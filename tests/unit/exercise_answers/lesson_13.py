"""Answers to lesson 13's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_13 import roomy, thrifty

ADAFACTOR = "torch.optim.Adafactor(model.parameters(), lr=0.1)"


def optimizer(source):
    return changed(thrifty, (ADAFACTOR, f"torch.optim.{source}"))


MISTAKES = [
    ("13-1", 18432, "How many bytes"),
    ("13-1", 4 * 4096 * 14336, "SGD's momentum"),
    ("13-1", 8 * 4096 * 14336, "what AdamW keeps"),
    ("13-1", 147456, "no first moment"),
    ("13-2", roomy, "the target at most"),
    ("13-2", optimizer("Adafactor(model.parameters())"), "for *this* optimizer"),
    ("13-2", optimizer("SGD(model.parameters(), lr=1e4)"), "your last loss is nan"),
    ("13-2", changed(thrifty, ("3 * width", "3 * width // 2")), "less arithmetic"),
]

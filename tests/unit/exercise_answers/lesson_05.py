"""Answers to lesson 05's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_05 import forgetful, frugal

IN_FP32 = ("dtype=torch.bfloat16", "dtype=torch.float32")
MISTAKES = [
    ("05-1", 2**-8, "the whole gap"),
    ("05-1", 0.75 / 256, "A 256th of the weight is"),
    ("05-1", 2**-7, "from 1 to 2"),
    ("05-1", 2**-12, "right for FP16"),
    ("05-2", forgetful, "Steps are still lost"),
    ("05-2", changed(frugal, (".split(1 << 18)", ".split(1 << 40)")), "do you widen"),
    ("05-2", changed(frugal, IN_FP32), "no longer BF16"),
    ("05-2", changed(frugal, ("0.003", "0.006")), "another training"),
    ("05-2", changed(frugal, ("seed(seed)", "seed(seed + 1)")), "Your first loss"),
]

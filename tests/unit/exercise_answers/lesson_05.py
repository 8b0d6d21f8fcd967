"""Answers to lesson 05's exercises."""

from exercise_answers.changed import changed

from labkit.exercises.lesson_05 import forgetful, frugal

IN_FP32 = ("dtype=torch.bfloat16", "dtype=torch.float32")
FP32_REMAINDERS = ("zeros_like(weight)", "zeros_like(weight, dtype=torch.float32)")
NOT_TAKEN_BACK = ("                remainder -= weight - before\n", "")
PAIRS = "weight, remainder in zip(model.parameters(), remainders, strict=True)"
BY_CHANCE = [
    ("    remainders = [torch.zeros_like(weight) for weight in model.parameters()]\n", ""),
    (PAIRS, "weight in model.parameters()"),
    ("remainder -= 0.003 * weight.grad", "sums = weight - 0.003 * weight.grad.float()"),
    ("before = weight.clone()", "bits = sums.view(torch.int32)"),
    ("weight += remainder\n", "bits += torch.randint_like(bits, 1 << 16)\n"),
    ("remainder -= weight - before", "weight.copy_((bits & -(1 << 16)).view(torch.float32))"),
]
RIGHT = [
    ("05-2", changed(frugal, *BY_CHANCE)),
    ("05-2", changed(frugal, ("dtype=torch.bfloat16, **shape)", "**shape).to(torch.bfloat16)"))),
]
MISTAKES = [
    ("05-1", 2**-8, "the whole gap"),
    ("05-1", 0.75 / 256, "A 256th of the weight is"),
    ("05-1", 2**-7, "from 1 to 2"),
    ("05-1", 2**-12, "right for FP16"),
    ("05-2", forgetful, "Steps are still lost"),
    ("05-2", changed(frugal, FP32_REMAINDERS), "4.0 bytes for each weight, beside"),
    ("05-2", changed(frugal, IN_FP32), "no longer BF16"),
    ("05-2", changed(frugal, NOT_TAKEN_BACK), "off that of FP32"),
    ("05-2", changed(frugal, ("0.003", "0.006")), "another training"),
    ("05-2", changed(frugal, ("seed(seed)", "seed(seed + 1)")), "Your first loss"),
]

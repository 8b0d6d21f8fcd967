"""Exercises of lesson 05: the gaps of BF16, and pure BF16's peak at FP32's loss."""

import torch

from labkit.claims import plain_value
from labkit.exercises import Exercise
from labkit.exercises.checks import Feedback, expect_number, memory_target, run_experiment
from labkit.memory import Category, Run
from labkit.models import batches, dtype_of, model
from labkit.seeds import losses

MOST_PEAK, MOST_LOSS = 1.10, 0.004
STEPS, WIDE = 40, 1024
SMALL = {"layers": 2, "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


# --- 1: how small is too small -----------------------------------------------------------------


def smallest_change():
    gap = 2.0**-1 * 2**-7  # 0.75 lies between 2**-1 and 2**0; the fraction has seven bits
    return gap / 2


def check_change(answer):
    value, _ = plain_value(answer)
    if value is not None and not isinstance(value, bool):
        for other, why in _SLIPS.items():
            if abs(abs(value) / other - 1) < 0.01:
                return f"You gave {value:g}. {why}"
    return expect_number(answer, smallest_change(), rel_tolerance=0.01)


_SLIPS = {
    2**-8: "That is the whole gap. Where between two numbers does rounding turn?",
    0.75 / 256: "A 256th of the weight is lost only just above a power of two. The gap is the "
    "same for all weights from 0.5 to 1.",
    2**-7: "That is the gap from 1 to 2. Below 1 the numbers stand closer.",
    2**-10: "BF16 stores seven bits of the fraction; the leading 1 is the eighth.",
    2**-11: "That is FP16's gap, with ten bits of fraction. BF16 has seven.",
    2**-12: "That is right for FP16, with ten bits of fraction. BF16 has seven.",
}


# --- 2: pure BF16's peak at FP32's loss --------------------------------------------------------


def forgetful(device, seed=0, width=64, precision="bf16"):
    """The reference that the notebook shows."""
    torch.manual_seed(seed)
    shape = SMALL | {"hidden_size": width, "intermediate_size": 3 * width}
    net = model("SmolLM2-tiny", device=device, dtype=dtype_of(precision), **shape)
    for ids in batches(device=device, batch_size=2, seq_len=64, seed=seed):
        loss = net(input_ids=ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            for w in net.parameters():
                w -= 0.003 * w.grad
                w.grad = None
        yield loss


def frugal(device, seed=0, width=64):
    import torch

    import labkit as lab

    shape = {"layers": 2, "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"hidden_size": width, "intermediate_size": 3 * width}
    torch.manual_seed(seed)
    model = lab.model("SmolLM2-tiny", device=device, dtype=torch.bfloat16, **shape)
    for ids in lab.batches(device=device, batch_size=2, seq_len=64, seed=seed):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            for w in model.parameters():
                # A quarter of a million numbers at a time: the FP32 copies stay small.
                pieces = zip(w.view(-1).split(1 << 18), w.grad.view(-1).split(1 << 18), strict=True)
                for part, grad in pieces:
                    bits = (part - 0.003 * grad.float()).view(torch.int32)
                    bits += torch.randint_like(bits, 1 << 16)
                    part.copy_((bits & -(1 << 16)).view(torch.float32))
                w.grad = None
        yield loss


def check_frugal(answer):
    # The simulation comes first: it costs little and finds a stub or a function that fails.
    wide = run_experiment(answer, world="simulate", steps=2, width=WIDE)
    least = run_experiment(forgetful, world="simulate", steps=2, width=WIDE)
    trained = losses(answer, seeds=(0,), steps=STEPS)
    right = losses(forgetful, seeds=(0,), steps=STEPS, precision="fp32")
    off = trained.against(right).mean
    return (
        _other_start(trained.curves[0][0], right.curves[0][0])
        or _other_loss(off)
        or _too_high(wide, int(MOST_PEAK * least.peak_bytes))
        or Feedback(
            True,
            f"That is right: {wide.peak_bytes / least.peak_bytes:.0%} of the peak of forgetful, "
            f"and the last loss is {off:+.2%} off that of FP32.",
        )
    )


def _other_start(loss: float, right: float) -> str | None:
    if abs(loss - right) <= 0.002 * right:
        return None
    return (
        f"Your first loss is {loss:.4g}, it should be {right:.4g}: the model and the data must "
        "stay the same, only the way a step is stored may change."
    )


def _other_loss(off: float) -> str | None:
    if abs(off) <= MOST_LOSS:
        return None
    if off < 0:
        return (
            f"Your last loss is {-off:.1%} below that of FP32: that is another training, with "
            "other steps. Keep the rate, change how the sum is stored."
        )
    return (
        f"Your last loss is {off:.1%} above that of FP32; {MOST_LOSS:.1%} is allowed. Steps are "
        "still lost: is the sum calculated in FP32, and then rounded at random or its error kept?"
    )


def _too_high(run: Run, most_bytes: int) -> str | None:
    problem = memory_target(run, most_bytes)
    if problem is None or run.oom is not None:
        return problem
    if run.by_category[Category.WEIGHTS] > 1.5 * most_bytes / 2 / MOST_PEAK:
        return f"{problem} Your loss is right. But your weights are no longer BF16."
    return (
        f"{problem} Your loss is right. What do you keep besides BF16 weights and gradients? And "
        "how many numbers do you widen to FP32 at once?"
    )


EXERCISES = (
    Exercise(
        "05-1",
        question="Below which change does a BF16 weight of 0.75 stay where it is?",
        hints=(
            "0.75 lies between 2**-1 and 2**0. How far apart are the BF16 numbers there?",
            "The gap is 2**-1 * 2**-7. A sum is rounded to the nearest number: to the next one "
            "only from the middle of the gap on.",
        ),
        solution=smallest_change,
        check=check_change,
    ),
    Exercise(
        "05-2",
        question="Pure BF16's peak, at most 10 % more, at FP32's loss.",
        hints=(
            "Kahan summation keeps one more number for each weight. Which remedy keeps none?",
            "`stochastic(w, -0.003 * w.grad.float())` gives the loss. Its peak is made of FP32 "
            "copies of a whole weight.",
            "`w.view(-1).split(1 << 18)` is a list of pieces that share w's memory; so is "
            "`w.grad.view(-1).split(1 << 18)`. Loop over both.",
        ),
        solution=frugal,
        check=check_frugal,
    ),
)

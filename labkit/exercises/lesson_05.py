"""Exercises of lesson 05: the gaps of BF16, and pure BF16's peak at FP32's loss."""

import torch

import labkit as lab
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.toolbox.losses import Losses, losses
from labkit.trace import Category

MOST_PEAK, MOST_LOSS = 1.10, 0.004
STEPS, WIDE = 40, 1024
SMALL = {"layers": 2, "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


def smallest_change():
    gap = 2.0**-1 * 2**-7  # 0.75 lies between 2**-1 and 2**0; the fraction has seven bits
    return gap / 2


@check_of(
    "05-1",
    smallest_change,
    "0.75 lies between 2**-1 and 2**0. How far apart are the BF16 numbers there?",
    "The gap is 2**-1 * 2**-7. A sum is rounded to the nearest number: to the next one "
    "only from the middle of the gap on.",
)
def check_change(answer):
    slips = {
        2**-8: "That is the whole gap. Where between two numbers does rounding turn?",
        0.75 / 256: "A 256th of the weight is lost only just above a power of two. The gap is the "
        "same for all weights from 0.5 to 1.",
        2**-7: "That is the gap from 1 to 2. Below 1 the numbers are closer together.",
        2**-12: "That is right for FP16, with ten bits of fraction. BF16 has seven.",
    }
    return checks.expect_number(answer, smallest_change(), rel_tolerance=0.01, slips=slips)


def forgetful(device, seed=0, width=64, precision="bf16"):
    torch.manual_seed(seed)
    shape = SMALL | {"hidden_size": width, "intermediate_size": 3 * width}
    model = lab.model("SmolLM2-tiny", device=device, dtype=lab.dtype_of(precision), **shape)
    for ids in lab.batches(device=device, batch_size=2, seq_len=64, seed=seed):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            for w in model.parameters():
                w -= 0.003 * w.grad
                w.grad = None
        yield loss


def frugal(device, seed=0, width=64):
    torch.manual_seed(seed)
    shape = SMALL | {"hidden_size": width, "intermediate_size": 3 * width}
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


@check_of(
    "05-2",
    frugal,
    "Kahan summation keeps one more number for each weight. Which remedy keeps none?",
    "`stochastic` gives the loss, but makes FP32 copies of a whole weight. Loop over the pieces of "
    "`w.view(-1).split(1 << 18)` and of `w.grad.view(-1).split(1 << 18)`: they share the memory.",
)
def check_frugal(answer):
    # The simulation comes first: it costs little and finds a stub or a function that fails.
    run = checks.run_experiment(answer, mode="simulate", steps=2, width=WIDE)
    ours = losses(answer, seeds=(0,), steps=STEPS)
    right = checks.reference_losses(forgetful, seeds=(0,), steps=STEPS, precision="fp32")
    if problem := _other_training(ours, right):
        return problem
    least = checks.reference_run(forgetful, mode="simulate", steps=2, width=WIDE)
    if problem := checks.memory_target(run, int(MOST_PEAK * least.peak_bytes)):
        if run.by_category[Category.WEIGHTS] > 0.75 * least.peak_bytes:
            return f"{problem} Your loss is right. But your weights are no longer BF16."
        return f"{problem} Your loss is right. How many numbers do you widen to FP32 at once?"
    return checks.Correct(
        f"That is right: {run.peak_bytes / least.peak_bytes:.0%} of the peak of forgetful, "
        f"and the last loss is {ours.against(right).mean:+.2%} off that of FP32."
    )


def _other_training(ours: Losses, right: Losses) -> str | None:
    if problem := checks.same_start(ours.curves[0][0], right.curves[0][0], rel_tolerance=0.002):
        return problem
    off = ours.against(right).mean
    if abs(off) <= MOST_LOSS:
        return None
    advice = (
        "Steps are still lost: is the sum calculated in FP32, and then rounded at random or its "
        "error kept?"
    )
    if off < 0:
        advice = "That is another training. Keep the rate, change how the sum is stored."
    return f"Your last loss is {off:+.1%} off that of FP32; {MOST_LOSS:.1%} is allowed. {advice}"

"""Exercises of lesson 05: the gaps of BF16, and FP32's loss with BF16 weights."""

import torch

import labkit as lab
from gpumem.trace import Category, Trace
from gpumem.units import format_bytes
from labkit.exercises import checks
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook
from labkit.loss_comparison import losses

MOST_PEAK, MOST_LOSS = 0.8, 0.004  # of FP32's
STEPS, WIDE = 20, 1024
SMALL = {"layers": 2, "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
forgetful = from_notebook("05", "forgetful", globals())


def smallest_change():
    gap = 2.0**-1 * 2**-7  # 0.75 lies between 2**-1 and 2**0; the fraction has seven bits
    return gap / 2


@check_of("05-1", smallest_change)
def check_change(answer):
    slips = {
        2**-8: "That is the whole gap. Where between two numbers does rounding turn?",
        0.75 / 256: "A 256th of the weight is lost only just above a power of two. The gap is the "
        "same for all weights from 0.5 to 1.",
        2**-7: "That is the gap from 1 to 2. Below 1 the numbers are closer together.",
        2**-12: "That is right for FP16, with ten bits of fraction. BF16 has seven.",
    }
    return checks.expect_number(answer, smallest_change(), rel_tolerance=0.01, slips=slips)


def frugal(device, seed=0, width=64):
    torch.manual_seed(seed)
    shape = SMALL | {"hidden_size": width, "intermediate_size": 3 * width}
    model = lab.model("SmolLM2-tiny", device=device, dtype=torch.bfloat16, **shape)
    remainders = [torch.zeros_like(weight) for weight in model.parameters()]
    for ids in lab.batches(device=device, batch_size=2, seq_len=64, seed=seed):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            for weight, remainder in zip(model.parameters(), remainders, strict=True):
                remainder -= 0.003 * weight.grad
                before = weight.clone()
                weight += remainder
                remainder -= weight - before
                weight.grad = None
        yield loss


@check_of("05-2", frugal)
def check_frugal(answer):
    print(f"Training yours and FP32 for {STEPS} steps each takes some seconds ...", flush=True)
    # The simulation comes first: it costs little and finds a stub or a function that fails.
    run = checks.run_experiment(answer, mode="simulate", steps=2, width=WIDE)
    ours = losses(answer, seeds=(0,), steps=STEPS)
    right = checks.reference_losses(forgetful, seeds=(0,), steps=STEPS, precision="fp32")
    if problem := checks.same_start(ours.curves[0][0], right.curves[0][0], rel_tolerance=0.002):
        return problem
    off = ours.against(right).mean
    if not abs(off) <= MOST_LOSS:  # also true of NaN
        advice = (
            "Steps are still lost: what happens to the part of a step that a weight cannot take?"
        )
        if off < 0:
            advice = "That is another training. Keep the rate, change how the sum is stored."
        return (
            f"Your last loss is {off:+.1%} off that of FP32; {MOST_LOSS:.1%} is allowed. {advice}"
        )
    weights = [each for each in run.trace.storages if each.category is Category.WEIGHTS]
    if any(each.name and each.dtype == "float32" for each in weights):  # parameters have names
        return "Your loss is right. But your weights are no longer BF16."
    fp32 = {"mode": "simulate", "steps": 2, "width": WIDE, "precision": "fp32"}
    most = checks.reference_run(forgetful, **fp32)
    if run.oom is not None:
        return checks.DID_NOT_FIT.format(run.oom)
    most_bytes = int(MOST_PEAK * most.peak_bytes)
    if run.peak_bytes > most_bytes:
        return (
            f"Your loss is right. Your peak is {format_bytes(run.peak_bytes)}, the target at most "
            f"{format_bytes(most_bytes)}. Between steps you keep {_kept_bytes(run.trace):.1f} "
            "bytes for each weight, beside the weight itself: in which format?"
        )
    return checks.Correct(
        f"That is right: {run.peak_bytes / most.peak_bytes:.0%} of FP32's peak, "
        f"and the last loss is {off:+.2%} off that of FP32."
    )


def _kept_bytes(trace: Trace) -> float:
    """Return what lives after the last step beside the weights, in bytes for each BF16 weight."""
    live = trace.live_at(len(trace.events) - 1)
    weights_bytes = sum(each.nbytes for each in live if each.category is Category.WEIGHTS)
    return 2 * sum(each.nbytes for each in live) / weights_bytes - 2

"""Exercises of lesson 22: what a technique is worth given the rest, and a leaner stack."""

import argparse
from typing import Any

import labkit as lab
from gpumem.inputs import InputError, shown
from gpumem.runs import Run
from gpumem.units import GIB, format_bytes
from labkit.exercises import checks
from labkit.exercises.checks import Correct, expect_results, memory_target
from labkit.exercises.engine import check_of
from labkit.exercises.notebook_code import from_notebook

for _name in ("loss_of", "CpuAdamW"):  # which `train` needs
    from_notebook("22", _name, globals())
train = from_notebook("22", "train", globals())
# (weights, gradients, states, activations, k), in GiB
JOBS = (
    (2, 2, 4, 40, 4),  # backward's moment is the peak before and after
    (2, 2, 4, 40, 1000),  # the optimizer's step is the peak after
    (4, 4, 8, 3, 10),  # the optimizer's step is the peak before, too
    (1, 0.1, 0.2, 9, 2),  # adapters
)
MODEL, ROWS = "SmolLM2-135M", 4
MOST_BYTES = int(1.4 * GIB)
#: All seven switches of the lesson.
SEVEN = "--amp --fused --checkpointing --chunk=1024 --optimizer=cpu --micro=2"

_parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
for _switch in ("amp", "fused", "checkpointing", "bf16", "nf4"):
    _parser.add_argument(f"--{_switch}", action="store_true")
for _number in ("chunk", "micro", "lora"):
    _parser.add_argument(f"--{_number}", type=int, default=0)
_parser.add_argument("--optimizer", choices=["adamw", "8bit", "cpu"], default="adamw")


def factor(weights, gradients, states, activations, k):
    def peak(activations):
        return weights + states + max(activations, gradients)  # backward, or the optimizer's step

    return peak(activations) / peak(activations / k)


@check_of("22-1", factor)
def check_factor(answer):
    return expect_results(answer, factor, JOBS, slips=_slips)


def _slips(weights, gradients, states, activations, k):
    fixed, after = weights + states, activations / k
    before_peak, after_peak = fixed + activations, fixed + after
    return {
        k: "The weights and states do not shrink with the activations.",
        before_peak / after_peak: "After the division another moment may be the fullest: the "
        "optimizer's step.",
        before_peak / (fixed + max(after, gradients)): "Before it, too, the optimizer's step may "
        "be the fullest moment.",
        (before_peak + gradients) / (after_peak + gradients): "Gradients and activations are not "
        "there at the same time: they belong to two moments.",
        1 / factor(weights, gradients, states, activations, k): "You return the share that is "
        "left. How many times smaller is that?",
    }


def switches_of(answer: Any) -> argparse.Namespace:
    """Return what an answer such as ``"--amp --chunk=1024"`` switches on.

    Raises:
        InputError: it is no text, or has another switch.
    """
    if not isinstance(answer, str):
        raise InputError(f"a text such as '--amp --fused' is asked for, not {shown(answer)}")
    try:
        switches, unknown = _parser.parse_known_args(answer.split())
    except argparse.ArgumentError as error:
        raise InputError(f"{error}") from error
    if unknown:
        known = ", ".join(f"--{name}" for name in vars(switches))
        raise InputError(f"unknown: {' '.join(unknown)}. The switches are {known}.")
    return switches


def job(device, layers, flags):
    """The lesson's job, at the size of the exercise."""
    options = switches_of(flags)
    options.lr = 1e-4
    attention = "sdpa" if options.fused else "eager"
    model = lab.model(MODEL, device=device, layers=layers, attention=attention)
    lab.checkpointing(model, on=options.checkpointing)
    batches = lab.batches(device=device, batch_size=ROWS, seq_len=1024)
    yield from train(model, batches, options)


def simulated(flags: str) -> Run:
    """The job with these switches on the GPU of the exercise."""
    return checks.simulated(job, gpu="rtx-4090", layers=30, alike="layers", flags=flags)


def leaner():
    # Halving the rows would make gradients wait through the loss. What is left are pieces of it.
    return "--amp --fused --checkpointing --chunk=256 --optimizer=cpu"


@check_of("22-2", leaner)
def check_leaner(answer):
    switches = switches_of(answer)
    for name in ("bf16", "nf4", "lora"):
        if getattr(switches, name):
            return f"With --{name} it is another training."
    if switches.optimizer == "8bit":
        return "With --optimizer=8bit it is another training: the moments are rounded."
    run = simulated(answer)
    if problem := memory_target(run, MOST_BYTES):
        return f"{problem} {_leaner_advice(switches, run)}"
    return Correct(f"That is right: {format_bytes(run.peak_bytes)}, less than all seven take.")


def _leaner_advice(switches: argparse.Namespace, run: Run) -> str:
    if run.bytes_of("optimizer"):
        return "Moments on the GPU alone are more than what is to be saved."
    if switches.micro and run.bytes_of("gradients"):
        return "Which switch makes gradients wait while there are still activations?"
    if not switches.chunk or switches.chunk > 512:
        return "What are the temporary bytes? Which switch says how many of them there are?"
    if switches.checkpointing and not (switches.amp and switches.fused):
        return "Written-out attention has temporary bytes, too. Which two switches avoid them?"
    return "Compare with all seven, one switch at a time."

"""Exercises of lesson 16: a slowdown from bytes and bandwidth, and a large model in few bytes."""

import functools
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.claims import plain_value
from labkit.exercises import Exercise
from labkit.exercises.checks import Feedback, call, quote, run_experiment, same_losses
from labkit.memory import Run, format_bytes

# --- 1: predict a slowdown ------------------------------------------------------------------------


def slowdown(parameters, tokens, flops_per_second, bytes_per_second, hidden):
    arithmetic = 8 * parameters * tokens / flops_per_second  # 2 forward, 2 again, 4 backward
    copies = 3 * 2 * parameters / bytes_per_second  # fetched twice, gradients back; 2 bytes each
    together = max(arithmetic, copies) if hidden else arithmetic + copies
    return together / arithmetic


# (parameters, tokens, flops_per_second, bytes_per_second, hidden)
JOBS = (
    (8_000_000_000, 2048, 100e12, 25e9, False),
    (8_000_000_000, 2048, 100e12, 25e9, True),  # the copies are what takes time
    (8_000_000_000, 8192, 100e12, 25e9, True),  # all hidden
    (1_000_000_000, 16384, 300e12, 50e9, False),
)
TOLERANCE = 0.005


def check_slowdown(answer):
    for job in JOBS:
        given, right = call(answer, *job), slowdown(*job)
        value, problem = plain_value(given)
        if problem or isinstance(value, bool):
            return f"A number is asked for; you return {quote(given)}."
        if abs(value / right - 1) > TOLERANCE:
            return f"{_job_text(*job)}: you return {value:.4g}. {_slowdown_advice(value, job)}"
    return None


def _job_text(parameters, tokens, flops_per_second, bytes_per_second, hidden):
    return (
        f"{parameters / 1e9:g} billion weights, {tokens} tokens, {flops_per_second / 1e12:g} · "
        f"10¹² operations and {bytes_per_second / 1e9:g} · 10⁹ bytes per second, copies "
        f"{'hidden' if hidden else 'waited for'}"
    )


def _slowdown_advice(value, job):
    """Why ``value`` is not the slowdown of this job."""
    *sizes, hidden = job
    parameters, tokens, flops, rate = sizes
    arithmetic, crossing = 8 * parameters * tokens / flops, 2 * parameters / rate

    def step(copies, computing=arithmetic):
        return (max(computing, copies) if hidden else computing + copies) / computing

    mistakes = {
        "What is asked is how many times as long, not how many seconds.": (
            step(3 * crossing) * arithmetic
        ),
        "What is copied while the GPU computes takes no time of its own: which is longer?": (
            slowdown(*sizes, hidden=False)
        ),
        "The GPU waits here: first it computes, then it copies.": slowdown(*sizes, hidden=True),
        "Do gradients find their way to the host by themselves?": step(2 * crossing),
        "Each weight is fetched for forward, and once more for backward.": step(crossing),
        "A weight in BF16 has two bytes.": step(6 * crossing),
        "Forward is computed twice: that makes 8 operations for each weight and token, not 6.": (
            step(3 * crossing, 0.75 * arithmetic)
        ),
    }
    for advice, number in mistakes.items():
        if abs(value / number - 1) <= TOLERANCE:
            return advice
    return "Divide the bytes that cross by bytes_per_second, and the operations by theirs."


# --- 2: the largest model in so many bytes --------------------------------------------------------

FEW, MANY = 8, 24  # blocks
OPERATIONS_PER_SECOND, BYTES_PER_SECOND = 1e12, 13e9
MOST_TIME = 2.0
GPU = "rtx-4090"  # on which it is simulated: any would do, as nothing comes near its memory


def roomy(device, blocks=8, steps=2):
    """The reference that the notebook shows."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512, device=device) for _ in range(blocks)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = model(torch.randn(128, 512, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def large(device, blocks=24, steps=2):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512, device=device) for _ in range(blocks)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())])
    placed = list(model.parameters())
    hosted = [p.detach().to("cpu", copy=True) for p in placed]
    optimizer = torch.optim.AdamW(hosted, lr=1e-3)

    def leave(there, p):  # a gradient goes to the host as soon as it is there
        there.grad, p.grad = p.grad.to("cpu", copy=True), None

    for there, p in zip(hosted, placed, strict=True):
        p.register_post_accumulate_grad_hook(partial(leave, there))
    for _ in range(steps):
        loss = model(torch.randn(128, 512, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for there, p in zip(hosted, placed, strict=True):
                p.copy_(there)
        yield loss


_COPIES = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}  # the source
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class _Watch(TorchDispatchMode):
    """Bytes that are copied between device and host, and products that the host computes."""

    def __init__(self) -> None:
        super().__init__()
        self.crossing_bytes = self.host_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in _COPIES:
            source = args[_COPIES[func]]
            self.crossing_bytes += source.nbytes * (source.device != out.device)
        if func in _PRODUCTS:
            self.host_products += out.device == torch.device("cpu")
        return out


def _simulated(experiment, blocks: int) -> tuple[Run, _Watch]:
    """The experiment on fake tensors, and what its second step moved and computed where."""
    last = _Watch()

    def watched(device, blocks=blocks, steps=2):
        nonlocal last
        training = experiment(device, blocks=blocks, steps=steps)
        while True:
            with _Watch() as watch:
                loss = next(training, training)
            if loss is training:
                return
            last = watch
            yield loss

    return run_experiment(watched, world="simulate", gpu=GPU), last


@functools.cache
def _reference(blocks: int) -> tuple[Run, _Watch]:
    return _simulated(roomy, blocks)


def _seconds(run: Run, watch: _Watch) -> float:
    return run.flops / OPERATIONS_PER_SECOND + watch.crossing_bytes / BYTES_PER_SECOND


def check_large(answer):
    run, watch = _simulated(answer, MANY)
    few, _ = _reference(FEW)
    many, plain = _reference(MANY)
    if watch.host_products:
        return (
            f"The host computes {watch.host_products} of the matrix products of a step. Offloading "
            "moves what is kept, not what is computed: the products belong on the device."
        )
    problem = _too_large(run, few) or _too_slow(run, watch, _seconds(many, plain))
    if problem:
        return problem
    real = {"world": "measure", "blocks": MANY, "steps": 2}
    if problem := same_losses(run_experiment(answer, **real), run_experiment(roomy, **real)):
        return problem
    times = _seconds(run, watch) / _seconds(many, plain)
    return Feedback(
        True,
        f"That is right: {MANY} blocks in {format_bytes(run.peak_bytes)}, where {FEW} took "
        f"{format_bytes(few.peak_bytes)}, in {times:.2f} times the time.",
    )


def _too_large(run: Run, few: Run) -> str | None:
    if run.peak_bytes <= few.peak_bytes:
        return None
    advice = "What must stay, and what only passes through?"
    if run.bytes_of("optimizer"):
        advice = "The optimizer's state is still there, two numbers for each weight."
    elif run.host_bytes > run.peak_bytes:
        advice = (
            "The optimizer is gone, and still at one moment *all* gradients are on the device. "
            "`register_post_accumulate_grad_hook` is told of each one as soon as it is ready."
        )
    return (
        f"{MANY} blocks peak at {format_bytes(run.peak_bytes)} on the device; at most "
        f"{format_bytes(few.peak_bytes)} are allowed, what `roomy` takes for {FEW}. {advice}"
    )


def _too_slow(run: Run, watch: _Watch, plain_seconds: float) -> str | None:
    times = _seconds(run, watch) / plain_seconds
    if times <= MOST_TIME:
        return None
    arithmetic = run.flops / OPERATIONS_PER_SECOND / plain_seconds
    return (
        f"It fits, but takes {times:.2f} times as long: arithmetic {arithmetic:.2f}, and "
        f"{format_bytes(watch.crossing_bytes)} over the link, {times - arithmetic:.2f}. At most "
        f"{MOST_TIME:g} times are allowed. Need the weights themselves leave the device?"
    )


EXERCISES = (
    Exercise(
        "16-1",
        question="How many times as long does a step take with its weights on the host?",
        hints=(
            "Two times make it up. Arithmetic: 2 operations for each weight and token in forward, "
            "2 again as forward is recomputed, 4 in backward. And the copies: how often does a "
            "weight, or its gradient, cross the link?",
            "`8 * parameters * tokens / flops_per_second` and `3 * 2 * parameters / "
            "bytes_per_second`. Hidden: the larger of the two; waited for: their sum. Then divide "
            "by the arithmetic.",
        ),
        solution=slowdown,
        check=check_slowdown,
        kind="function",
    ),
    Exercise(
        "16-2",
        question="24 blocks in the device memory of 8, in at most twice the time.",
        hints=(
            "16 bytes per weight are on the device: weight, gradient, two moments. 24 blocks in "
            "the room of 8 means about a third of that. `HostAdamW` takes the moments away. What "
            "else need not be there all at once?",
            "Keep copies of the weights on the host with their AdamW. For each weight, "
            "`p.register_post_accumulate_grad_hook(...)`: copy `p.grad` to the host's `.grad`, and "
            "set `p.grad = None`. After backward, step there and copy the weights back.",
        ),
        solution=large,
        check=check_large,
    ),
)

"""Runs made by hand for the tests of figures and widgets: no PyTorch, no measuring."""

from dataclasses import replace

from gpumem.hardware import catalogue
from gpumem.runs import OutOfMemory, Run
from gpumem.trace import Category, Event, Phase, Storage, Trace
from gpumem.units import GIB, MIB
from phantom_gpu.report import FitReport
from phantom_gpu.report_records import (
    DrawnRecord,
    FailedRequest,
    GpuReport,
    Holder,
    ProcessReport,
    UnknownValue,
    When,
)

C, P = Category, Phase
SPLIT = {C.WEIGHTS: 0.2, C.GRADIENTS: 0.2, C.OPTIMIZER: 0.4, C.ACTIVATIONS: 0.15, C.TEMPORARY: 0.05}


class TraceBuilder:
    """Writes the event log of a training run: ``hold`` returns what ``free`` takes."""

    def __init__(self) -> None:
        self.storages, self.events, self.step_starts = [], [], []

    def hold(self, nbytes, category, phase, module=""):
        self.storages.append(
            Storage(nbytes, category, "cpu", "aten.mm", module, "", phase, (nbytes,), "uint8")
        )
        self.events.append(Event(len(self.storages) - 1, nbytes, phase))
        return len(self.storages) - 1

    def free(self, storage, phase):
        self.events.append(Event(storage, -self.storages[storage].nbytes, phase))

    def begin_step(self):
        self.step_starts.append(len(self.events))

    def trace(self):
        return Trace("cpu", tuple(self.storages), tuple(self.events), tuple(self.step_starts))


def training_trace(*, layers=6, steps=2, layer_bytes=8 * MIB, stop_early=False):
    """Forward rising, backward falling, AdamW's state born in step 1, as in a real run."""
    log = TraceBuilder()
    for i in range(layers):
        log.hold(layer_bytes, C.WEIGHTS, P.SETUP, f"layers.{i}")
    log.hold(MIB, C.BUFFERS, P.SETUP)
    for step in range(1, steps + 1):
        log.begin_step()
        kept = []
        for i in range(layers):
            scratch = log.hold(layer_bytes // 2, C.TEMPORARY, P.FORWARD, f"layers.{i}")
            kept += [log.hold(layer_bytes // 2, C.ACTIVATIONS, P.FORWARD) for _ in range(4)]
            log.free(scratch, P.FORWARD)
        kept.append(log.hold(6 * layer_bytes, C.ACTIVATIONS, P.FORWARD, "loss"))
        if stop_early and step == steps:
            return log.trace()
        gradients = []
        for i in reversed(range(layers)):
            scratch = log.hold(layer_bytes, C.TEMPORARY, P.BACKWARD, f"layers.{i}")
            for _ in range(5 if i == layers - 1 else 4):
                log.free(kept.pop(), P.BACKWARD)
            gradients.append(log.hold(layer_bytes, C.GRADIENTS, P.BACKWARD))
            log.free(scratch, P.BACKWARD)
        for _ in range(layers):
            if step == 1:
                log.hold(2 * layer_bytes, C.OPTIMIZER, P.OPTIMIZER)
            log.free(log.hold(layer_bytes, C.TEMPORARY, P.OPTIMIZER), P.OPTIMIZER)
        for gradient in gradients:
            log.free(gradient, P.OPTIMIZER)
    return log.trace()


def split(total_bytes, shares=None):
    """``total_bytes`` over categories, to the byte."""
    shares = shares or SPLIT
    table = {category: int(total_bytes * share) for category, share in shares.items()}
    table[C.WEIGHTS] += total_bytes - sum(table.values())
    return table


def fake_run(name="training step", total_bytes=1 << 30, *, shares=None, **fields):
    """A run with invented figures; ``fields`` are those of ``Run``."""
    defaults = {"parameters": {"batch_size": 4}, "mode": "simulated", "device": "NVIDIA T4"}
    categories = split(total_bytes, shares)
    return Run(name, peak_bytes=total_bytes, by_category=categories, **{**defaults, **fields})


def traced_run(name="training step", **fields):
    """A run whose trace is ``training_trace``."""
    trace = fields.pop("trace", None) or training_trace()
    peak = trace.peak()
    defaults = {"parameters": {"batch_size": 4}, "mode": "tracked", "device": "CPU"}
    return Run(
        name,
        peak_bytes=peak.total_bytes,
        by_category=peak.by_category,
        trace=trace,
        **{**defaults, **fields},
    )


def out_of_memory(live_bytes, requested_bytes, capacity_bytes):
    """Where a made-up run ran out of memory."""
    return OutOfMemory(
        requested_bytes,
        live_bytes,
        capacity_bytes,
        split(live_bytes),
        1,
        "forward",
        "layers.3.mlp",
        "aten.mm",
    )


def phantom_verdict(*, ranks=1, text="train.py", **changed):
    """What a program on phantom T4s could have done; ``text`` names its script, module and line.

    ``changed`` are fields of its answers.
    """
    line = training_trace().timeline()
    peak_bytes = max(line.totals_bytes())
    when = When(2, "backward", text, text)
    blocks = [
        {"size": 12 * MIB, "state": "active_allocated"},
        {"size": 8 * MIB, "state": "inactive"},
    ]
    segments = [
        {"stream": i, "segment_type": "large", "is_expandable": False, "blocks": blocks}
        for i in (0, 7)
    ]
    gpu = GpuReport(
        index=0,
        name="NVIDIA T4",
        capacity_bytes=14 * GIB,
        peak_allocated_bytes=peak_bytes + MIB,
        peak_reserved_bytes=GIB,
        allocated_at=when,
        reserved_at=when,
        made_of={"weights": 48 * MIB, "activations": peak_bytes - 48 * MIB, "rounding": MIB},
        holders=[Holder(48 * MIB, 6, "weights", text, text, text)],
        retries=1,
        errors=1,
        failed=FailedRequest(2 * GIB, 22 * GIB, when, [text]),
        growth_bytes=MIB,
        growth=[Holder(MIB, 1, "activations", text, text, text)],
        record=DrawnRecord(line, segments, "after the update of step 2"),
    )
    answer = ProcessReport(
        text, 0, "finished", "", [], 2, [gpu], [UnknownValue(text, "bool ()", 5)]
    )
    answers = [replace(answer, rank=rank, **changed) for rank in range(ranks)]
    card = catalogue.gpu("t4")
    return FitReport(card, ranks, card.budget_bytes, answers, "/home/me", 0)

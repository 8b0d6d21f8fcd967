"""Pipelines: which device works on which micro-batch when, and the first stage alone.

    note_calls(stage, "0.txt")                       # in each process, before its schedule runs
    slots = in_slots(["0.txt", "1.txt"], forward=1)  # the last step, with given lengths
    draw_slots({"1F1B": slots}, title="Who works?", source="made up")

Limits: each noted call waits for the GPU first, so a program that is noted is slower.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.patches import Patch
from torch import nn
from torch.distributed import get_world_size
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import labkit as lab
from gpumem.figures.drawing import INK, Picture

ORDERS = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


def note_calls(stage: PipelineStage, path: str | Path) -> None:
    """Write into ``path``, a line each, when a forward or a backward begins, and of which piece."""

    def note(kind: str, method: str) -> None:
        work = getattr(stage, method)

        def noted(piece: int, *others: Any, **named: Any) -> Any:
            if stage.device.type == "cuda":
                torch.cuda.synchronize(stage.device)  # what came before is not this call's work
            file.write(json.dumps([time.monotonic(), kind, piece]) + "\n")
            file.flush()
            return work(piece, *others, **named)

        setattr(stage, method, noted)

    file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    note("forward", "forward_one_chunk")
    note("backward", "backward_one_chunk")


def in_slots(paths: Sequence[str | Path], forward: float) -> pd.DataFrame:
    """Return the work of the last step as if sending took no time, and backward twice a forward.

    Each device, one for each path, keeps its order. Work begins when the device is free and what
    began before it on the same micro-batch, on whichever device, is done. There is a row for each
    call, in order: ``device``, ``kind``, ``piece``, ``start`` and ``stop``.
    """
    calls = []
    for device, path in enumerate(paths):
        noted = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        first = max(i for i, (_, *call) in enumerate(noted) if call == ["forward", 0])
        calls += [(moment, device, kind, piece) for moment, kind, piece in noted[first:]]
    free, done = dict.fromkeys(range(len(paths)), 0.0), {}
    rows = []
    for _, device, kind, piece in sorted(calls):
        start = max(free[device], done.get(piece, 0.0))
        free[device] = done[piece] = start + (forward if kind == "forward" else 2 * forward)
        rows.append((device, kind, piece, start, done[piece]))
    return pd.DataFrame(rows, columns=["device", "kind", "piece", "start", "stop"])


def draw_slots(charts: Mapping[str, pd.DataFrame], *, title: str, source: str) -> Picture:
    """Show what ``in_slots`` gave, a chart for each name, and how long each device is idle.

    The numbers in the bars are those of the micro-batches; ``source`` says where the order is from.
    """
    colours = {"forward": "#D3E5F4", "backward": "#E69F00"}  # pale enough for numbers
    legend = [Patch(facecolor=each, edgecolor=INK, label=kind) for kind, each in colours.items()]
    source = f"a micro-batch forward is one slot, backward two; the order is {source}"
    figure = Picture(title, source, body=170 * len(charts), legend=legend)
    rows = []
    with figure.drawing(len(charts), sharex=True, squeeze=False) as places:
        for [axes], (name, bars) in zip(places, charts.items(), strict=True):
            devices, stop = bars.device.nunique(), bars.stop.max()
            lengths = bars.stop - bars.start
            look = {"color": bars.kind.map(colours), "edgecolor": INK, "height": 0.8}
            axes.barh(bars.device, lengths, left=bars.start, **look)
            for bar in bars.itertuples():
                middle = (bar.start + bar.stop) / 2
                axes.text(middle, bar.device, bar.piece, ha="center", va="center")
            idle = f"{1 - lengths.sum() / (devices * stop):.0%}"
            axes.set_title(f"{name}: {stop:g} slots, each device idle for {idle}", loc="left")
            axes.set_yticks(range(devices), [f"device {number}" for number in range(devices)])
            axes.set_ylim(devices - 0.4, -0.6)
            rows.append((name, f"{stop:g}", idle))
        axes.set_xlabel("slots")
    figure.describe("Bars over time", ("", "slots", "idle"), rows)
    return figure.show()


class FirstStage(nn.Module):
    """The embedding of a model of eight layers, and what the first rank has of these."""

    def __init__(self) -> None:
        super().__init__()
        layers = 8 // get_world_size()
        self.model = lab.model("SmolLM2-tiny", layers=layers, vocab_size=256).model
        self.model.norm = nn.Identity()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).last_hidden_state


def train_first_stage(device: Any, order: str = "GPipe", pieces: int = 16) -> Iterator[float]:
    """The first rank's steps, 32 texts each, of a pipeline as in lesson 20; an experiment."""
    stage = FirstStage().to(device)
    ids = torch.empty(32 // pieces, 256, dtype=torch.int64, device="meta")
    hidden = torch.empty(*ids.shape, 192, device="meta", requires_grad=True)
    ends = {"input_args": ids, "output_args": hidden}
    loss_of = nn.functional.mse_loss  # without one there would be no backward
    schedule = ORDERS[order](
        PipelineStage(stage, 0, get_world_size(), device, **ends), pieces, loss_of
    )
    optimizer = torch.optim.AdamW(stage.parameters())
    for batch in lab.batches(device=device, batch_size=32, seq_len=256):
        schedule.step(batch, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        yield 0.0  # the loss is the last stage's

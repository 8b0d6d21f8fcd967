"""Pipelines: which device works on which micro-batch when, and the first stage alone.

    note_calls(stage, "0.txt")               # in each process, before its schedule runs
    in_slots(["0.txt", "1.txt"], forward=1)  # the last step, drawn with given lengths

Limits: each noted call waits for the GPU first, so a program that is noted is slower.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.distributed import get_world_size
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import labkit as lab

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

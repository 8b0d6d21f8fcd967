"""Pipelines: every call noted with its moment, and drawn in slots in the order that was."""

import json
from types import SimpleNamespace

import pytest
import torch

from labkit.pipelines import draw_slots, in_slots, note_calls


def test_noted_calls_pass_on_what_they_return_and_the_last_step_counts(tmp_path):
    def work(piece, scale=1):
        return piece * scale

    device = torch.device("cpu")
    stage = SimpleNamespace(device=device, forward_one_chunk=work, backward_one_chunk=work)
    note_calls(stage, tmp_path / "0.txt")
    for _ in range(2):
        assert stage.forward_one_chunk(0) == 0
        assert stage.forward_one_chunk(1, scale=3) == 3
        assert stage.backward_one_chunk(0) == 0
    noted = in_slots([tmp_path / "0.txt"], forward=4)
    assert [*zip(noted.kind, noted.piece, noted.stop, strict=True)] == [
        ("forward", 0, 4),
        ("forward", 1, 8),
        ("backward", 0, 16),
    ]


def test_slots_keep_the_order_and_wait_for_what_comes_before(tmp_path):
    first = [(0, "forward", 0), (0.3, "forward", 1), (2, "backward", 0), (5, "backward", 1)]
    second = [(0.31, "forward", 0), (0.5, "backward", 0), (2, "forward", 1), (2.2, "backward", 1)]
    paths = [tmp_path / "0.txt", tmp_path / "1.txt"]
    for path, calls in zip(paths, (first, second), strict=True):
        path.write_text("".join(f"{json.dumps(call)}\n" for call in calls))
    placed = in_slots(paths, forward=1)
    slots = [[*zip(own.start, own.stop, strict=True)] for _, own in placed.groupby("device")]
    assert slots[0] == [(0, 1), (1, 2), (4, 6), (7, 9)]
    assert slots[1] == [(1, 2), (2, 4), (4, 5), (5, 7)]
    figure = draw_slots({"two devices": placed}, title="Who works?", source="made up")
    assert "two devices: slots 9, idle 33%" in figure.alt  # 12 of 18


@pytest.mark.parametrize(("stages", "pieces"), [(2, 1), (2, 8), (4, 16), (6, 5)])
def test_gpipe_is_idle_as_the_formula_says(tmp_path, stages, pieces):
    paths = [tmp_path / f"{stage}.txt" for stage in range(stages)]
    for stage, path in enumerate(paths):
        calls = [(stage + i, "forward", i) for i in range(pieces)]
        calls += [(1000 + stages - stage + 2 * i, "backward", i) for i in range(pieces)]
        path.write_text("".join(f"{json.dumps(call)}\n" for call in calls))
    placed = in_slots(paths, forward=1)
    worked = (placed.stop - placed.start).sum()
    idle = 1 - worked / (stages * placed.stop.max())
    assert idle == pytest.approx((stages - 1) / (pieces + stages - 1))

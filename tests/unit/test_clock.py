"""The clock: every call noted once, in its lap, and nothing else changed."""

import time

import pytest
import torch
from torch import nn

import labkit as lab
from labkit.clock import Clock, Span
from labkit.memory import InputError


class Stage:
    """Something that works."""

    def work(self, piece, *, scale=1):
        """What it does."""
        time.sleep(0.01)
        return scale * piece

    def fail(self):
        raise ValueError("no")


def test_calls_are_noted_with_what_they_took_and_gave():
    clock, stage, other = lab.Clock(), Stage(), Stage()
    clock.watch(stage, work="forward")
    before = time.monotonic()
    assert stage.work(3, scale=2) == 6
    assert stage.work(4, scale=1) == 4
    after = time.monotonic()
    assert other.work(5) == 5  # of the same class, and not watched
    (first, second) = clock.laps[-1]
    assert (first.kind, first.text, second.text) == ("forward", "3", "4")
    assert before <= first.start < first.stop <= second.start < second.stop <= after
    assert first.stop - first.start >= 0.01
    assert stage.work.__doc__ == "What it does."


def test_laps():
    clock, stage = Clock(), Stage()
    clock.watch(stage, text="x", work="work")
    stage.work(1)
    clock.lap()
    clock.lap()
    stage.work(2)
    assert [[span.text for span in lap] for lap in clock.laps] == [["x"], [], ["x"]]
    assert clock.laps[0][0].kind == "work"


def test_a_modules_forward_can_be_watched():
    clock, layer = Clock(), nn.Linear(2, 2)
    clock.watch(layer, forward="forward")
    out = layer(torch.ones(1, 2))
    assert torch.equal(out, nn.functional.linear(torch.ones(1, 2), layer.weight, layer.bias))
    assert [span.text for span in clock.laps[0]] == [""]  # its first argument is no number


def test_a_call_that_fails_is_not_noted_and_fails_as_before():
    clock, stage = Clock(), Stage()
    clock.watch(stage, fail="failing")
    with pytest.raises(ValueError, match="no"):
        stage.fail()
    assert clock.laps == [[]]


def test_closed_laps_travel_through_a_file(tmp_path):
    clock, stage = Clock(tmp_path / "0.json"), Stage()
    clock.watch(stage, text="ä", work="work")
    stage.work(1)
    clock.lap()
    stage.work(2)
    assert Clock.read(str(tmp_path / "0.json")) == clock.laps[:1]  # an open lap stays
    clock.lap()
    laps = Clock.read(tmp_path / "0.json")
    assert laps == clock.laps[:2]
    assert isinstance(laps[0][0], Span)
    assert [path.name for path in tmp_path.iterdir()] == ["0.json"]


@pytest.mark.parametrize("text", ["", "{", "3", "[3]", "[[3]]", '[["a", 1]]'])
def test_a_file_without_laps_is_refused(tmp_path, text):
    (tmp_path / "0.json").write_text(text)
    with pytest.raises(InputError, match="holds no laps"):
        Clock.read(tmp_path / "0.json")


def test_what_cannot_be_watched_or_read(tmp_path):
    stage = Stage()
    with pytest.raises(InputError, match="Stage has no method 'wrok'"):
        Clock().watch(stage, work="work", wrok="work")
    assert "work" not in vars(stage)  # neither of them is watched
    with pytest.raises(InputError, match="holds no laps"):
        Clock.read(tmp_path / "none.json")

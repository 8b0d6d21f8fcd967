"""SpanRecorder: every call recorded once, in its lap, and nothing else changed."""

import time

from labkit.spans import Span, SpanRecorder, in_slots


class Stage:
    def work(self, piece, *, scale=1):
        """Do the work."""
        time.sleep(0.01)
        return scale * piece


def test_calls_are_recorded_with_their_times_and_pass_on_what_they_return():
    recorder, stage, other = SpanRecorder(), Stage(), Stage()
    recorder.watch(stage, work="forward")
    before = time.monotonic()
    assert stage.work(3, scale=2) == 6
    assert stage.work(4, scale=1) == 4
    after = time.monotonic()
    assert other.work(5) == 5  # of the same class, and not watched
    (first, second) = recorder.laps[-1]
    assert (first.kind, first.text, second.text) == ("forward", "3", "4")
    assert before <= first.start < first.stop <= second.start < second.stop <= after
    assert first.stop - first.start >= 0.01
    assert stage.work.__doc__ == "Do the work."


def test_laps_are_separate_and_the_closed_ones_travel_through_a_file(tmp_path):
    recorder, stage = SpanRecorder(tmp_path / "0.json"), Stage()
    recorder.watch(stage, work="work")
    stage.work(1)
    assert recorder.lap() == 1
    stage.work(2)
    assert SpanRecorder.read(str(tmp_path / "0.json")) == recorder.laps[:1]  # not the open one
    assert recorder.lap() == 2
    laps = SpanRecorder.read(tmp_path / "0.json")
    assert laps == recorder.laps[:2]
    assert isinstance(laps[0][0], Span)
    assert [[span.text for span in lap] for lap in recorder.laps] == [["1"], ["2"], []]


def test_slots_keep_the_order_and_wait_for_what_comes_before():
    first = [Span("forward", 0, 0.3, "0"), Span("forward", 0.3, 0.4, "1")]
    first += [Span("backward", 2, 3, "0"), Span("backward", 5, 9, "1")]
    second = [Span("forward", 0.31, 0.4, "0"), Span("backward", 0.5, 1.9, "0")]
    second += [Span("forward", 2, 2.1, "1"), Span("backward", 2.2, 4, "1")]
    placed = in_slots({"a": first, "b": second}, {"forward": 1, "backward": 2})
    assert [(span.start, span.stop) for span in placed["a"]] == [(0, 1), (1, 2), (4, 6), (7, 9)]
    assert [(span.start, span.stop) for span in placed["b"]] == [(1, 2), (2, 4), (4, 5), (5, 7)]
    assert [span.text for span in placed["a"]] == ["0", "1", "0", "1"]

"""The allocator over time: its moments, its still picture, and the slider without a frontend."""

import html
import re
from dataclasses import replace as changed

import pytest
from fake_runs import TraceBuilder, training_trace
from fake_runs import traced_run as run_of
from ipywidgets import SelectionSlider

import labkit as lab
from labkit.memory import MIB, Category, InputError, Mark, Phase, Trace, format_bytes
from labkit.replays import replay
from labkit.show.allocation import FIRST_STEPS, GRID, segments
from labkit.show.picture import Picture
from labkit.show.segments import sums

KIND = pytest.mark.parametrize("expandable", [False, True])


def named(view):
    return {moment.name: moment for moment in view.story.moments if moment.named}


def text_of(widget):
    return html.unescape(re.sub("<[^>]*>", " ", widget.value))


@pytest.fixture
def failing():
    trace = training_trace(layer_bytes=20 * MIB)
    return segments(replay(trace, budget_bytes=trace.peak_bytes - 10 * MIB))


@KIND
def test_every_moment_has_the_segments_of_its_event(expandable):
    played = replay(training_trace(layer_bytes=3 * MIB), expandable_segments=expandable)
    for moment in segments(played).story.moments:
        found = sums(moment.segments)
        assert found.used_bytes == played.allocated_bytes[moment.position]
        assert found.reserved_bytes == played.reserved_bytes[moment.position]


def test_a_run_is_replayed_in_its_capacity():
    trace = training_trace()
    view = segments(run_of(trace=trace, capacity_bytes=400 * MIB))
    assert view.story.replay == replay(trace, budget_bytes=400 * MIB)
    assert view.story.title == "The allocator, event by event: training step"
    assert "tracked on CPU" in view.story.source
    assert segments(replay(trace), title="Mine").story.title == "Mine"
    other = segments(replay(trace, expandable_segments=True))
    assert "expandable segments" in other.story.source


def test_named_moments_are_the_steps_and_the_peak():
    trace = training_trace()
    view = segments(replay(trace))
    moments = named(view)
    assert list(moments) == ["before step 1", "end of step 1", "peak", "end of step 2"]
    first, second = trace.steps()
    assert moments["before step 1"].position == first[0] - 1
    assert moments["end of step 1"].position == second[0] - 1
    assert moments["end of step 2"].position == len(trace.events) - 1
    peak = view.story.replay.allocated_bytes[moments["peak"].position]
    assert peak == view.story.replay.peak_allocated_bytes
    assert [moment.name for moment in view.story.still()] == ["peak", "end of step 2"]
    positions = [moment.position for moment in view.story.moments]
    assert positions == sorted(set(positions))
    assert len(positions) <= GRID + len(moments)


def test_of_many_steps_only_some_ends_have_names():
    steps = FIRST_STEPS + 4
    ends = [name for name in named(segments(replay(training_trace(steps=steps))))
            if name.startswith("end")]  # fmt: skip
    assert ends == [f"end of step {n}" for n in (*range(1, FIRST_STEPS + 1), steps)]


def test_the_still_picture_of_a_failure_is_the_moment_before_it(failing):
    story = failing.story
    before, end = story.still()
    assert before.name == "before it runs out of memory"
    assert end.name == "end of step 2, had it fitted"
    failure = story.replay.failure
    assert sums(before.segments).used_bytes == failure.live_bytes
    assert sums(before.segments).reserved_bytes <= story.replay.budget_bytes
    event = story.replay.trace.events[story.replay.indices[before.position + 1]]
    assert event.change_bytes == failure.requested_bytes
    words = [text.get_text() for axes in failing.picture.axes for text in axes.texts]
    assert f"out of memory: asked for {format_bytes(failure.requested_bytes)}" in words
    assert f"budget {format_bytes(story.replay.budget_bytes)}" in words
    assert str(failure) in failing.picture.alt


def test_the_first_request_of_all_may_fail():
    trace = training_trace()
    view = segments(replay(trace, budget_bytes=1))
    before = view.story.still()[0]
    assert (before.position, before.segments) == (-1, [])
    assert "no segment" in [text.get_text() for axes in view.picture.axes for text in axes.texts]


def test_a_late_step_that_fails_has_a_name():
    log = TraceBuilder()
    for step in range(1, 9):
        log.mark(f"step {step}")
        log.free(log.hold((60 if step == 6 else 30) * MIB, Category.TEMPORARY, Phase.FORWARD),
                 Phase.FORWARD)  # fmt: skip
    view = segments(replay(log.trace(), budget_bytes=40 * MIB))
    assert [m.name for m in view.story.still()][1] == "end of step 6, had it fitted"


def test_a_trace_without_steps_and_one_with_a_single_event():
    trace = training_trace()
    view = segments(replay(Trace("cpu", trace.storages, trace.events)))
    assert list(named(view)) == ["peak", "end"]
    single = Trace("cpu", trace.storages[:1], trace.events[:1], (Mark(0, "step 1"),))
    view = segments(replay(single))
    assert [m.name for m in view.story.moments] == ["before step 1", "end of step 1, peak"]
    assert len(view.story.still()) == 1


def test_the_slider_draws_its_moment_and_takes_the_still_picture_away():
    view = segments(replay(training_trace()))
    assert isinstance(view.slider, SelectionSlider)
    assert view.slider.value == named(view)["peak"].position
    assert view.live.value == ""  # the still picture stands there
    for moment in view.story.moments:
        view.slider.value = moment.position
        found = sums(moment.segments)
        assert f"{moment.name}: {len(moment.segments)} segments" in html.unescape(view.live.value)
        assert f"{format_bytes(found.used_bytes)} used" in html.unescape(view.live.value)
    assert view.live.value.count("<img") == 1
    assert moment.name in text_of(view.live)


def test_every_button_goes_to_its_moment():
    view = segments(replay(training_trace()))
    moments = named(view)
    assert [button.description for button in view.buttons] == list(moments)
    peak = next(button for button in view.buttons if button.description == "peak")
    peak.click()  # the slider is there already
    assert "<img" in view.live.value
    for button in view.buttons:
        button.click()
        assert view.slider.value == moments[button.description].position
        assert f"{button.description}: " in html.unescape(view.live.value)


def test_the_table_has_the_sums_of_every_named_moment(failing):
    for moment in failing.story.moments:
        if moment.named:
            found = sums(moment.segments)
            row = next(line for line in failing.picture.table.text.splitlines()
                       if line.startswith(f"{moment.name}  "))  # fmt: skip
            for nbytes in found[:3]:
                assert format_bytes(nbytes) in row


def test_the_picture_is_shown_once_with_its_table(capsys):
    view = segments(replay(training_trace()))
    printed = capsys.readouterr().out
    assert printed.count("largest free block") == 1
    view._ipython_display_()
    assert capsys.readouterr().out == ""
    assert isinstance(view.picture, Picture)


@pytest.mark.parametrize("layers", [1, 6, 200])
def test_everything_stays_inside_the_figure(layers):
    trace = training_trace(layers=layers, layer_bytes=3 * MIB)
    view = segments(replay(trace, budget_bytes=trace.peak_bytes * 9 // 10))
    renderer = view.picture.canvas.get_renderer()
    for axes in view.picture.axes:
        left, right = axes.get_xlim()  # a label beyond is not drawn
        labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        for text in [*axes.texts, *(label for at, label in labels if left <= at <= right)]:
            box = text.get_window_extent(renderer)
            assert box.x0 >= 0
            assert box.x1 <= view.picture.bbox.x1 + 1
            assert 0 <= box.y0 < view.picture.bbox.y1


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(InputError, match="no trace"):
        segments(changed(run_of(), trace=None))
    with pytest.raises(InputError, match="a run or a replay, not Trace"):
        segments(training_trace())
    with pytest.raises(InputError, match="nothing was allocated"):
        segments(replay(Trace("cpu", (), ())))


def test_it_is_public():
    assert lab.segments is segments

"""The allocator over time: its moments, its static figure, and the slider without a frontend."""

import html

import pytest
from drawn import assert_fits, words
from fake_runs import training_trace

from labkit.allocator.replay import replay
from labkit.show.allocator_view import STOPS, allocator_view
from labkit.show.segment_map import sums, sums_row
from labkit.trace import Trace
from labkit.values import MIB, InputError, format_bytes


def positions(view):
    return [position for _, position in view.slider.options]


@pytest.mark.parametrize("expandable", [False, True])
def test_every_moment_has_the_segments_of_its_event(expandable):
    played = replay(training_trace(layer_bytes=3 * MIB), expandable_segments=expandable)
    view = allocator_view(played)
    assert positions(view) == sorted(set(positions(view)))
    assert len(positions(view)) <= STOPS + 1
    assert ("expandable segments" in words(view.picture)) is expandable
    for position in positions(view)[::6]:
        found = sums(view.segments_at(position))
        assert found["used"] == played.allocated_bytes[position]
        assert found["reserved"] == played.reserved_bytes[position]


def test_the_static_figure_of_a_failure_is_the_moment_before_it():
    trace = training_trace(layer_bytes=20 * MIB)
    view = allocator_view(replay(trace, budget_bytes=trace.peak_bytes - 10 * MIB))
    segments, failure = view.segments_at(view.moment), view.replay.failure
    assert sums(segments)["used"] == failure.live_bytes
    assert sums(segments)["reserved"] <= view.replay.budget_bytes
    event = view.replay.trace.events[view.replay.indices[view.moment + 1]]
    assert event.change_bytes == failure.requested_bytes
    shown = words(view.picture)
    assert "before it runs out of memory" in shown
    assert f"out of memory: asked for {format_bytes(failure.requested_bytes)}" in shown
    assert f"budget {format_bytes(view.replay.budget_bytes)}" in shown
    assert str(failure) in view.picture.alt
    for cell in sums_row("before it runs out of memory", segments):
        assert cell in view.picture.table.text


def test_the_first_request_of_all_may_fail():
    view = allocator_view(replay(training_trace(), budget_bytes=1))
    assert view.moment == -1
    assert "no segment" in words(view.picture)


def test_the_slider_draws_its_moment():
    view = allocator_view(replay(training_trace()))
    at = view.slider.value
    assert view.replay.allocated_bytes[at] == view.replay.peak_allocated_bytes
    assert view.live.value == ""  # the static figure is below
    for name, position in view.slider.options[::16]:
        view.slider.value = position
        assert name in html.unescape(view.live.value)
        for cell in sums_row("", view.segments_at(position))[1:]:
            assert f">{cell}</td>" in view.live.value
    assert view.live.value.count("<img") == 1


@pytest.mark.parametrize("layers", [1, 200])
def test_everything_stays_inside_the_figure(layers):
    trace = training_trace(layers=layers, layer_bytes=3 * MIB)
    assert_fits(allocator_view(replay(trace, budget_bytes=trace.peak_bytes * 9 // 10)).picture)
    assert_fits(allocator_view(replay(Trace("cpu", trace.storages, trace.events))).picture)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(InputError, match="nothing was allocated"):
        allocator_view(replay(Trace("cpu", (), ())))

"""Gantt charts: every second is work or idle, nothing is cut off, the table holds every number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import Rectangle
from test_plots import HOSTILE, assert_nothing_clipped, texts, words

import labkit as lab
from labkit.clock import Span
from labkit.memory import InputError
from labkit.show.gantt import gantt, idle_share


def gpipe(stages, pieces, forward=1.0, backward=2.0, late=0.0):
    """What the schedule would be without any cost of sending."""
    turn = late + (pieces + stages - 1) * forward
    return {
        f"stage {s}": [
            *(("forward", late + (s + i) * forward, late + (s + i + 1) * forward, str(i))
              for i in range(pieces)),
            *(("backward", turn + (stages - 1 - s + i) * backward,
               turn + (stages - s + i) * backward, str(i))
              for i in range(pieces)),
        ]
        for s in range(stages)
    }  # fmt: skip


def boxes(figure):
    """The rectangles drawn in the axes, as (left, width), those of idle time first."""
    (axes,) = figure.axes
    drawn = [p for p in axes.patches if isinstance(p, Rectangle)]
    idle = [(p.get_x(), p.get_width()) for p in drawn if p.get_zorder() == 2]
    return idle, [(p.get_x(), p.get_width()) for p in drawn if p.get_zorder() == 3]


@given(
    st.integers(1, 6), st.integers(1, 12), st.floats(0.01, 9), st.floats(0.01, 9), st.floats(0, 1e6)
)
def test_idle_share_of_gpipe_is_the_formula(stages, pieces, forward, backward, late):
    rows = gpipe(stages, pieces, forward, backward, late)
    assert idle_share(rows) == pytest.approx((stages - 1) / (pieces + stages - 1), abs=1e-6)


def test_time_covered_twice_counts_once():
    rows = {"a": [("forward", 0, 4), ("load", 1, 2), ("load", 3, 6)], "b": [("forward", 8, 10)]}
    assert idle_share(rows) == pytest.approx(1 - (6 + 2) / 20)


def test_a_device_that_never_worked_is_all_idle():
    assert idle_share({"a": [Span("forward", 2.0, 3.0)], "b": []}) == 0.5
    figure = gantt({"": {"a": [Span("forward", 2.0, 3.0)], "b": []}})
    assert "100% idle" in words(figure)
    assert figure.table.text.splitlines()[-1].split() == ["b", "0", "1", "s", "100%", "1", "s"]


def test_charts_begin_at_zero_and_share_one_scale():
    charts = {"slow": gpipe(2, 1, late=1e5), "quick": gpipe(2, 4, 0.25, 0.5)}
    figure = gantt(charts, source="measured")
    idle, work = boxes(figure)
    assert idle == [(0, pytest.approx(6))] * 2 + [(0, pytest.approx(3.75))] * 2
    assert len(work) == 2 * 2 + 2 * 8
    assert min(left for left, _ in work) == 0
    assert figure.axes[0].get_xlim() == (0, pytest.approx(6))
    assert_nothing_clipped(figure)
    shown = words(figure)
    for word in ("slow", "quick", "stage 1", "forward", "backward", "50% idle", "20% idle"):
        assert word in shown


def test_the_table_and_the_text_hold_the_numbers():
    figure = lab.gantt({"naive": gpipe(2, 1)}, title="Who works?", source="by hand")
    assert "naive: stage 0" in figure.table.text
    assert figure.table.text.splitlines()[-1].split()[3:] == [
        *("1", "s", "2", "s", "3", "s", "50%", "6", "s"),
    ]
    assert "Who works?, by hand" in figure.alt
    assert "stage 1 idle 50%" in figure.alt


@pytest.mark.parametrize(
    ("seconds", "unit"), [(300.0, "time (s)"), (0.25, "time (ms)"), (4e-5, "time (µs)")]
)
def test_the_unit_of_time_suits_the_longest_chart(seconds, unit):
    figure = gantt({"": {"gpu": [("forward", 5.0, 5.0 + seconds)]}})
    assert unit in words(figure)
    assert_nothing_clipped(figure)


def test_a_number_is_written_only_where_its_span_has_room():
    spans = [("forward", 0, 1, "first"), ("forward", 1, 1.001, "second"), ("forward", 2, 9, "last")]
    shown = [text.get_text() for text in texts(gantt({"": {"gpu": spans}}))]
    assert "first" in shown
    assert "last" in shown
    assert "second" not in shown


@pytest.mark.filterwarnings("ignore:Glyph")
@settings(max_examples=15)
@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60), st.floats(1e-7, 1e4))
def test_any_names_and_times_are_drawn(chart, row, kind, seconds):
    figure = gantt({chart: {row: [(kind, 0.0, seconds, chart)]}}, title=HOSTILE, source=HOSTILE)
    assert_nothing_clipped(figure)
    assert "<script>" not in figure.rich().html


@pytest.mark.parametrize(
    ("charts", "says"),
    [
        ({}, "nothing to draw"),
        ({"a": {}}, "nothing ran"),
        ({"a": {"gpu": []}}, "nothing ran"),
        ({"a": [("forward", 0, 1)]}, "needs its rows"),
        ({"a": {"gpu": [("forward", 0)]}}, "a span is"),
        ({"a": {"gpu": ["forward"]}}, "a span is"),
        ({"a": {"gpu": [("forward", 0, None)]}}, "in seconds"),
        ({"a": {"gpu": [("forward", 0, float("nan"))]}}, "in seconds"),
        ({"a": {"gpu": [("forward", 2, 1)]}}, "ends before it begins"),
        ({"a": {"gpu": [("forward", 1, 1)]}}, "take no time"),
    ],
)
def test_what_cannot_be_drawn_is_refused(charts, says):
    with pytest.raises(InputError, match=says):
        gantt(charts)

"""The scatter of names: nothing overlaps, nothing is cut off, the table holds every number."""

import math
import random
from itertools import combinations

import pytest
from matplotlib.transforms import Bbox
from test_plots import HOSTILE, assert_nothing_clipped, texts, words

from labkit.memory import GIB, MIB, InputError
from labkit.show.dots import dots

OPTIMIZERS = {
    "AdamW": (3.1 * GIB, 2.31),
    "SGD": (2.1 * GIB, 3.4),
    "SGD, momentum": (2.6 * GIB, 2.9),
    "Adafactor": (2.12 * GIB, 2.36),
    "AdamW in backward": (2.9 * GIB, 2.311),
    "8-bit AdamW": (2.13 * GIB, 2.35),
}


def names_of(figure, points):
    """The drawn text of each name, with its box in pixels."""
    renderer = figure.canvas.get_renderer()
    drawn = {text.get_text(): text.get_window_extent(renderer) for text in texts(figure)}
    return {name: drawn[name] for name in points}


def dots_of(figure):
    """The middle of each dot in pixels, in the order drawn."""
    (axes,) = figure.axes
    return [tuple(axes.transData.transform(line.get_xydata()[0])) for line in axes.lines]


def assert_names_are_free(figure, points):
    boxes = names_of(figure, points)
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        assert Bbox.intersection(a, b) is None, f"{one} covers {other}"
    for x, y in dots_of(figure):
        for name, box in boxes.items():
            assert not box.contains(x, y), f"{name} covers a dot"


def test_names_cover_neither_each_other_nor_dots():
    figure = dots(OPTIMIZERS, "peak memory", "last loss", source="simulated")
    assert_nothing_clipped(figure)
    assert_names_are_free(figure, OPTIMIZERS)
    assert len(dots_of(figure)) == len(OPTIMIZERS)


def test_each_name_stands_nearest_to_its_own_dot_where_there_is_room():
    points = {name: (float(i), float(i)) for i, name in enumerate("abcd")}
    figure = dots(points, "x", "y", write_x=str, write_y=str)
    middles = dict(zip(points, dots_of(figure), strict=True))
    for name, box in names_of(figure, points).items():
        middle = ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)
        assert min(middles, key=lambda other: math.dist(middle, middles[other])) == name
        assert math.dist(middle, middles[name]) < 30


@pytest.mark.parametrize("seed", range(3))
def test_a_crowd_of_twenty_still_has_free_names(seed):
    chance = random.Random(seed)
    points = {f"number {i}": (chance.gauss(3, 0.2) * GIB, chance.gauss(2, 0.01)) for i in range(20)}
    figure = dots(points, "peak", "loss")
    assert_nothing_clipped(figure)
    assert_names_are_free(figure, points)


def test_equal_dots_get_different_places_and_a_line_leads_to_the_far_ones():
    points = {f"the same {i}": (GIB, 2.0) for i in range(12)}
    figure = dots(points, "peak", "loss")
    assert_names_are_free(figure, points)
    arrows = [t for t in figure.axes[0].texts if getattr(t, "arrow_patch", None)]
    assert arrows
    assert len(arrows) < len(points)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_what_could_not_be_had_is_a_dash_in_the_table_only(bad):
    figure = dots({"here": (GIB, 2.0), "gone": (2 * GIB, bad), "lost": (bad, 1.0)}, "peak", "loss")
    assert len(dots_of(figure)) == 1
    assert "gone" not in words(figure)
    assert "gone" not in figure.alt
    assert "lost" in figure.table.text
    assert "2.00 GiB" in figure.table.text


def test_table_and_alt_hold_the_numbers():
    figure = dots(OPTIMIZERS, "peak memory", "last loss", title="A title", source="simulated")
    for text in ("AdamW in backward", "2.90 GiB", "2.31", "peak memory", "last loss"):
        assert text in figure.table.text
    for text in ("A title", "simulated", "8-bit AdamW", "2.13 GiB", "2.35"):
        assert text in figure.alt


def test_default_title_and_own_writers():
    figure = dots(
        {"a": (0.25, 3.0)}, "share", "loss", write_x="{:.0%}".format, write_y="{:.1f} nats".format
    )
    assert "Loss against share" in words(figure)
    assert "25%" in figure.table.text
    assert "3.0 nats" in figure.table.text


def ticks(figure, axis):
    low, high = axis.get_view_interval()
    return [
        tick.label1.get_text() for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high
    ]


def test_axes_begin_at_zero_only_where_that_wastes_less_than_half():
    figure = dots({"a": (100 * MIB, 2.0), "b": (1000 * MIB, 2.1)}, "peak", "loss")
    (axes,) = figure.axes
    assert axes.get_xlim()[0] == 0
    assert axes.get_ylim()[0] > 1.9


@pytest.mark.parametrize("spread", [1e-4, 1e-2, 1, 1e3])
def test_ticks_are_never_written_alike(spread):
    points = {"a": (2.0 * GIB, 2.0), "b": (2.0 * GIB * (1 + spread), 2.0 + spread)}
    figure = dots(points, "peak", "loss")
    texts(figure)  # draws, which names the ticks
    (axes,) = figure.axes
    for axis in (axes.xaxis, axes.yaxis):
        shown = ticks(figure, axis)
        assert len(shown) == len(set(shown))


def test_one_dot_zeros_and_negatives_draw():
    for points in ({"one": (5.0, 7.0)}, {"zero": (0, 0)}, {"a": (-3, 2.0), "b": (-1, -2)}):
        assert_nothing_clipped(dots(points, "x", "y"))


def test_hostile_names_stay_text():
    figure = dots({HOSTILE: (GIB, 1.0)}, HOSTILE, HOSTILE, title=HOSTILE, source=HOSTILE)
    assert "<script>" not in figure.rich().html
    assert_nothing_clipped(figure)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ({}, "no dots"),
        ({"a": (None, 1.0)}, "no dots"),
        ({"a": 3.0}, "pair"),
        ({"a": "xy"}, "pair"),
        ({"a": (1, 2, 3)}, "pair"),
        ({"a": ("1", 2)}, "numbers"),
    ],
)
def test_bad_points(points, says):
    with pytest.raises(InputError, match=says):
        dots(points, "x", "y")


def test_peaks_that_nearly_agree_are_drawn_with_a_few_ticks():
    near = {"a": (10 * GIB, 1.0), "b": (10 * GIB + (64 << 10), 2.0), "c": (10 * GIB + 1, 3.0)}
    figure = dots(near, "peak", "loss")
    assert len(figure.axes[0].get_xticks()) < 12

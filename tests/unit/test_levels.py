"""Number lines: every level drawn and counted, and what rounding to the nearest one costs."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_plots import HOSTILE, Reader, assert_nothing_clipped, words

from labkit.memory import InputError
from labkit.show.levels import levels, rounding_errors

finite = st.floats(-1e30, 1e30).filter(lambda x: x == 0 or abs(x) > 1e-30)


def ticks(figure, row=0):
    """Where the ticks of one number line are."""
    lines = figure.axes[-1].collections[row]
    return [segment[0][0] for segment in lines.get_segments()]


def rows(figure):
    cells = Reader(figure.table.html).cells
    caption, cells = cells[0], cells[1:]
    headings = 1 + len(Reader(figure.table.html).named("th"))  # the first is an empty cell
    width = headings - len(figure.axes[-1].collections)
    return caption, [tuple(cells[i : i + width]) for i in range(0, len(cells), width)]


def test_every_level_has_its_tick_and_the_table_counts_them():
    figure = levels({"a": [1, -1, 0.5, 1], "b": torch.tensor([[0.0], [2.0]])})
    assert ticks(figure, 0) == [-1, 0.5, 1]
    assert ticks(figure, 1) == [0, 2]
    caption, (head, first, second) = rows(figure)
    assert caption == "Levels of a, b."
    assert head == ("", "levels", "smallest", "largest")
    assert first == ("a", "3", "-1", "1")
    assert second == ("b", "2", "0", "2")


@pytest.mark.parametrize(("dtype", "between"), [(torch.float16, 1024), (torch.bfloat16, 128)])
def test_a_format_that_numpy_may_not_know(dtype, between):
    codes = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    figure = levels({"x": codes[(codes >= 1) & (codes < 2)]})
    assert rows(figure)[1][1] == ("x", f"{between:,}", "1", f"{2 - 1 / between:.6g}")


def test_levels_closer_than_a_pixel_are_a_band_and_all_counted():
    figure = levels({"dense": np.linspace(0, 1, 100_000), "ends": [0, 1]})
    places = np.diff(ticks(figure))
    assert len(places) < 1_100
    assert places.max() < 1 / 900  # no gap where there are levels
    assert rows(figure)[1][1][1] == "100,000"


def test_a_logarithmic_axis_shows_what_lies_above_zero():
    figure = levels({"a": [-8, 0, 1e-30, 1e30]}, values=[0, -1, 1e-3], log=True)
    assert ticks(figure) == [1e-30, 1e30]
    head, row = rows(figure)[1]
    assert head[2] == "smallest above zero"
    assert row[:4] == ("a", "4", "1e-30", "1e+30")
    assert "10⁻²⁰" in words(figure)
    assert " 1 " in words(figure)
    (bars,) = [axes for axes in figure.axes if axes.patches]
    assert sum(bar.get_height() for bar in bars.patches) == 1


def test_the_histogram_holds_every_value():
    figure = levels({"a": [0, 1]}, values=torch.linspace(-3, 5, 400, dtype=torch.bfloat16))
    bars = figure.axes[0].patches
    assert sum(bar.get_height() for bar in bars) == 400
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert "400 values" in figure.alt


def test_rounding_errors_by_hand():
    # 0.4 -> 0, 0.9 -> 1, 5 -> 1: the errors are 0.4, 0.1 and 4
    norm, single = rounding_errors(np.array([0.0, 1.0]), np.array([0.4, 0.9, 5.0, 0.0]))
    assert norm == pytest.approx((0.16 + 0.01 + 16) ** 0.5 / (0.16 + 0.81 + 25) ** 0.5)
    assert single == pytest.approx(0.8)
    figure = levels({"a": [0, 1]}, values=[0.4, 0.9, 5.0, 0.0])
    assert rows(figure)[1][1][4:] == (f"{100 * norm:.3g} %", "80 %")


@given(st.lists(finite, min_size=1, max_size=9), st.lists(finite, min_size=1, max_size=9))
@example([0.0], [0.0])
@settings(max_examples=60)
def test_no_level_is_nearer_than_the_one_rounded_to(line, values):
    line, values = np.unique(line), np.array(values)
    errors = np.abs(values[:, None] - line[None, :]).min(axis=1)
    norm, single = rounding_errors(line, values)
    if not values.any():
        assert (norm, single) == (None, None)
        return
    assert norm == pytest.approx(np.linalg.norm(errors) / np.linalg.norm(values))
    some = values != 0
    assert single == pytest.approx(np.median(errors[some] / np.abs(values[some])))


def test_values_that_are_all_zero_have_no_relative_error():
    assert rows(levels({"a": [1]}, values=[0, 0]))[1][1][4:] == ("–", "–")


@pytest.mark.parametrize(
    "arguments",
    [
        {"levels": {HOSTILE * 4: [1]}, "title": HOSTILE * 9, "source": HOSTILE * 9},
        {"levels": {"one": [0]}, "values": [0.0]},
        {"levels": {"one": [7]}, "log": True},
        {"levels": {str(i): [i, i + 1] for i in range(1, 9)}, "x_label": "x" * 200, "log": True},
        {"levels": {"far apart": [1e-100, 1e100]}, "values": [1.0], "log": True},
    ],
    ids=["hostile", "one", "one on a logarithm", "eight", "far apart"],
)
def test_awkward_lines_fit_their_figure(arguments):
    figure = levels(**arguments)
    assert_nothing_clipped(figure)
    assert "<script>" not in figure.rich().html
    for name in arguments["levels"]:
        assert name.split("\n")[0] in figure.alt


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"levels": {}}, "no levels to draw"),
        ({"levels": {"a": []}}, "'a' is empty"),
        ({"levels": {"a": [1, float("nan")]}}, "'a' holds numbers that are not finite"),
        ({"levels": {"a": torch.tensor([float("inf")])}}, "not finite"),
        ({"levels": {"a": ["x"]}}, "'a' must be numbers"),
        ({"levels": {"a": 3}}, "'a' must be numbers, not int"),
        ({"levels": {"a": [1]}, "values": []}, "'values' is empty"),
        ({"levels": {"a": [-1, 0]}, "log": True}, "no level above zero"),
    ],
)
def test_bad_input_is_named(arguments, says):
    with pytest.raises(InputError, match=says):
        levels(**arguments)

"""Bars made of parts: the table's numbers, and what cannot be drawn."""

import math

import pytest

import labkit as lab
from labkit.memory import InputError

BARS = {"in memory": {"device": 3 << 30}, "on disk": {"device": 1 << 30, "disk": 2 << 30}}


def test_the_table_has_every_number_and_each_bar_its_own():
    picture = lab.parts(BARS, title="Bytes by place", source="made up")
    text = picture.table.text
    rows = [line.split("  ") for line in text.splitlines()]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert cells["in memory"] == ["3.00 GiB", "–", "3.00 GiB"]
    assert cells["on disk"] == ["1.00 GiB", "2.00 GiB", "3.00 GiB"]
    assert "Bytes by place; made up." in text
    assert "on disk 3.00 GiB" in picture.alt
    assert "device, disk" in picture.alt


def test_bars_are_as_long_as_their_parts():
    picture = lab.parts(BARS, title="Bytes by place")
    widths = sorted(bar.get_width() for bar in picture.axes[0].patches if bar.get_width())
    assert widths == [1 << 30, 2 << 30, 3 << 30]


def test_seconds():
    picture = lab.parts(
        {"a": {"forward": 0.5, "step": 1.0}}, title="Seconds", write=lab.write_seconds
    )
    assert "500 ms" in picture.table.text
    assert "1.5 s" in picture.table.text
    assert lab.write_seconds(0) == "0 s"


def test_nothing_but_zeros_is_drawn():
    assert "0 B" in lab.parts({"a": {"device": 0}}, title="Nothing").table.text


@pytest.mark.parametrize(
    ("bars", "says"),
    [
        ({}, "nothing to draw"),
        ({"a": {}}, "nothing to draw"),
        ({"a": {str(i): 1 for i in range(7)}}, "at most 6 parts"),
        ({"a": {"device": -1}}, "not negative"),
        ({"a": {"device": math.nan}}, "finite"),
        ({"a": {"device": "1 GiB"}}, "must be a number"),
        ({"a": {"device": True}}, "must be a number"),
    ],
)
def test_what_cannot_be_drawn(bars, says):
    with pytest.raises(InputError, match=says):
        lab.parts(bars, title="x")

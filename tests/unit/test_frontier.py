"""The frontier's figure: what is drawn is what was advised, and its numbers can be read."""

import re
from itertools import combinations

import pytest
from matplotlib.text import Annotation

import labkit as lab
from labkit.advice import Advice
from labkit.memory import GIB, InputError
from labkit.recipe_search import Option
from labkit.recipes import Recipe
from labkit.show.frontier import draw_frontier, frontier


def option(batch_size, gib, seconds, *, group="same", fits=True, **fields):
    changes = ("something else",) if group == "changed" else ()
    return Option(
        recipe=Recipe(batch_size=batch_size, **fields), group=group, changes=changes, costs=(),
        needed_bytes=round(gib * GIB), host_bytes=0, fits=fits, flops=1, moved_bytes=1,
        link_bytes=0, seconds_per_token=seconds / 1000,
    )  # fmt: skip


def advice(options, **changes):
    return Advice(**{
        "model": "Llama-3.2-1B", "gpu": "rtx-4090", "gpus": 1, "seq_len": 1024, "only": None,
        "margin": 0.05, "capacity_bytes": 23 * GIB, "ruled_out": 3, "refused": (),
        "options": tuple(sorted(options, key=Option.rank)), "larger_gpu": None, "seconds": 1.0,
        "source": "Llama-3.2-1B", **changes,
    })  # fmt: skip


MIXED = [
    option(1, 8, 0.5), option(2, 12, 0.4), option(4, 20, 0.3), option(8, 21, 0.35),
    option(16, 40, 0.2, fits=False),
    option(1, 4, 0.6, group="changed", precision="bf16"),
    option(2, 6, 0.2, group="changed", precision="bf16"),
    option(4, 9, 0.3, group="changed", precision="bf16"),
]  # fmt: skip
CROWDED = [option(n, 10 + 0.02 * n, 0.5 - 0.002 * n) for n in range(1, 9)] + [
    option(n, 10 + 0.02 * n, 0.49 - 0.002 * n, group="changed", precision="bf16")
    for n in range(1, 9)
]


def numbers(figure):
    """The texts that number the frontier, with their place in pixels."""
    figure.canvas.draw()
    return {
        text.get_text(): text.get_window_extent()
        for text in figure.axes[0].texts
        if isinstance(text, Annotation) and re.fullmatch(r"\d+", text.get_text())
    }


@pytest.mark.parametrize("options", [MIXED, CROWDED, MIXED[:1], MIXED[5:6]])
def test_every_number_is_there_and_none_overlaps(options):
    given = advice(options)
    figure = draw_frontier(given)
    found = numbers(figure)
    assert list(found) == [str(i + 1) for i in range(len(given.frontier))]
    for a, b in combinations(found.values(), 2):
        assert not a.overlaps(b)
    frame = figure.axes[0].get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in found.values())
    assert all(frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in found.values())


def test_a_number_lies_on_no_dot():
    figure = draw_frontier(advice(MIXED))
    axes = figure.axes[0]
    dots = [axes.transData.transform((o.needed_bytes, 1000 * o.seconds_per_token)) for o in MIXED]
    for box in numbers(figure).values():
        assert not any(box.contains(x, y) for x, y in dots)


def test_all_recipes_are_drawn_and_each_groups_frontier_is_joined():
    figure = draw_frontier(advice(MIXED))
    drawn = [line for line in figure.axes[0].lines if line.get_marker() in ("o", "D")]
    hollow = [line for line in drawn if line.get_linestyle() == "None"]
    joined = [line for line in drawn if line.get_linestyle() != "None"]
    assert sorted(len(line.get_xdata()) for line in hollow) == [3, 5]
    points = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in joined]
    assert points[0] == [(g * GIB, pytest.approx(s)) for g, s in ((8, 0.5), (12, 0.4), (20, 0.3))]
    assert points[1] == [(g * GIB, pytest.approx(s)) for g, s in ((4, 0.6), (6, 0.2))]
    assert joined[0].get_color() != joined[1].get_color()
    assert joined[0].get_marker() != joined[1].get_marker()


def test_budget_with_and_without_the_margin():
    given = advice(MIXED)
    figure = draw_frontier(given)
    upright = {
        line.get_xdata()[0] for line in figure.axes[0].lines
        if len(line.get_xdata()) == 2 and line.get_xdata()[0] == line.get_xdata()[1]
    }  # fmt: skip
    assert upright == {given.room_bytes, given.capacity_bytes}
    words = [text.get_text() for text in figure.axes[0].texts]
    assert f"{lab.format_bytes(given.room_bytes)} with a margin of 5%, 23.0 GiB without" in words


def test_table_and_alternative_text_hold_the_same():
    given = advice(MIXED, gpus=2)
    figure = draw_frontier(given)
    rows = figure.table.text.splitlines()
    assert len(rows) == 3 + len(MIXED)
    assert "Bounds, not times" in rows[0]
    for number, best in enumerate(given.frontier, start=1):
        row = next(row for row in rows[3:] if row.split()[0] == str(number))
        assert lab.format_bytes(best.needed_bytes) in row
        assert str(best.recipe) in row
        assert f"{number}: {best.recipe}, {lab.format_bytes(best.needed_bytes)}" in figure.alt
    assert sum(" no " in row for row in rows) == 1
    assert "2 × NVIDIA GeForce RTX 4090" in figure.alt
    assert "7 of 8 recipes fit" in figure.alt


def test_nothing_fits():
    figure = draw_frontier(advice([option(1, 40, 0.5, fits=False), option(2, 60, 0.5, fits=False)]))
    assert numbers(figure) == {}
    assert "0 of 2 recipes fit" in figure.alt
    assert "On the frontier" not in figure.alt


def test_only_advice_is_drawn():
    with pytest.raises(InputError, match=r"what lab\.advise returns, not list"):
        frontier([])

"""The map of segments: what is used, cached and stranded, drawn and in the table."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.allocator import CachingAllocator
from labkit.memory import MIB, InputError
from labkit.show.segments import (
    LOOKS,
    MOST_ROWS,
    STRANDED,
    USED,
    layout_of,
    pieces,
    segment_map,
    sums,
)


def segment(*blocks):
    """Blocks in MiB; a negative one is free."""
    return {
        "blocks": [
            {"size": abs(n) * MIB, "state": "active_allocated" if n > 0 else "inactive"}
            for n in blocks
        ]
    }


def test_free_blocks_are_cached_or_stranded_by_their_neighbours():
    found = sums([segment(4, -16), segment(-20), segment(4, 4, -4, 8)])
    assert found.used_bytes == 20 * MIB
    assert found.cached_bytes == 20 * MIB
    assert found.stranded_bytes == 20 * MIB
    assert found.reserved_bytes == 60 * MIB
    assert found.largest_free_bytes == 20 * MIB


def test_a_block_that_waits_for_its_stream_holds_its_segment():
    waiting = {"blocks": [{"size": 4, "state": "active_pending_free"}]}
    waiting["blocks"].append({"size": 16, "state": "inactive"})
    assert sums([waiting]).stranded_bytes == 16


def test_the_table_and_the_alternative_text_hold_the_numbers():
    figure = segment_map({"before": [segment(4, -16)], "after": []}, title="T", source="a toy")
    assert "16.0 MiB" in figure.table.text
    assert "a toy" in figure.table.text
    assert "before: 1 segments, 4.00 MiB used, 0 B cached, 16.0 MiB stranded" in figure.alt
    assert len(figure.axes) == 2
    assert "no segment" in [text.get_text() for text in figure.axes[1].texts]


@pytest.mark.parametrize("panels", [1, 2, 3, 4, 7])
def test_panels_and_their_names_stay_inside_the_figure(panels):
    figure = segment_map({f"moment {i}": [segment(4, -16)] * (i + 1) for i in range(panels)})
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        for text in [*axes.texts, *axes.get_xticklabels()]:
            box = text.get_window_extent(renderer)
            assert box.x0 >= 0
            assert box.x1 <= figure.bbox.x1 + 1
            assert box.y0 >= 0


def test_a_few_segments_have_a_row_each():
    maps = [[segment(4, -16), segment(30)], [segment(-20)]]
    layout = layout_of(maps)
    assert layout == (2, 30 * MIB, False)
    assert [(p.kind, p.row, p.start // MIB, p.nbytes // MIB) for p in pieces(maps[0], layout)] == [
        (None, 0, 0, 20), (USED, 0, 0, 4), (STRANDED, 0, 4, 16), (None, 1, 0, 30), (USED, 1, 0, 30),
    ]  # fmt: skip


def test_many_segments_follow_each_other_from_row_to_row():
    layout = layout_of([[segment(10)] * 25])
    assert layout == (21, 12 * MIB, True)
    second = [p for p in pieces([segment(10), segment(10)], layout) if p.kind == USED][1:]
    assert [(p.row, p.start // MIB, p.nbytes // MIB) for p in second] == [(0, 10, 2), (1, 0, 8)]
    assert layout_of([[segment(*[1] * 48)]]).page is False
    assert layout_of([[segment(*[1] * 49)]]).page is True
    assert layout_of([[], []]) == (1, 1, False)


@given(
    st.lists(st.lists(st.integers(-300, 300).filter(bool), min_size=1, max_size=60), max_size=90)
)
def test_nothing_is_lost_and_nothing_lies_outside_the_page(sizes):
    segments = [segment(*blocks) for blocks in sizes]
    layout = layout_of([segments])
    assert layout.rows <= MOST_ROWS
    drawn = pieces(segments, layout)
    for p in drawn:
        assert 0 <= p.row < layout.rows
        assert 0 < p.nbytes <= layout.row_bytes - p.start
    found = sums(segments)
    totals = {kind: sum(p.nbytes for p in drawn if p.kind == kind) for kind in (*LOOKS, None)}
    assert totals == dict(zip((*LOOKS, None), (*found[:3], found.reserved_bytes), strict=True))


def test_many_segments_are_all_drawn_and_the_figure_says_to_which_scale():
    figure = segment_map({"all": [segment(1)] * 100}, source="a toy")
    assert "100" in figure.table.text
    assert "a toy; one row is 6 MiB" in [text.get_text() for text in figure.texts]
    paths = [path for drawn in figure.axes[0].collections for path in drawn.get_paths()]
    assert {round(path.vertices[:, 1].mean()) for path in paths} == set(range(17))


@pytest.mark.parametrize("expandable", [False, True])
@given(st.data())
def test_cached_is_what_empty_cache_returns(expandable, data):
    allocator = CachingAllocator(expandable_segments=expandable)
    sizes = st.sampled_from([1000, 300_000, MIB, 3 * MIB, 9 * MIB, 25 * MIB, 70 * MIB])
    handles = [allocator.allocate(n) for n in data.draw(st.lists(sizes, max_size=40))]
    for handle, gone in zip(handles, data.draw(st.lists(st.booleans(), max_size=40)), strict=False):
        if gone:
            allocator.free(handle)
    before = sums(allocator.segments())
    assert before.used_bytes == allocator.allocated_bytes
    assert before.reserved_bytes == allocator.reserved_bytes
    allocator.empty_cache()
    after = sums(allocator.segments())
    assert before.reserved_bytes - allocator.reserved_bytes == before.cached_bytes
    assert (after.cached_bytes, after.stranded_bytes) == (0, before.stranded_bytes)


@pytest.mark.parametrize(
    ("maps", "says"),
    [
        ({}, "no map"),
        ({"a": [{"total_size": 3}]}, "'blocks'"),
        ({"a": [[(4, True)]]}, "'blocks'"),
        ({"a": [{"blocks": [{"size": 0, "state": "inactive"}]}]}, "not 0"),
        ({"a": [{"blocks": [{"size": "4", "state": "inactive"}]}]}, "not '4'"),
    ],
)
def test_what_is_no_map_is_refused(maps, says):
    with pytest.raises(InputError, match=says):
        segment_map(maps)

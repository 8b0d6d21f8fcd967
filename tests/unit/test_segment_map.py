"""The map of segments: what is used, cached and stranded, drawn and in the table."""

from collections import Counter

import matplotlib as mpl
import pytest
from drawn import assert_fits
from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem.allocator.caching import CachingAllocator
from gpumem.figures.segment_map import MOST_ROWS, layout_of, segment_map, sums
from gpumem.inputs import InputError
from gpumem.units import MIB


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
    assert [nbytes // MIB for nbytes in found.values()] == [20, 20, 20, 60, 20]


def test_a_block_that_waits_for_its_stream_holds_its_segment():
    waiting = {"blocks": [{"size": 4, "state": "active_pending_free"}]}
    waiting["blocks"].append({"size": 16, "state": "inactive"})
    assert sums([waiting])["stranded"] == 16


def test_the_table_and_the_alternative_text_hold_the_numbers():
    figure = segment_map({"before": [segment(4, -16)], "after": []}, title="T", source="a toy")
    assert "16.0 MiB" in figure.table.text
    assert "a toy" in figure.table.text
    assert "before: segments 1, used 4.00 MiB, cached 0 B, stranded 16.0 MiB" in figure.alt
    assert len(figure.axes) == 2
    assert "no segment" in [text.get_text() for text in figure.axes[1].texts]


@pytest.mark.parametrize("panels", [1, 2, 3, 7])
def test_panels_and_their_names_stay_inside_the_figure(panels):
    assert_fits(segment_map({f"moment {i}": [segment(4, -16)] * (i + 1) for i in range(panels)}))


def test_a_row_is_a_segment_where_that_gives_few_rows():
    assert layout_of([[segment(4, -16), segment(20)], [segment(-20)]]) == (2, 20 * MIB)
    assert layout_of([[segment(10)] * 25]) == (13, 20 * MIB)
    assert layout_of([[segment(*[1] * 48)]]) == (1, 48 * MIB)
    assert layout_of([[segment(*[1] * 49)]]) == (13, 4 * MIB)
    assert layout_of([[], []]) == (1, 1)


@given(
    st.lists(st.lists(st.integers(-300, 300).filter(bool), min_size=1, max_size=60), max_size=40)
)
@settings(max_examples=10)
def test_every_byte_is_drawn_once(sizes):
    segments = [segment(*blocks) for blocks in sizes]
    (rows, row_bytes), figure = layout_of([segments]), segment_map({"all": segments})
    assert rows <= MOST_ROWS
    widths = Counter()
    filled = [each for each in figure.axes[0].collections if len(each.get_facecolor())]
    for drawn in filled:
        for path in drawn.get_paths():
            box = path.get_extents()
            visible = min(box.x1, row_bytes) - max(box.x0, 0)
            widths[mpl.colors.to_hex(drawn.get_facecolor()[0])] += visible
    found = sums(segments)
    expected = {
        "#0072b2": found["used"],
        "#dadada": found["cached"],
        "#e69f00": found["stranded"],
    }
    for colour, nbytes in expected.items():
        assert widths[colour] == pytest.approx(nbytes)


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
    assert before["used"] == allocator.allocated_bytes
    assert before["reserved"] == allocator.reserved_bytes
    allocator.empty_cache()
    after = sums(allocator.segments())
    assert before["reserved"] - allocator.reserved_bytes == before["cached"]
    assert (after["cached"], after["stranded"]) == (0, before["stranded"])


def test_no_map_is_refused():
    with pytest.raises(InputError, match="no map"):
        segment_map({})

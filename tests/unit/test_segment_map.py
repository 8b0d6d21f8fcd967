"""The map of segments: what is used, cached and stranded, drawn and in the table."""

import pytest

from labkit.memory import MIB, InputError
from labkit.show.segments import MOST_DRAWN, segment_map, sums


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


def test_many_segments_are_drawn_in_part_and_counted_in_full():
    figure = segment_map({"all": [segment(1)] * 100})
    assert "400" not in figure.table.text
    assert "100" in figure.table.text
    assert f"+ {100 - MOST_DRAWN} smaller" in [t.get_text() for t in figure.axes[0].texts]


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

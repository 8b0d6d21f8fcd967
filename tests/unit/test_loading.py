"""What lesson 21 compares workers and pinning with, and how it counts what reading a file holds."""

import numpy as np
import pytest

from gpumem.inputs import InputError
from labkit import loading
from labkit.loading import PAGE, TOKENS, Pages, most_held, split_words, step_ends, switch_speeds


@pytest.fixture
def short_epochs(monkeypatch):
    monkeypatch.setattr(loading, "BATCHES", 4)
    monkeypatch.setattr(loading, "SLOW_BATCH", 2)
    monkeypatch.setattr(loading, "SLOW_SECONDS", 0.3)
    monkeypatch.setattr(loading, "TIMED", 1)


def test_a_page_becomes_a_row_of_word_lengths():
    assert split_words("ab, c").tolist() == [2, 1, 1, 1]
    assert split_words("a " * PAGE).shape == (TOKENS,)
    pages = Pages("split")
    assert {pages[number].shape for number in (0, len(pages) - 1)} == {(TOKENS,)}


def test_rows_have_three_kinds():
    with pytest.raises(InputError, match="stored"):
        Pages("sorted")


def test_one_slow_row_holds_up_the_step_of_its_batch(short_epochs):
    ends = step_ends("one slow", "cpu", step_seconds=0.001)
    gaps = np.diff([0, *ends])
    assert len(ends) == 4
    assert np.argmax(gaps) == 2
    assert gaps[2] >= 0.3


def test_batches_asked_for_in_advance_hide_the_slow_row(short_epochs):
    two = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
    ends = step_ends("one slow", "cpu", step_seconds=0.2, **two)
    # Asked for before the first step, its batch is ready after the 0.4 s of two steps. Without
    # workers its step would take 0.2 s and the row's 0.3.
    assert max(np.diff(ends)) < 0.45


def test_switches_have_speeds_above_zero_and_pinning_needs_a_gpu(short_epochs):
    speeds = switch_speeds("cpu")
    assert list(speeds) == ["workers", "persistent workers"]
    assert min(speeds.values()) > 0


def test_a_stream_of_rows_holds_one_row_and_a_list_all():
    rows = (np.ones(1 << 16, np.uint8) for _ in range(64))
    assert most_held(rows) < 1 << 19
    assert most_held([*map(np.ones, [1 << 16] * 8)]) < 1 << 19  # made before the counting began

"""What lesson 21 compares workers, pinning and streaming with."""

import numpy as np

from labkit.loading import PAGE, TOKENS, most_held_bytes, rows_per_second, split_words


def test_pages_become_rows_of_word_lengths():
    assert split_words(["ab, c", "d ee."]).tolist() == [[2, 1, 1, 1], [1, 1, 2, 1]]
    assert split_words(["a " * PAGE]).shape == (1, TOKENS)


def test_the_rate_is_a_number_above_zero():
    assert rows_per_second("cpu") > 0


def test_a_stream_holds_a_row_and_a_list_holds_them_all():
    def streamed():
        for _ in range(100):
            yield np.ones(1 << 16, np.uint8)

    def whole():
        yield from list(streamed())

    assert 1 << 16 <= most_held_bytes(streamed()) < 10 << 16
    assert most_held_bytes(whole()) >= 100 << 16

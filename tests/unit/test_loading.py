"""What lesson 21 compares workers and pinning with."""

from labkit.loading import PAGE, TOKENS, rows_per_second, split_words


def test_pages_become_rows_of_word_lengths():
    assert split_words(["ab, c", "d ee."]).tolist() == [[2, 1, 1, 1], [1, 1, 2, 1]]
    assert split_words(["a " * PAGE]).shape == (1, TOKENS)


def test_the_rate_is_a_number_above_zero():
    assert rows_per_second("cpu") > 0

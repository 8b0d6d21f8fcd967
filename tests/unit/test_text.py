"""The corpus and the batches."""

import itertools
import subprocess
import sys

import pytest
import torch

from gpumem.inputs import InputError
from gpumem.models import text
from gpumem.models.text import batches, corpus


def first(count=1, **options):
    options = {"device": "cpu", "batch_size": 2, "seq_len": 16, **options}
    return list(itertools.islice(batches(**options), count))


def test_the_splits_are_code_and_share_no_file():
    train, test = corpus("train"), corpus("test")
    assert "def " in train
    assert "def " in test
    assert len(train) > 2_000_000
    assert 0.01 < len(test) / len(train) < 0.5
    lines = {line for line in test.splitlines() if len(line) > 60}
    shared = lines & set(train.splitlines())
    assert len(shared) < 0.1 * len(lines)


def test_another_process_sees_the_same_batches():
    code = (
        "from gpumem.models.text import batches;"
        "print(next(batches(device='cpu', batch_size=2, seq_len=16, seed=3)).tolist())"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == str(first(seed=3)[0].tolist())


def test_local_files_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "_sysconfigdata_here.py").write_text("local = 1\n", encoding="utf-8")
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path))
    assert corpus.__wrapped__("train") == "x = 1\n"
    with pytest.raises(InputError, match="has none"):
        corpus.__wrapped__("test")


@pytest.mark.parametrize("split", text.SPLITS)
def test_batches_are_pieces_of_the_corpus(split):
    data = corpus(split).encode()
    for batch_size, seq_len in ((1, 1), (5, 300)):
        [batch] = first(batch_size=batch_size, seq_len=seq_len, split=split)
        assert batch.shape == (batch_size, seq_len)
        assert batch.dtype == torch.int64
        assert all(bytes(row) in data for row in batch.tolist())


def test_the_seed_decides_and_nothing_else():
    torch.manual_seed(1)
    once = first(4, seed=7, steps=3)
    assert len(once) == 3
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again = first(3, seed=7)
    assert all(map(torch.equal, once, again))
    assert not torch.equal(once[0], once[1])
    assert not torch.equal(once[0], first(seed=8)[0])
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())  # torch's own generator was not touched


class Words:
    """A tokenizer of words: ids are their lengths."""

    def __call__(self, piece, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [len(word) for word in piece.split()]}


def test_a_tokenizers_ids_fill_whole_rows():
    [batch] = first(tokenizer=Words(), seq_len=500)
    assert batch.shape == (2, 500)
    assert torch.equal(batch, first(tokenizer=Words(), seq_len=500)[0])
    with pytest.raises(InputError, match=r"seq_len must be at most \d+ with this tokenizer"):
        first(tokenizer=Words(), seq_len=10_000_000)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"seq_len": -1}, "seq_len"),
        ({"seq_len": 1 << 30}, "the corpus in bytes"),
        ({"seed": 1.5}, "seed"),
        ({"steps": 0}, "steps"),
        ({"split": "trian"}, "Did you mean 'train'"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(options, says):
    with pytest.raises(InputError, match=says):
        batches(**{"device": "cpu", "batch_size": 2, "seq_len": 16, **options})

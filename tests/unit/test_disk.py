"""Tensors on a disk: what comes back, what is counted, and that nothing is left behind."""

import contextlib
import errno
import gc
import os
import shutil
from pathlib import Path

import pytest
import torch

import labkit as lab
from gpumem.files import TemporaryFolder
from gpumem.inputs import InputError
from labkit.deepspeed import disk
from labkit.deepspeed.disk import DiskStore


@pytest.fixture
def shelf(tmp_path):
    return DiskStore(tmp_path)


def test_what_is_put_comes_back(shelf):
    for tensor in (
        torch.randn(1000, 333),  # not a whole number of blocks
        torch.randn(64, 64).t(),  # not contiguous
        torch.randn(17).bfloat16(),
        torch.tensor(3),
        torch.empty(0, 4),
        torch.nn.Parameter(torch.ones(3)),
    ):
        moved_bytes = shelf.written_bytes
        shelf.put("x", tensor)
        back = shelf.get("x", "cpu")
        assert torch.equal(back, tensor)
        assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, False)
        assert shelf.held_bytes == tensor.nbytes
        assert shelf.written_bytes == shelf.read_bytes == moved_bytes + tensor.nbytes


def test_put_overwrites_also_with_less(shelf, tmp_path):
    shelf.put("x", torch.zeros(5000))
    shelf.put("x", torch.ones(3))
    assert shelf.get("x", "cpu").tolist() == [1, 1, 1]
    assert shelf.held_bytes == 12
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_is_missing_or_cut_off_is_an_error(shelf, tmp_path):
    with pytest.raises(KeyError):
        shelf.get("x", "cpu")
    shelf.put("x", torch.zeros(5000))
    os.truncate(tmp_path / "x", 4096)
    with pytest.raises(OSError, match="shorter than what was put there"):
        shelf.get("x", "cpu")


def test_a_simulation_counts_and_writes_nothing(tmp_path):
    shelf = DiskStore(tmp_path)

    def experiment(device):
        shelf.put("x", torch.zeros(1 << 40))  # more than any disk has
        x = shelf.get("x", device)[:10].clone()
        yield x.sum()

    run = lab.simulate(experiment, gpu="t4", steps=1)
    assert shelf.read_bytes == shelf.written_bytes == 4 << 40
    assert run.host_bytes >= 4 << 40
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_an_error_that_says_so(tmp_path):
    needed = 2 * shutil.disk_usage(tmp_path).total
    with pytest.raises(OSError, match=r"the disk is full: much needs .* are free in") as caught:
        disk.reserve(tmp_path / "much", needed)
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "much").stat().st_size == 0


def test_reserving_keeps_what_is_there(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    disk.reserve(tmp_path / "x", 5000)
    assert (tmp_path / "x").read_bytes() == b"abc" + bytes(4997)
    disk.reserve(tmp_path / "x", 10)
    assert (tmp_path / "x").stat().st_size == 5000


def test_what_could_not_be_written_is_not_returned(shelf, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "the disk is full")

    shelf.put("x", torch.ones(3))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="the disk is full"):
        shelf.put("x", torch.zeros(3))
    assert (shelf.written_bytes, shelf.held_bytes) == (12, 0)
    with pytest.raises(KeyError):
        shelf.get("x", "cpu")


def test_a_temporary_folder_is_removed_after_its_block_and_when_forgotten(tmp_path):
    with contextlib.suppress(ZeroDivisionError), TemporaryFolder(tmp_path) as folder:
        assert folder.parent == tmp_path
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    TemporaryFolder(tmp_path)  # forgotten at once
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="no folder can be made in"):
        TemporaryFolder(tmp_path / "missing")

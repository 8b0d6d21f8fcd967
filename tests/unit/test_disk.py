"""Tensors on a disk: what comes back, what is counted, and that nothing is left behind."""

import contextlib
import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import labkit as lab
from labkit import disk
from labkit.memory import InputError


@pytest.fixture
def shelf(tmp_path):
    return lab.Shelf(tmp_path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(1000, 333),  # no whole number of blocks
        torch.randn(64, 64).t(),  # not contiguous
        torch.randn(17).bfloat16(),
        torch.arange(5),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.nn.Parameter(torch.ones(3)),
    ],
    ids=["large", "transposed", "bf16", "ints", "scalar", "empty", "parameter"],
)
def test_what_is_put_comes_back(shelf, tensor):
    shelf.put("x", tensor)
    back = shelf.get("x", "cpu")
    assert torch.equal(back, tensor)
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, False)
    assert shelf.written_bytes == shelf.read_bytes == shelf.held_bytes == tensor.nbytes


def test_put_overwrites_also_with_less(shelf, tmp_path):
    shelf.put("x", torch.zeros(5000))
    shelf.put("x", torch.ones(3))
    assert shelf.get("x", "cpu").tolist() == [1, 1, 1]
    assert shelf.held_bytes == 12
    assert list(lab.files(tmp_path)) == ["x"]


def test_what_is_not_there(shelf, tmp_path):
    with pytest.raises(KeyError):
        shelf.get("x", "cpu")
    shelf.put("x", torch.zeros(5000))
    os.truncate(tmp_path / "x", 4096)
    with pytest.raises(OSError, match="shorter than what was put there"):
        shelf.get("x", "cpu")


def test_a_simulation_counts_and_writes_nothing(tmp_path):
    shelf = lab.Shelf(tmp_path)

    def experiment(device):
        shelf.put("x", torch.zeros(1 << 40))  # more than any disk has
        x = shelf.get("x", device)[:10].clone()
        yield x.sum()

    run = lab.simulate(experiment, gpu="t4", steps=1)
    assert shelf.read_bytes == shelf.written_bytes == 4 << 40
    assert run.host_bytes >= 4 << 40
    assert lab.files(tmp_path) == {}


def test_a_full_disk_is_an_error_that_says_so(tmp_path):
    needed = 2 * shutil.disk_usage(tmp_path).total
    with pytest.raises(OSError, match=r"the disk is full: much needs .* are free in") as caught:
        disk.reserve(tmp_path / "much", needed)
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / "much").stat().st_size == 0


def test_what_the_system_says_of_a_full_disk_is_passed_on(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"the disk is full: some needs 1\.00 KiB") as caught:
        disk.reserve(tmp_path / "some", 1024)
    assert caught.value.errno == errno.EDQUOT


def test_reserving_keeps_what_is_there(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    disk.reserve(tmp_path / "x", 5000)
    assert (tmp_path / "x").read_bytes() == b"abc" + bytes(4997)
    disk.reserve(tmp_path / "x", 10)
    assert (tmp_path / "x").stat().st_size == 5000


def test_reserving_opens_a_file_as_the_c_library_needs_it(tmp_path, monkeypatch):
    """Where it writes in place of a file system that cannot reserve, it refuses to append."""
    import fcntl

    flags = []
    monkeypatch.setattr(
        os, "posix_fallocate", lambda number, *_: flags.append(fcntl.fcntl(number, fcntl.F_GETFL))
    )
    disk.reserve(tmp_path / "x", 10)
    assert flags[0] & os.O_ACCMODE == os.O_RDWR
    assert not flags[0] & os.O_APPEND
    assert not (tmp_path / "x").stat().st_mode & 0o111  # nobody is to run it


def test_a_file_system_without_a_size_is_not_full(tmp_path, monkeypatch):
    usage = type(shutil.disk_usage(tmp_path))(0, 0, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    disk.reserve(tmp_path / "x", 5000)
    assert (tmp_path / "x").stat().st_size == 5000


def test_a_put_that_finds_no_room_changes_nothing(shelf, monkeypatch):
    def full(path, nbytes):
        raise OSError(errno.ENOSPC, "the disk is full")

    shelf.put("x", torch.ones(3))
    monkeypatch.setattr(disk, "reserve", full)
    for name in ("x", "y"):
        with pytest.raises(OSError, match="the disk is full"):
            shelf.put(name, torch.zeros(5000))
    assert shelf.written_bytes == shelf.held_bytes == 12
    assert shelf.get("x", "cpu").tolist() == [1, 1, 1]
    with pytest.raises(KeyError):
        shelf.get("y", "cpu")


def test_what_was_written_in_part_is_not_given_out(shelf, monkeypatch):
    def broken(move, memory):
        raise OSError(errno.EIO, "no")

    shelf.put("x", torch.ones(3))
    monkeypatch.setattr(disk, "_move", broken)
    with pytest.raises(OSError, match="no"):
        shelf.put("x", torch.zeros(3))
    assert (shelf.written_bytes, shelf.held_bytes) == (12, 0)
    with pytest.raises(KeyError):
        shelf.get("x", "cpu")


def test_speed(tmp_path):
    speed = lab.disk_speed(tmp_path, size_bytes=1 << 20)
    assert speed.read > 0
    assert speed.write > 0
    assert speed.direct is disk.direct(tmp_path)
    assert lab.files(tmp_path) == {}
    with pytest.raises(InputError, match="size_bytes"):
        lab.disk_speed(tmp_path, size_bytes=0)


# --- nothing is left behind ----------------------------------------------------------------------


def test_scratch_is_removed_by_close_and_twice_is_no_harm(tmp_path):
    scratch = lab.Scratch(tmp_path)
    assert scratch.path.parent == tmp_path
    (scratch.path / "deep").mkdir()
    (scratch.path / "deep" / "file").touch()
    scratch.close()
    assert list(tmp_path.iterdir()) == []
    scratch.close()


def test_scratch_is_removed_after_an_error_and_when_forgotten(tmp_path):
    with contextlib.suppress(ZeroDivisionError), lab.Scratch(tmp_path) as folder:
        assert folder.is_dir()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    lab.Scratch(tmp_path)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, None], ids=str)
def test_scratch_is_removed_when_its_process_ends(tmp_path, how):
    code = (
        "import sys, labkit as lab\n"
        "s = lab.Scratch(sys.argv[1]); (s.path / 'file').touch()\n"
        "print('made', flush=True); sys.stdin.readline()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(lab.__file__).parents[1])},
    )
    assert child.stdout.readline() == "made\n"
    assert len(list(tmp_path.iterdir())) == 1
    if how:
        child.send_signal(how)
    child.communicate("\n")
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


FORK = """
import os, sys, time, labkit as lab
scratch = lab.Scratch(sys.argv[1])
child = os.fork()
if child == 0 and sys.argv[2] == "ends":
    sys.exit()
if child == 0:
    time.sleep(600)
if sys.argv[2] == "ends":
    os.waitpid(child, 0)
    assert scratch.path.is_dir()
scratch.close()
assert not scratch.path.exists()
if sys.argv[2] == "lives":
    os.kill(child, 9)
print("closed")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("copy", ["ends", "lives"])
def test_a_forked_copy_neither_removes_the_folder_nor_keeps_it(tmp_path, copy):
    child = subprocess.Popen(
        [sys.executable, "-c", FORK, str(tmp_path), copy],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(lab.__file__).parents[1])},
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert said == "closed\n"
    assert list(tmp_path.iterdir()) == []


def test_no_folder_can_be_made(tmp_path):
    with pytest.raises(InputError, match="no folder can be made in"):
        lab.Scratch(tmp_path / "missing")


def test_measuring_a_disk_leaves_other_files_alone(tmp_path):
    (tmp_path / "speed").write_text("mine")
    lab.disk_speed(tmp_path, size_bytes=1 << 20)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]

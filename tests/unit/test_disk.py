"""Tensors on a disk: what comes back, what is counted, and that nothing is left behind."""

import contextlib
import errno
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

import labkit as lab
from gpumem.files import TemporaryFolder
from gpumem.inputs import InputError
from labkit.disk_store import DiskStore, write_speed

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


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


def test_a_written_file_is_timed_and_removed(tmp_path):
    assert write_speed(tmp_path, nbytes=1 << 20) > 0
    assert list(tmp_path.iterdir()) == []


# --- what lesson 18 gives to copy ----------------------------------------------------------------

DEEPSPEED = """
import json
import deepspeed, torch

# Sums over shared memory, for many ranks on a CPU: a minute's compiling that one does not need.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path="infinity.json"):
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
engine, *_ = deepspeed.initialize(model=model, config="infinity.json")
losses = []
for _ in range(3):
    loss = engine(torch.ones(4, 512)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with open("losses.json", "w") as file:
    json.dump(losses, file)
"""


def plain(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    while True:
        loss = model(torch.ones(4, 512, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # DeepSpeed compiles its operators for disks, for minutes
def test_deepspeeds_configuration_in_lesson_18_trains_as_plain_pytorch_does(tmp_path):
    book = nbformat.read(NOTEBOOKS / "18_nvme_offload.ipynb", 4)
    [text] = re.findall(r"```json\n(.*?)```", book.cells[-2].source, re.DOTALL)
    settings = json.loads(text.replace("/local_nvme", str(tmp_path / "nvme")))
    assert settings.pop("bf16") == {"enabled": True}  # losses are compared in FP32
    settings["optimizer"]["params"] |= {"lr": 1e-3, "weight_decay": 0.01}  # as the plain loop has
    (tmp_path / "infinity.json").write_text(json.dumps(settings))
    (tmp_path / "train.py").write_text(DEEPSPEED)
    # ninja lies beside this Python. In its usual folder a killed build leaves a lock behind.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    there = {"PATH": path, "TORCH_EXTENSIONS_DIR": str(tmp_path / "operators")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "train.py"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | there, check=True)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert losses == pytest.approx(lab.measure(plain, steps=3).losses, rel=1e-4)
    # On the disk: weight, master copy or gradient, and two moments of each parameter, as it says.
    swapped_bytes = sum(file.stat().st_size for file in tmp_path.rglob("*.swp"))
    assert 20 * 8 * 512 * 512 <= swapped_bytes <= 20.2 * 8 * 512 * 512

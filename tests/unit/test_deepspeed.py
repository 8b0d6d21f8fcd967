"""DeepSpeed: what is missing, its operators built once, its disk traffic."""

import errno
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
from torch.utils import cpp_extension

import labkit as lab
from gpumem.hardware import this_machine
from gpumem.inputs import InputError
from labkit.deepspeed import engines, operators
from labkit.deepspeed.engines import Traffic

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
lack = operators.missing()
# Where all are to run, as in continuous integration, they fail without it: nobody reads of skips.
needs_deepspeed = pytest.mark.skipif(bool(lack) and "CI" not in os.environ, reason=str(lack))

# --- what is missing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("nothing", None),
        ("ninja", "`pip install ninja`"),
        ("c++", "`apt-get install g++ libaio-dev`"),
        ("linux", "on Linux only"),
        ("nvcc", "nvcc"),
    ],
)
def test_what_a_disk_needs_is_named_and_cpu_memory_does_not_need_it(monkeypatch, what, says):
    device = "cuda" if what == "nvcc" else "cpu"
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(operators.shutil, "which", lambda name, path=None: name != what)
    monkeypatch.setattr(operators.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    monkeypatch.setattr(operators.sys, "platform", "darwin" if what == "linux" else "linux")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(this_machine, "device", lambda: torch.device(device))
    found = operators.missing()
    assert found is None if says is None else says in found
    assert operators.missing(nvme=False) is None


def test_without_deepspeed_nothing_else_is_checked(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-build-isolation deepspeed" in operators.missing(nvme=False)
    with pytest.raises(InputError, match="DeepSpeed is not installed"):
        engines.prepare()


# --- watching the disk ---------------------------------------------------------------------------


class FakeHandle:
    """DeepSpeed's handle, of which only the number of transfers under way is left."""

    refuse, under_way = False, 0

    def async_pwrite(self, buffer, path, offset):
        self.under_way += not self.refuse
        return -self.refuse

    async_pread = async_pwrite

    def wait(self):
        assert self.under_way, "DeepSpeed's own would abort the process"
        done, self.under_way = self.under_way, 0
        return done


def test_bytes_are_counted_and_the_disks_errors_end_the_job(tmp_path, monkeypatch):
    def full(path, nbytes):
        raise OSError(errno.ENOSPC, "the disk is full")

    traffic, path, buffer = Traffic(), str(tmp_path / "x"), torch.zeros(8)
    one = engines.watched(FakeHandle, traffic)()
    assert one.wait() == 0  # nothing is under way
    assert one.async_pwrite(buffer, path, 0) == 0
    assert one.wait() == 1
    assert (tmp_path / "x").stat().st_size == 32  # its place is taken
    assert one.async_pread(buffer, path, 0) == 0
    assert (traffic.read_bytes, traffic.written_bytes) == (32, 32)
    one.refuse = True
    for transfer in (one.async_pread, one.async_pwrite):
        with pytest.raises(OSError, match="refuses direct transfers"):
            transfer(buffer, path, 0)
        assert one.under_way == 0  # freeing a handle with one would abort the process
    one.refuse = False
    one.async_pread(buffer, path, 0)
    monkeypatch.setattr(engines, "reserve", full)
    with pytest.raises(OSError, match="the disk is full"):
        one.async_pwrite(buffer, str(tmp_path / "y"), 0)
    assert one.under_way == 0


# --- the real engine -----------------------------------------------------------------------------

ENGINE = """
import json
import deepspeed
import torch
import labkit as lab
from labkit.deepspeed import engines

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])

def train(device, folder="", lesson=""):
    traffic = engines.prepare()
    place = {"device": "nvme", "nvme_path": folder}
    room = {"buffer_count": 4, "buffer_size": 300_000, "max_in_cpu": 0}
    adam = {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}
    model, settings = build(), json.loads(lesson or "{}") or {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {
            "stage": 3, "offload_param": place | room, "offload_optimizer": place,
            "reduce_bucket_size": 300_000, "sub_group_size": 300_000,
            "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}}
    deepspeed.zero.Init(module=model, config_dict_or_path=settings)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    while True:
        before = dict(vars(traffic))
        loss = engine(torch.ones(4, 512, device=device)).square().mean()
        engine.backward(loss)
        engine.step()
        moved = {name: now - before[name] for name, now in vars(traffic).items()}
        with open(f"{folder}/moved.json", "w") as file:
            json.dump(moved, file)
        yield loss

def plain(device):
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    while True:
        loss = model(torch.ones(4, 512, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    (tmp_path / "engine.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("engine")
    del sys.modules["engine"]


@needs_deepspeed
@pytest.mark.nightly
def test_what_lesson_18_gives_to_copy_trains_as_plain_pytorch_does(tmp_path, engine):
    book = nbformat.read(NOTEBOOKS / "18_nvme_offload.ipynb", 4)
    [text] = re.findall(r"```json\n(.*?)```", book.cells[-2].source, re.DOTALL)
    settings = json.loads(text.replace("/local_nvme", str(tmp_path)))
    assert settings.pop("bf16") == {"enabled": True}  # losses are compared in FP32
    settings["optimizer"]["params"] |= {"lr": 1e-3, "weight_decay": 0.01}  # as the plain loop has
    operators.build()
    given = {"folder": str(tmp_path), "lesson": json.dumps(settings)}
    [run] = lab.launch(engine.train, ranks=1, steps=3, **given)
    assert run.losses == pytest.approx(lab.measure(engine.plain, steps=3).losses, rel=1e-4)
    assert json.loads((tmp_path / "moved.json").read_text())["written_bytes"]


@needs_deepspeed
@pytest.mark.nightly
def test_zero_infinity_trains_as_plain_pytorch_does(tmp_path, engine):
    operators.build()
    built = operators.build_folder() / "async_io/build.ninja"
    assert "async_io.cpp" in built.read_text()  # as one file
    numbers = 8 * 512 * 512
    folder = tmp_path / "nvme"
    folder.mkdir()
    [run] = lab.launch(engine.train, ranks=1, steps=3, folder=str(folder))
    reference = lab.measure(engine.plain, steps=3)
    assert run.losses == pytest.approx(reference.losses, rel=1e-4)
    moved = json.loads((folder / "moved.json").read_text())
    # Weights are read forward and backward, gradients and state in the step; small biases stay.
    assert 24 * numbers <= moved["read_bytes"] <= 24.2 * numbers
    assert 20 * numbers <= moved["written_bytes"] <= 20.2 * numbers
    swapped_bytes = sum(path.stat().st_size for path in folder.rglob("*.swp"))
    assert 20 * numbers <= swapped_bytes <= 20.2 * numbers

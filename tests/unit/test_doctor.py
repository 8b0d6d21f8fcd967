import collections
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from labkit import doctor, hardware


def test_each_package_is_missing_out_of_range_or_well():
    found = doctor.check_packages(
        [
            "pytest>=1",
            "hypothesis>=999",
            "no-such-package-here>=2",
            "another-missing-one; extra == 'more'",
            "not-for-this-python; python_version < '3'",
            "gpu-memory-lab[more]; extra == 'all'",
        ]
    )
    by_name = {finding.subject: finding for finding in found}
    assert {name: finding.status for name, finding in by_name.items()} == {
        "pytest": "ok",
        "hypothesis": "problem",
        "no-such-package-here": "problem",
        "another-missing-one": "note",
    }
    assert "outside >=999" in by_name["hypothesis"].text
    assert by_name["no-such-package-here"].remedy == "pip install 'no-such-package-here>=2'"


def test_what_the_package_asks_for_is_found():
    assert any(line.startswith("torch") for line in doctor.requirements())
    assert any("papermill" in line and "extra" in line for line in doctor.requirements())


def test_an_old_python_is_a_problem(monkeypatch):
    assert doctor.check_python()[0].status == "ok"
    monkeypatch.setattr(doctor, "SMALLEST_PYTHON", (99, 0))
    [finding] = doctor.check_python()
    assert finding.status == "problem"
    assert "install Python 99.0" in finding.remedy


def test_a_missing_kernel_is_a_problem(monkeypatch):
    assert doctor.check_kernel()[0].status == "ok"
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    [finding] = doctor.check_kernel()
    assert (finding.status, finding.remedy) == ("problem", "pip install ipykernel")


def test_another_pythons_kernel_is_noted(monkeypatch):
    from jupyter_client.kernelspec import KernelSpecManager

    spec = SimpleNamespace(argv=["/somewhere/else/python", "-m", "ipykernel_launcher"])
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda self, name: spec)
    [finding] = doctor.check_kernel()
    assert finding.status == "note"
    assert finding.remedy.startswith(sys.executable)


def test_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path / "not" / "yet")
    assert doctor.check_cache()[0].status == "ok"
    assert list(tmp_path.iterdir()) == []  # looking makes nothing

    def refuse(**options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    [finding] = doctor.check_cache()
    assert finding.status == "problem"
    assert "Read-only file system" in finding.text
    assert "LABKIT_CACHE" in finding.remedy


def test_a_full_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path)
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(1, 1, 5 << 20))
    assert [f.status for f in doctor.check_disk()] == ["problem", "problem"]
    assert "5.00 MiB free" in doctor.check_disk()[0].text


@pytest.mark.parametrize(
    ("can_measure", "driver", "visible", "status", "remedy"),
    [
        (False, None, None, "ok", ""),
        (True, "580.1", None, "ok", ""),
        (False, "580.1", "", "problem", "unset CUDA_VISIBLE_DEVICES"),
        (False, "580.1", None, "problem", "PyTorch"),
    ],
)
def test_gpu_and_driver(monkeypatch, can_measure, driver, visible, status, remedy):
    here = SimpleNamespace(can_measure=can_measure, name="A machine", note="what it does")
    monkeypatch.setattr(hardware, "machine", lambda: here)
    monkeypatch.setattr(doctor, "nvidia_driver", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    last = doctor.check_gpu()[-1]
    assert last.status == status
    assert remedy in last.remedy


def test_the_driver_is_asked_for_politely(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.nvidia_driver() is None
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/nvidia-smi")

    def hang(*arguments, **options):
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(doctor.subprocess, "run", hang)
    assert doctor.nvidia_driver() == "not answering"
    answer = SimpleNamespace(returncode=0, stdout="580.1\n580.1\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **o: answer)
    assert doctor.nvidia_driver() == "580.1"


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def check_disk():
        raise RuntimeError("odd disk")

    monkeypatch.setattr(doctor, "check_disk", check_disk)
    findings = doctor.examine()
    assert any(f.subject == "disk" and "odd disk" in f.text for f in findings)
    assert any(f.subject == "python" for f in findings)

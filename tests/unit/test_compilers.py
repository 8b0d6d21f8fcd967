"""What torch.compile lacks: no compiler, no header files, no Triton."""

import shutil

import pytest
import torch
import torch._inductor.config
import torch.utils._triton

import labkit as lab
from labkit import compilers, doctor


@pytest.fixture
def with_compiler():
    """A command that answers to --version stands for the compiler."""
    with torch._inductor.config.patch({"cpp.cxx": (None, shutil.which("true"))}):
        yield


@pytest.fixture
def without_compiler():
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        yield


def test_a_missing_compiler_is_named_with_its_remedy(without_compiler):
    assert "install g++" in lab.missing_compiler()
    [finding] = doctor.check_compiler()
    assert (finding.status, finding.subject) == ("note", "compiler")
    assert finding.text.startswith("torch.compile needs a C++ compiler here")
    assert finding.remedy.startswith("install g++")


def test_missing_header_files_are_named(with_compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(compilers.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python's header files" in lab.missing_compiler()
    (tmp_path / "Python.h").touch()
    assert lab.missing_compiler() is None
    assert doctor.check_compiler()[0].status == "ok"


@pytest.mark.parametrize("there", [True, False])
def test_on_a_gpu_triton_is_asked_for(monkeypatch, there):
    monkeypatch.setattr(compilers.hardware, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: there)
    monkeypatch.setenv("CC", "true")  # answers for a compiler
    assert (lab.missing_compiler() is None) == there
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    assert ("C compiler" if there else "Triton") in lab.missing_compiler()

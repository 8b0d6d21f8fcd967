"""What torch.compile lacks: no compiler, no header files, no Triton."""

import pytest
import torch
import torch.utils._triton

import labkit as lab
from labkit import compilers, doctor


@pytest.fixture
def with_compiler(monkeypatch):
    """A command that answers to --version stands for the compiler."""
    monkeypatch.setenv("CXX", "true")


@pytest.mark.parametrize("named", ["no-such-compiler", "/", "false"])  # a folder is none
def test_a_missing_compiler_is_named_with_its_remedy(monkeypatch, named):
    monkeypatch.setenv("CXX", named)
    assert "install g++" in lab.missing_compiler()
    [finding] = doctor.check_compiler()
    assert (finding.status, finding.subject) == ("note", "compiler")
    assert finding.text.startswith("torch.compile needs a C++ compiler here")
    assert "install g++" in finding.remedy


def test_pytorch_would_call_the_same_compiler():
    from torch._inductor.cpp_builder import get_cpp_compiler

    if found := compilers.cpp_compiler():
        assert found == get_cpp_compiler()


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

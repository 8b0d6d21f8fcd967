"""What torch.compile needs: a compiler, header files, on a GPU Triton."""

import pytest
import torch
import torch.utils._triton

from gpumem.hardware import this_machine
from labkit import doctor
from labkit.doctor import missing_compiler


def test_a_missing_compiler_and_missing_header_files_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "apt-get install g++" in missing_compiler()
    monkeypatch.setenv("CXX", "true")  # a command stands for the compiler
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "Python's header files" in missing_compiler()
    (tmp_path / "Python.h").touch()
    assert missing_compiler() is None


@pytest.mark.parametrize("has_triton", [True, False])
def test_a_gpu_needs_triton_and_a_c_compiler(monkeypatch, has_triton):
    monkeypatch.setattr(this_machine, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(doctor.Path, "exists", lambda path: True)
    monkeypatch.setattr(torch.utils._triton, "has_triton", lambda: has_triton)
    monkeypatch.setenv("CC", "true")
    assert (missing_compiler() is None) == has_triton
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    assert ("C compiler" if has_triton else "Triton") in missing_compiler()

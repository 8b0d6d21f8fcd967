"""`labkit phantom` from the package alone, whose own sources are built."""

import installed

SCRIPT = """
import torch
import labkit
x = torch.ones(3 << 20, device="cuda")
print(labkit.__file__)
"""


def test_a_script_runs_on_libraries_built_from_the_installed_sources(tmp_path):
    binaries = installed.install(installed.build("wheel", tmp_path), tmp_path / "venv")
    (tmp_path / "train.py").write_text(SCRIPT)
    command = (binaries / "labkit", "phantom", "--gpu", "t4", "train.py")
    said = installed.run(*command, folder=tmp_path, LABKIT_CACHE=str(tmp_path / "cache"))
    assert f"{tmp_path}/venv/lib" in said
    assert "It fits a phantom NVIDIA T4: 12.0 MiB" in said
    assert list(tmp_path.glob("cache/phantom/*/libcudart.so*"))

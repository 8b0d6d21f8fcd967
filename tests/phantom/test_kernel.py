"""Jupyter's kernel on a phantom GPU: any notebook meets PyTorch's own errors there."""

import nbformat
from nbclient import NotebookClient

import labkit as lab
from labkit.cli import main

CELLS = (
    "import torch; print(torch.cuda.get_device_name(), torch.cuda.device_count())",
    "torch.empty(99 << 30, dtype=torch.uint8, device='cuda')",
    "x = torch.ones(1 << 20, device='cuda'); print(torch.cuda.memory_summary())",
)


def test_a_notebook_runs_in_it_and_meets_the_real_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "")
    assert main.main(["phantom", "--install-kernel", "--gpu", "t4", "--gpus", "2"]) == 0
    assert f"Python (phantom 2 × {lab.gpu('t4').name})" in capsys.readouterr().out
    cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="phantom-t4x2", allow_errors=True, timeout=120).execute()
    first, second, third = (cell.outputs for cell in notebook.cells)
    assert first[0].text == "NVIDIA T4 2\n"
    assert second[0].ename == "OutOfMemoryError"
    assert "99.00 GiB" in second[0].evalue
    assert "4096 KiB" in third[0].text

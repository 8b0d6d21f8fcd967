"""Jupyter's kernel on a phantom GPU: any notebook meets PyTorch's own errors there."""

import re

import nbformat
import pytest
from nbclient import NotebookClient

import labkit as lab
from labkit.cli import main
from labkit.lesson.notebooks import find

CELLS = (
    "import torch; print(torch.cuda.get_device_name(), torch.cuda.device_count())",
    "torch.empty(99 << 30, dtype=torch.uint8, device='cuda')",
    "x = torch.ones(1 << 20, device='cuda'); print(torch.cuda.memory_summary())",
)


@pytest.fixture(autouse=True)
def jupyter(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "")


def test_a_notebook_runs_in_it_and_meets_the_real_error(capsys):
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


@pytest.mark.nightly
def test_a_lesson_in_it_says_phantom_and_calls_nothing_measured():
    assert main.main(["phantom", "--install-kernel", "--gpu", "rtx-4090"]) == 0
    [lesson] = find(["02"])
    notebook = nbformat.read(lesson.path, as_version=4)
    notebook.metadata.kernelspec.name = "phantom-rtx-4090"
    NotebookClient(notebook, timeout=600).execute()
    outputs = str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    name = lab.gpu("rtx-4090").name
    assert f"A phantom {name}" in outputs  # the card of the machine
    assert not re.findall(rf"(?:measured|timed|trained|run|computed) on {name}", outputs)

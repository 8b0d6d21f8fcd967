"""Jupyter's kernel on a phantom GPU as a learner meets it: chosen in JupyterLab, in a browser.

JupyterLab's server runs without the stub libraries; only the kernel has them.
"""

import pickle

import browsing
import nbformat
import pytest
from jupyterlab_page import LabPage, jupyterlab

import labkit as lab
from labkit.phantom.kernel import install_kernel
from labkit.values import PHANTOM_VARIABLE

pytestmark = pytest.mark.browser

CELLS = {
    "name": "import torch\n\ntorch.cuda.get_device_name()",
    "train": """torch.cuda.memory._record_memory_history()
layer = torch.nn.Linear(4096, 4096, device="cuda")
layer(torch.ones(64, 4096, device="cuda")).sum().backward()
torch.cuda.memory._dump_snapshot("snapshot.pickle")""",
    "summary": "print(torch.cuda.memory_summary(abbreviated=True))",
    "too-large": 'torch.empty(99 << 30, dtype=torch.uint8, device="cuda")',
}


def test_a_learner_chooses_the_kernel_and_meets_pytorchs_own_words(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.delenv(PHANTOM_VARIABLE)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    title, _ = install_kernel("t4")
    cells = [nbformat.v4.new_code_cell(text, id=id) for id, text in CELLS.items()]
    python3 = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": python3})
    (path := tmp_path / "notebooks" / "memory.ipynb").parent.mkdir()
    nbformat.write(notebook, path)
    with (
        jupyterlab(tmp_path, path) as address,
        browsing.chromium_started() as browser,
        browsing.watched(browser) as page,
    ):
        page.goto(address)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        opened = LabPage(page, path)
        opened.wait()
        opened.menu("Kernel", "Change Kernel…")
        page.locator(".jp-Dialog select").select_option(label=title)
        page.locator(".jp-Dialog .jp-mod-accept").click()
        page.locator(".jp-KernelName", has_text=title).wait_for()
        opened.wait()
        opened.run_all()
        shown = {id: opened.cell(id).inner_text() for id in CELLS}
        browsing.shot(page, "lab-phantom-kernel")
        problems = [problem for watch in browsing.watches for problem in watch.take()]
    assert problems == []
    assert f"'{lab.gpu('t4').name}'" in shown["name"]
    assert "PyTorch CUDA memory summary, device ID 0" in shown["summary"]
    assert "Tried to allocate 99.00 GiB. GPU 0 has a total capacity of" in shown["too-large"]
    assert opened.saved()["metadata"]["kernelspec"]["name"] == "phantom-t4"
    snapshot = pickle.loads((path.parent / "snapshot.pickle").read_bytes())
    asked = [entry["size"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    assert 4 * 4096 * 4096 in asked

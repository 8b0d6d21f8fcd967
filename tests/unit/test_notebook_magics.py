"""%memory and %%memory, in IPython's own shell."""

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from gpumem.notebook import held_now, peak_text, run_cell
from gpumem.units import KIB


@pytest.fixture
def shell():
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "gpumem")
    shell.run_cell("import torch")
    return shell


SETUP = """
model = torch.nn.Linear(64, 256, bias=False)
optimizer = torch.optim.Adam(model.parameters())
batch = torch.ones(128, 64)
"""
STEP = """
loss = model(batch).square().sum()
loss.backward()
optimizer.step()
"""


def test_a_cell_says_what_it_took(shell):
    shell.run_cell(SETUP)
    run, trace = run_cell(shell, STEP)
    weights, products = 4 * 64 * 256, 4 * 128 * 256
    # In backward: the product, its square's gradient; what is kept besides.
    assert run.by_category["weights"] == weights
    assert trace.peak_bytes == run.peak_bytes >= weights + 2 * products + 4 * 128 * 64
    assert sum(run.by_category.values()) == run.peak_bytes
    assert (run.mode, run.reserved_bytes) == ("tracked", None)
    text = peak_text(run)
    assert "128×256 float32" in text
    assert "weight, 256×64 float32" in text
    assert shell.user_ns["loss"].grad_fn is not None


def test_what_is_held_now_is_named(shell):
    shell.run_cell(SETUP + STEP)
    shell.run_cell("rows = [torch.zeros(1024), torch.zeros(1024)]\nagain = rows[0].view(2, 512)")
    shell.run_cell("sparse, empty = torch.eye(9).to_sparse(), torch.ones(9, device='meta')")
    shell.run_cell("torch.zeros(512)", store_history=True)
    lines = held_now(shell.user_ns).splitlines()
    found = {line.split("iB  ")[1]: line.split()[0] for line in lines[2:] if "KiB" in line}
    assert found["model, weights"] == found["model, gradients"] == "64.0"
    assert found["optimizer, states"] == "128"
    assert (found["batch"], found["rows"]) == ("32.0", "8.00")
    assert "again" not in found  # a view holds nothing of its own
    [output] = [name for name in found if name.startswith("Out[")]
    assert found[output] == "2.00"


def test_the_magics_print(shell, capsys):
    shell.run_cell(SETUP)
    shell.run_cell_magic("memory", "", STEP)
    shell.run_line_magic("memory", "")
    printed = capsys.readouterr().out
    assert "Peak " in printed
    assert "model, weights" in printed
    shell.run_cell_magic("memory", "", "1 + 1")
    assert "The cell used no tensor on cpu." in capsys.readouterr().out


def test_an_error_in_the_cell_leaves_the_figures(shell, capsys):
    run, _ = run_cell(shell, "held = torch.zeros(1024)\nraise ValueError('mine')")
    assert "ValueError" in capsys.readouterr().out
    assert run.peak_bytes == 4 * KIB
    x = torch.ones(3)
    assert (x + 1).sum() == 6  # nothing is tracked any more

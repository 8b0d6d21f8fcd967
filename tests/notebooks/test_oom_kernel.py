"""Twenty out-of-memory errors in one live kernel, at night two hundred, as a notebook meets them.

Half are uncaught errors in a failed cell, with ``lab.free_memory()`` in the next one, as a learner
would do it. Half happen inside ``lab.measure`` under ``lab.pretend``. Each error holds megabytes
when it strikes, so that at night one leak in a hundred would show.
"""

import json

import nbformat
import pytest
from nbclient import NotebookClient

from labkit.course.runner import kernel_environment

HELD_MIB = 24  # what each error holds when it strikes
# Process memory after the last error may exceed that after the first by less than half of what a
# single error holds: the kernel's own history of 300 cells takes some hundred KiB.
TOLERANCE_MIB = HELD_MIB / 2

SETUP = f"""
import ctypes, gc, json, weakref
import psutil, torch
from torch import nn
import labkit as lab
from gpumem.hardware.cuda import cuda_memory
from gpumem.hardware.this_machine import machine

torch.set_num_threads(1)  # small tensors: a second thread only waits
ON_CUDA = machine().can_measure
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
MIB = 1 << 20
BUDGET = {HELD_MIB} * MIB + MIB // 2
storages = []  # weak references: what the experiment ever held, graphs included

def layers(device, batch_size=1 << 10):
    '''Activations of a quarter of a MiB per 1024 rows, two for each layer.'''
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).to(device)
    for layer in model:
        layer.register_forward_hook(
            lambda m, i, out: storages.append(weakref.ref(out.untyped_storage())))
    storages.extend(weakref.ref(p.untyped_storage()) for p in model.parameters())
    while True:
        hidden = torch.ones(batch_size, 64, device=device)
        for layer in model:
            hidden = layer(hidden).sin()
        loss = hidden.mean()
        loss.backward()
        model.zero_grad()
        yield loss

def run_out():
    '''An error that nobody catches, with the memory still in the frames.'''
    keep = [torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE).fill_(1) for _ in range(3)]
    storages.extend(weakref.ref(t.untyped_storage()) for t in keep)
    if ON_CUDA:
        with lab.pretend(budget_bytes=base + BUDGET):
            list(layers(DEVICE, 1 << 13))
    with lab.track(budget_bytes=BUDGET - 12 * MIB):
        list(layers(DEVICE, 1 << 13))

def state():
    alive = sum(ref() is not None for ref in storages)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim:  # what the C library keeps of freed memory comes and goes by megabytes
        trim(0)
    held = (cuda_memory.allocated() or 0) + psutil.Process().memory_info().rss
    print(json.dumps([len(storages), alive, held]))
    storages.clear()

lab.free_memory()
base = cuda_memory.reserved() or 0
clean = lab.measure(layers)
storages.clear()
"""
# What the imports left need not be looked through at every collection.
FREEZE = "lab.free_memory()\ngc.freeze()"
FAIL = "run_out()"
FREE = "lab.free_memory()\nstate()"
MEASURE = """
with lab.pretend(budget_bytes=base + BUDGET):
    run = lab.measure(layers, batch_size=1 << 13)
assert run.oom is not None and run.oom.step == 1, run
del run
state()
"""
CLEAN = """
again = lab.measure(layers)
assert (again.peak_bytes, again.losses) == (clean.peak_bytes, clean.losses), again
"""


@pytest.fixture
def kernel(monkeypatch):
    """This Python and this labkit behind the name ``python3``."""
    with kernel_environment() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.nightly)])
def test_errors_in_one_kernel_leave_nothing(kernel, rounds):
    three = [FAIL, FREE, MEASURE]  # once more to begin with: it imports what errors need
    sources = [SETUP, *three, FREEZE, *three * rounds, CLEAN]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=120).execute()
    setup, *_, freeze = notebook.cells[:5]
    *cells, clean = notebook.cells[5:]
    assert setup.outputs == freeze.outputs == clean.outputs == []
    for cell in cells[::3]:
        [output] = [o for o in cell.outputs if o.output_type == "error"]
        assert output.ename in ("SimulatedOutOfMemory", "OutOfMemoryError")
        assert "Tried to allocate" in output.evalue
    for after in (cells[1::3], cells[2::3]):
        texts = ["".join(o.text for o in cell.outputs if "text" in o) for cell in after]
        states = [json.loads(text) for text in texts]
        assert all(met >= 10 and alive == 0 for met, alive, _ in states)
        (_, _, first_bytes), *_, (_, _, last_bytes) = states
        assert last_bytes - first_bytes < TOLERANCE_MIB * (1 << 20)

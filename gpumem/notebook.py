"""`%%memory` above a cell shows what the cell took; `%memory` says what is held now.

    %load_ext gpumem

    %%memory
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()

On a GPU, real or phantom, the peak is PyTorch's own; elsewhere the cell's tensors are tracked on
the CPU. The timeline is drawn where matplotlib is there.

Limits: those of `track`. Tensors that the cell only uses are counted from the moment it meets them,
so the peak of a CPU leaves out what it never touches. `%memory` finds what names of the notebook
reach: modules, optimizers, tensors, and tensors in lists, tuples, dictionaries and outputs; of
sparse tensors it says nothing.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpumem.costs import plain_tensors, tensors_in
from gpumem.hardware import this_machine
from gpumem.hardware.cuda import cuda_memory
from gpumem.runs import Run, named_categories
from gpumem.trace import Category, Storage, Trace
from gpumem.tracker import track
from gpumem.units import format_bytes, table_lines

SHOWN = 8
_OUTPUTS = {"Out", "_oh"}  # one dictionary, by two names


def load(shell: Any) -> None:
    """Give an IPython ``shell`` the two magics."""

    def memory(line: str, cell: str | None = None) -> None:
        """%memory: what is held now. %%memory: run the cell and show what it took."""
        if cell is None:
            print(held_now(shell.user_ns))
        else:
            _show(*run_cell(shell, cell))

    shell.register_magic_function(memory, "line_cell", "memory")


def run_cell(shell: Any, cell: str) -> tuple[Run | None, Trace]:
    """Run a cell and return what it took, None if it made no tensor, and its trace.

    An error of the cell is shown by the shell, which goes on.
    """
    here, device = this_machine.machine(), this_machine.device()
    on_gpu = device.type == "cuda"
    if on_gpu:
        cuda_memory.synchronize()
        cuda_memory.reset_peaks()
    with track(device=None if on_gpu else "cpu") as tracker:
        shell.run_cell(cell)
    trace = tracker.trace()
    peak = trace.peak()
    if peak.index < 0:
        return None, trace
    categories = Counter(peak.by_category)
    peak_bytes = max(peak.total_bytes, cuda_memory.peak_allocated() if on_gpu else 0)
    categories[Category.UNATTRIBUTED] += peak_bytes - peak.total_bytes
    run = Run(
        name="the cell",
        parameters={},
        mode="phantom" if here.phantom else "measured" if on_gpu else "tracked",
        device=here.name,
        peak_bytes=peak_bytes,
        by_category=named_categories(categories),
        reserved_bytes=cuda_memory.peak_reserved() if on_gpu else None,
        capacity_bytes=here.capacity_bytes if on_gpu else None,
        trace=trace,
    )
    return run, trace


def _show(run: Run | None, trace: Trace) -> None:
    if run is None:
        print(f"The cell used no tensor on {trace.device}.")
        return
    try:
        from gpumem.figures.timelines import timeline
    except ModuleNotFoundError:  # the extra "figures" brings matplotlib
        pass
    else:
        timeline(run, title=f"At most {format_bytes(run.peak_bytes)} while the cell ran")
    print(peak_text(run))


def peak_text(run: Run) -> str:
    """Return the peak of a run with a trace, what it was made of, and what held most of it."""
    peak = run.trace.peak()
    reserved = ""
    if run.reserved_bytes is not None:
        reserved = f", {format_bytes(run.reserved_bytes)} reserved"
    phase = run.trace.events[peak.index].phase
    parts = [f"{format_bytes(n)} {name}" for name, n in run.by_category.items() if n]
    held = run.trace.live_at(peak.index)
    rows = [(format_bytes(each.nbytes), str(each.category), _what(each)) for each in held[:SHOWN]]
    if rest := sum(each.nbytes for each in held[SHOWN:]):
        rows.append((format_bytes(rest), "", f"{len(held) - SHOWN} smaller ones"))
    return "\n".join(
        [
            f"Peak {format_bytes(run.peak_bytes)}{reserved}, {run.label}; phase: {phase}.",
            f"  Made of {', '.join(parts)}.",
            *table_lines(("holds", "as", "what"), rows),
        ]
    )


def _what(storage: Storage) -> str:
    made = f"{storage.operator} in {storage.module}" if storage.module else storage.operator
    shape = "×".join(map(str, storage.shape)) or "scalar"
    return f"{storage.name or made}, {shape} {storage.dtype}"


# --- what is held now -----------------------------------------------------------------------------


def held_now(names: Mapping[str, Any]) -> str:
    """Return what the values that ``names`` reach hold on this machine's device, largest first.

    Each storage counts once, for the first name that reaches it.
    """
    device, counted = this_machine.device(), set()
    rows: Counter[str] = Counter()
    for holder, tensors in _holders(names):
        for tensor in tensors:
            for part in plain_tensors(tensor):
                if part.device.type != device.type or part.layout is not torch.strided:
                    continue  # a sparse tensor has no storage of its own
                storage = part.untyped_storage()
                if storage._cdata not in counted:
                    counted.add(storage._cdata)
                    rows[holder] += storage.nbytes()
    lines = [f"Names of this notebook hold {format_bytes(rows.total())} on {device}."]
    if device.type == "cuda":
        allocated_bytes, reserved_bytes = cuda_memory.allocated(), cuda_memory.reserved()
        rows["no name: autograd's graphs, workspaces, other modules"] = max(
            0, allocated_bytes - rows.total()
        )
        lines = [
            f"Allocated on {device}: {format_bytes(allocated_bytes)}, "
            f"reserved {format_bytes(reserved_bytes)}."
        ]
    found = [(format_bytes(n), holder) for holder, n in rows.most_common() if n]
    return "\n".join([*lines, *(table_lines(("holds", "what"), found) if found else [])])


def _holders(names: Mapping[str, Any]) -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
    named = {name: value for name, value in names.items() if not name.startswith("_")}
    for name, value in named.items():
        if isinstance(value, torch.nn.Module):
            weights = list(value.parameters())
            yield f"{name}, weights", iter(weights)
            yield f"{name}, gradients", (w.grad for w in weights if w.grad is not None)
            yield f"{name}, buffers", value.buffers()
    for name, value in named.items():
        if isinstance(value, torch.optim.Optimizer):
            yield f"{name}, states", tensors_in(list(value.state.values()))
        elif name not in _OUTPUTS and not isinstance(value, torch.nn.Module):
            yield name, tensors_in(value)
    for number, value in names.get("Out", {}).items():
        yield f"Out[{number}], an output that the notebook keeps", tensors_in(value)

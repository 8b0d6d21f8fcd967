"""What cuBLAS takes from PyTorch's allocator beside the tensors that an operator returns.

PyTorch hands it a block of its own memory for every pair of handle and stream and keeps it.
Handles belong to threads, and backward runs in a thread of its own: a training step holds two. From
2.15 on each product takes a block once it has its result, and gives it back. cuBLASLt, which adds a
bias, shares the block since 2.12. Before that a thread has a second block for it, and up to 2.8
each of its products takes one and gives it back. Hopper's larger block is Blackwell's since 2.12.

Source, in PyTorch: ``parseChosenWorkspaceSize`` and ``setWorkspaceForHandle`` in
``aten/src/ATen/cuda/CublasHandlePool.cpp``, ``gemm_and_bias`` in ``CUDABlas.cpp``
(https://github.com/pytorch/pytorch/pull/168175). Which release does what was seen in what 2.6 to
2.13 request on phantoms of compute capability 7.5, 9.0, 10.0 and 12.0.

Limits: cuBLAS's default sizes, unless ``CUBLAS_WORKSPACE_CONFIG`` says otherwise. What cuDNN and
NCCL take is not known beforehand.
"""

from dataclasses import replace
from typing import NamedTuple

from gpumem.hardware.catalogue import Gpu
from gpumem.torch_release import follows
from gpumem.trace import Category, Event, Phase, Storage, Trace
from gpumem.units import KIB, MIB

#: ":4096:2:16:8", two blocks of 4 MiB and eight of 16 KiB.
DEFAULT_BYTES = 2 * 4096 * KIB + 8 * 16 * KIB
HOPPER_BYTES = 32 * MIB
ROCM_BYTES = 128 * MIB  # gfx94x, the AMD GPUs of the catalogue
LT_BYTES = MIB  # of cuBLASLt, where it does not share cuBLAS's
#: bitsandbytes' own products call cuBLAS without PyTorch's handle, or no library.
_MULTIPLYING = {
    *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot"),
    *("linalg_inv_ex", "_linalg_det", "_linalg_solve_ex"),
}


def workspace_bytes(gpu: Gpu) -> int:
    """Return the bytes of one workspace on ``gpu``; 0 where there is no cuBLAS (Apple)."""
    if gpu.unified:
        return 0
    if gpu.compute_capability is None:
        return ROCM_BYTES
    return nvidia_workspace_bytes(gpu.compute_capability[0])


def nvidia_workspace_bytes(major: int) -> int:
    """Return the bytes of one workspace on NVIDIA's compute capability ``major``.x."""
    large = (9, 10, 12) if follows("2.12") else (9,)
    return HOPPER_BYTES if major in large else DEFAULT_BYTES


def with_workspaces(trace: Trace, gpu: Gpu) -> Trace:
    """Return ``trace`` with what ``gpu`` adds for cuBLAS when products have their results."""
    nbytes = workspace_bytes(gpu)
    products = _products(trace, nbytes) if nbytes else {}
    storages, events, moved = list(trace.storages), [], []

    def add(workspace: _Workspace, event: Event) -> None:
        number, taken_bytes = len(storages), workspace.nbytes
        kind, name, shape = Category.UNATTRIBUTED, "cuBLAS workspace", (taken_bytes,)
        storages.append(
            Storage(taken_bytes, kind, trace.device, name, "", "", event.phase, shape, "uint8")
        )
        events.append(Event(number, taken_bytes, event.phase, event.stream))
        if not workspace.kept:
            events.append(Event(number, -taken_bytes, event.phase, event.stream))

    for index, event in enumerate(trace.events):
        moved.append(len(events))
        events.append(event)
        for workspace in products.get(index, ()):
            add(workspace, event)
    moved.append(len(events))
    step_starts = tuple(moved[start] for start in trace.step_starts)
    return replace(trace, storages=tuple(storages), events=tuple(events), step_starts=step_starts)


class _Workspace(NamedTuple):
    """What one product takes, and whether its thread keeps it."""

    nbytes: int
    kept: bool


def _products(trace: Trace, nbytes: int) -> dict[int, list[_Workspace]]:
    """Return the workspaces that products take, by the event of their result."""
    found: dict[int, list[_Workspace]] = {}
    given_back = follows("2.15")
    lt_shares, lt_keeps = follows("2.12") and not given_back, follows("2.9") and not given_back
    threads: set[tuple[bool, _Workspace]] = set()
    for index, storage, change_bytes in trace.changes():
        if change_bytes <= 0 or storage.operator not in _MULTIPLYING:
            continue
        of_lt = storage.operator == "addmm"
        in_backward = trace.events[index].phase is Phase.BACKWARD  # which has its own thread
        libraries = [] if given_back and of_lt else [_Workspace(nbytes, kept=not given_back)]
        if of_lt and not lt_shares:
            libraries.append(_Workspace(LT_BYTES, kept=lt_keeps))
        for workspace in libraries:
            if workspace.kept and (in_backward, workspace) in threads:
                continue
            threads.add((in_backward, workspace))
            found.setdefault(index, []).append(workspace)
    return found

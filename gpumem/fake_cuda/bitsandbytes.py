"""bitsandbytes on fake tensors: its own code runs, and what it would ask a GPU is answered.

Its quantized layers are tensor sub-classes, its tables are computed from data, and on a CPU it
takes other ways than on CUDA. Inside `fake_bitsandbytes`

- a quantized parameter made from a fake tensor is a fake tensor with that parameter's behaviour;
- the table of the 8-bit data type has the real one's length;
- no activation counts as an outlier of LLM.int8(): how many there are depends on the data;
- a product with a quantized weight shows the copies that its kernel makes inside;
- for a GPU the int8 product keeps what CUDA's keeps, a 4-bit product of few rows needs no copy of
  its weight where bitsandbytes' own rule for that GPU says so, and the state of a paged optimizer
  lies in host memory.

An experiment may be the first to import bitsandbytes: it is loaded outside the simulation.

Source: bitsandbytes 0.50, ``autograd/_functions.py``, ``optim/optimizer.py``,
``backends/default/ops.py`` and ``backends/cuda/ops.py``.

Limits: on AMD's GPUs a 4-bit product copies its weight from ``COPIED_ROWS`` rows on. What a
quantizing kernel makes inside is not shown. Paged state is counted on
the host, also where it would migrate to the GPU. Int8 weights are quantized wherever they were
made, which a real GPU does only on the way from the CPU. On the CPU the packed form of 4-bit
weights for inference is left out, and 8-bit optimizers widen one parameter's state at a time.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from gpumem.hardware.catalogue import Gpu

#: Below, every GPU multiplies by the packed weight; on NVIDIA's it depends on more.
COPIED_ROWS = 8
#: ``Optimizer8bit.get_state_buffer`` pages the state of parameters with at least so many elements.
PAGED_ELEMENTS = 100_000


@contextmanager
def fake_bitsandbytes(gpu: Gpu | None) -> Iterator[None]:
    """Inside, bitsandbytes works on fake tensors for ``gpu``, however late it is imported."""
    with ExitStack() as stack:

        def prepare() -> None:
            stack.enter_context(mock.patch.object(torch.Tensor, "_make_subclass", _make_subclass))
            for patch in _patches(gpu):
                stack.enter_context(patch)

        if "bitsandbytes" in sys.modules:
            prepare()
        else:
            arrival = _Arrival(prepare)
            sys.meta_path.insert(0, arrival)
            stack.callback(sys.meta_path.remove, arrival)
        yield


class _Arrival(MetaPathFinder):
    """Lets the first import of bitsandbytes run outside the simulation, and then prepares it."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self.prepare = prepare

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "bitsandbytes" else None
        if spec is None:
            return None
        run = spec.loader.exec_module

        def run_outside(module: ModuleType) -> None:
            del spec.loader.exec_module
            with _disable_current_modes(), unset_fake_temporarily():
                run(module)
            self.prepare()

        spec.loader.exec_module = run_outside
        return spec


_plain_make_subclass = torch.Tensor._make_subclass


def _make_subclass(kind: type, data: torch.Tensor, *requires_grad: bool, **options: Any) -> Any:
    """A fake tensor cannot become another class's; its own class can get a second parent."""
    if not isinstance(data, FakeTensor) or issubclass(kind, FakeTensor):
        return _plain_make_subclass(kind, data, *requires_grad, **options)
    parameter = torch.nn.Parameter(data, *(requires_grad or (False,)))
    parameter.__class__ = _fake_kind(kind)
    return parameter


@functools.cache
def _fake_kind(kind: type) -> type:
    def detach(self: Any) -> Any:
        # `torch.nn.Parameter(parameter)` insists that this returns its own kind.
        detached = FakeTensor.detach(self)
        detached.__class__ = type(self)
        detached.__dict__.update(self.__dict__)
        return detached

    return type(kind.__name__, (FakeTensor, kind), {"detach": detach})


def _patches(gpu: Gpu | None) -> Iterator[Any]:
    import bitsandbytes
    from bitsandbytes import functional
    from bitsandbytes.autograd import _functions
    from bitsandbytes.nn import modules
    from bitsandbytes.optim.optimizer import Optimizer8bit

    as_cuda = gpu is not None
    patch, plain_product = mock.patch.object, bitsandbytes.matmul
    yield patch(functional, "create_dynamic_map", _for_real(functional.create_dynamic_map))
    # Tables are kept for the process: a fake one must not stay, a real one not come in.
    yield mock.patch.dict(functional.name2qmap, clear=True)
    yield patch(_functions, "torch", _with_visible_copies(gpu))
    yield patch(_functions.logger, "disabled", True)  # it names each cast of each int8 layer
    yield patch(modules, "has_avx512bf16", lambda: False)  # such a CPU packs weights by pointer

    def product(a, b, out=None, state=None, threshold=0.0, bias=None):
        if state is not None:
            state.threshold = 0.0  # no outliers
        if as_cuda:
            return _functions.MatMul8bitLt.apply(a, b, out, bias, state)
        return plain_product(a, b, out=out, state=state, bias=bias)

    yield patch(bitsandbytes, "matmul", product)
    if as_cuda:
        yield patch(functional, "is_on_gpu", lambda tensors: True)  # it refuses paged ones here
        yield patch(Optimizer8bit, "get_state_buffer", _state_buffer)


def _for_real(function: Callable) -> Callable:
    """A table's values decide how many there are: it is computed outside the simulation."""

    @functools.cache
    def length(*args: Any, **kwargs: Any) -> int:
        with _disable_current_modes(), unset_fake_temporarily():
            return len(function(*args, **kwargs))

    return lambda *args, **kwargs: torch.empty(length(*args, **kwargs), device="cpu")


# --- what the kernels do inside, as bitsandbytes' own Python for all devices does it --------------


class _Instead:
    """``original`` with other values for some attributes."""

    def __init__(self, original: Any, **others: Any) -> None:
        self._original = original
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _with_visible_copies(gpu: Gpu | None) -> _Instead:
    """``torch`` for bitsandbytes' products. PyTorch itself goes on finding the real operators."""
    ops = _Instead(
        torch.ops.bitsandbytes,
        int8_scaled_mm=SimpleNamespace(default=_int8_scaled_product),
        gemm_4bit=SimpleNamespace(default=functools.partial(_product_4bit, gpu)),
    )
    return _Instead(torch, ops=_Instead(torch.ops, bitsandbytes=ops))


def _int8_scaled_product(a, b, row_stats, column_stats, bias=None, dtype=None):
    ops, half = torch.ops.bitsandbytes, torch.float16
    product = ops.int8_linear_matmul.default(a, b)  # int32
    out = ops.int8_mm_dequant.default(product, row_stats, column_stats, dtype=half, bias=bias)
    return out.to(dtype or half)


def _product_4bit(gpu, a, packed, shape, absmax, blocksize, quant_type, bias=None, **nested):
    ops, rows = torch.ops.bitsandbytes, prod(a.shape[:-1])
    aligned = a.shape[-1] % blocksize == 0
    if gpu is not None and aligned and _multiplies_packed(gpu, a.dtype, rows, *shape):
        return ops.gemm_4bit.default(
            a, packed, shape, absmax, blocksize, quant_type, bias=bias, **nested
        )
    if nested:
        scales = ops.dequantize_blockwise.default(
            nested["absmax_8bit"], absmax, nested["absmax_code"], 256, torch.float32
        )
        absmax = scales + nested["absmax_offset"]
    weight = ops.dequantize_4bit.default(packed, absmax, blocksize, quant_type, shape, a.dtype)
    return torch.nn.functional.linear(a, weight, bias)


def _multiplies_packed(gpu: Gpu, dtype: torch.dtype, m: int, n: int, k: int) -> bool:
    """Return whether ``gpu`` multiplies [m, k] by a packed weight [n, k], by bitsandbytes' rule."""
    if gpu.multiprocessors is None or gpu.compute_capability is None:
        return m < COPIED_ROWS
    ops = _cuda_operators()
    if m > ops._gemm_4bit_custom_max_m:
        return False
    of_gpu = (gpu.multiprocessors, *gpu.compute_capability)
    with mock.patch.object(ops, "_gpu_dispatch_props", return_value=of_gpu):
        return ops._gemm_4bit_use_custom_cuda.__wrapped__(0, dtype, m, n, k)


@functools.cache
def _cuda_operators() -> ModuleType:
    """Import what bitsandbytes itself imports only beside PyTorch's CUDA build."""
    if hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return importlib.import_module("bitsandbytes.backends.cuda.ops")
    with mock.patch.object(torch._C, "_cuda_getCurrentRawStream", None, create=True):
        return importlib.import_module("bitsandbytes.backends.cuda.ops")


def _state_buffer(optimizer: Any, parameter: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    paged = optimizer.is_paged and parameter.numel() >= PAGED_ELEMENTS
    device = "cpu" if paged else parameter.device
    return torch.zeros_like(parameter, dtype=dtype, device=device)

"""What labkit leans on inside PyTorch and transformers, where no test of the module that uses it
would say what a new version has changed.
"""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Collects the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


# --- fake tensors: fake_tensors ------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    ],
)
def test_optimizers_choose_their_form_by_one_function(optimizer, monkeypatch):
    """``_default_to_fused_or_foreach`` in each optimizer's module (`fake_tensors`): returns
    (fused, foreach); on the CPU neither, and what it returns is obeyed."""
    from gpumem.fake_cuda.fake_tensors import _optimizer_modules

    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def operators():
        stepper = getattr(torch.optim, optimizer)(layers.parameters(), lr=0.1)
        for p in layers.parameters():
            p.grad = torch.ones_like(p)
        with Recorder() as seen:
            stepper.step()
        return any(name.startswith("_foreach") for name in seen.names)

    assert not operators()
    for module in _optimizer_modules():
        monkeypatch.setattr(module, "_default_to_fused_or_foreach", lambda *_, **__: (False, True))
    assert operators()


# --- attention: attention ------------------------------------------------------------------------


def test_which_version_groups_heads_in_the_memory_efficient_kernel():
    """PyTorch's own ``sdp_utils_cpp.h``: the change that taught that kernel grouped heads also
    gave the check a ``supports_mqa`` (`attention_rules`)."""
    header = Path(torch.__file__).parent / "include/ATen/native/transformers/sdp_utils_cpp.h"
    if not header.exists():
        pytest.skip("this PyTorch came without its headers")
    text = header.read_text()
    assert "check_batch_size_and_num_heads_dense" in text
    assert ("supports_mqa" in text) == (torch.__version__ >= (2, 14))


# --- bitsandbytes: bitsandbytes, tracker ---------------------------------------------------------


def test_bitsandbytes_pages_from_this_size():
    """The bound in bitsandbytes' source that gpumem.fake_cuda.bitsandbytes repeats."""
    import inspect

    from bitsandbytes.optim.optimizer import Optimizer8bit

    from gpumem.fake_cuda.bitsandbytes import PAGED_ELEMENTS

    assert "p.numel() < 1e5" in inspect.getsource(Optimizer8bit.get_state_buffer)
    assert PAGED_ELEMENTS == 1e5


# --- counting work and bytes: tracker, measurement -----------------------------------------------


def test_a_product_that_is_told_its_results_dtype_counts_as_any_other():
    from gpumem.costs import flops_of

    left, right = torch.ones(2, 3), torch.ones(3, 5)
    for func, args in (
        (torch.ops.aten.mm.dtype, (left, right, torch.float32)),
        (torch.ops.aten.addmm.dtype, (torch.ones(5), left, right, torch.float32)),
    ):
        assert flops_of(func, args, {}, torch.ones(2, 5)) == 2 * 2 * 3 * 5


def test_attention_flops_come_from_shapes():
    """Two products forward, five backward; the CPU's flash kernel, which PyTorch's registry has
    since 2.15 only, counts as the others."""
    from torch.utils.flop_counter import flop_registry

    from gpumem.costs import FLOP_FORMULAS

    shape = (2, 4, 16, 8)  # batch, heads, tokens, head
    product = 2 * 2 * 4 * 16 * 16 * 8
    kernel, x = aten._scaled_dot_product_flash_attention_for_cpu, torch.ones(shape)
    assert FLOP_FORMULAS[kernel](x, x, x, out_val=x) == 2 * product
    if kernel in flop_registry:
        assert flop_registry[kernel](x, x, x, out_val=x) == 2 * product
    shared = torch.ones(2, 2, 16, 8)  # two heads of keys for four: PyTorch counts them since 2.12
    for kernel in ("flash", "cudnn"):
        forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention")
        backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward")
        assert FLOP_FORMULAS[forward](x, shared, shared, out_val=x) == 2 * product
        assert FLOP_FORMULAS[backward](x, x, shared, shared, out_val=x) == 5 * product


@pytest.mark.parametrize("direction", ["", "_backward"])
@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn", "flash_for_cpu"])
def test_causal_attention_counts_half(kernel, direction):
    """``is_causal`` in the schema of each fused kernel (gpumem.costs)."""
    from gpumem.costs import flops_of

    kind, _, on_cpu = kernel.partition("_")
    name = f"_scaled_dot_product_{kind}_attention{'_' * bool(on_cpu)}{on_cpu}{direction}"
    kernel = getattr(aten, name).default
    x = torch.ones(2, 4, 16, 8)
    values = {"Tensor": x, "Optional[Tensor]": None, "bool": False, "int": 16, "float": 0.0}

    def counted(causal):
        args = [
            causal if each.name == "is_causal" else values.get(str(each.type))
            for each in kernel._schema.arguments
            if not each.kwarg_only
        ]
        return flops_of(kernel, tuple(args), {}, x)

    assert 0 < 2 * counted(True) == counted(False)

"""What labkit leans on inside PyTorch and transformers, one test per thing.

Most of these names are private, or their behaviour is promised nowhere. When a new version changes
one, the test that fails here says which, and which module of labkit uses it.
"""

import gc
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Notes what each operator was and gave."""

    def __init__(self):
        super().__init__()
        self.calls, self.given = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append(func)
        self.given.append(out)
        return out

    @property
    def names(self):
        """Short names, without the aliases that PyTorch makes for its own use."""
        names = [func.__name__.partition(".")[0] for func in self.calls]
        return [name for name in names if name not in ("detach", "lift_fresh")]


# --- seeing operators: labkit.tracker ----------------------------------------------------------


def test_a_dispatch_mode_sees_in_place_view_and_out_operators():
    """``TorchDispatchMode`` (labkit.tracker): nothing that allocates passes it by."""
    with Recorder() as seen:
        x = torch.zeros(4)
        x.add_(1)
        x.view(2, 2)
        torch.add(x, x, out=torch.empty(4))
        x[:2] = 0
    assert seen.names == ["zeros", "add_", "view", "empty", "add", "slice", "fill_"]
    assert seen.given[seen.calls.index(aten.add_.Tensor)] is x


# --- the life of a storage: labkit.tracker ------------------------------------------------------


def test_a_weak_reference_dies_exactly_when_the_storage_is_freed():
    """Weak references to ``UntypedStorage`` (labkit.tracker): alive while any tensor, view or
    graph holds the memory, gone at once with the last of them."""
    died = []
    x = torch.zeros(8, requires_grad=True)
    y = x * 2
    ref = weakref.ref(y.untyped_storage(), died.append)
    view = y[:3].detach()
    z = y.exp() + y  # autograd saves exp's result, and y only through the view
    del y
    gc.collect()
    assert not died
    del z
    assert not died
    del view
    assert died == [ref]
    assert ref() is None


def test_a_weak_reference_lives_while_only_the_graph_holds_the_storage():
    """Weak references to ``UntypedStorage`` (labkit.tracker): a tensor that only autograd saved
    has no Python object, and still counts."""
    died = []
    hidden = torch.zeros(8, requires_grad=True) * 2
    ref = weakref.ref(hidden.untyped_storage(), died.append)
    loss = hidden.sin()
    del hidden
    gc.collect()
    assert not died
    assert ref() is not None
    loss.sum().backward()
    assert died == [ref]


def test_cdata_is_a_storages_identity():
    """``UntypedStorage._cdata`` (labkit.tracker's key): one value per storage, whatever Python
    object stands for it."""
    x, other = torch.zeros(4), torch.zeros(4)
    addresses = {t.untyped_storage()._cdata for t in (x, x[:2], x.view(2, 2), x.detach())}
    assert len(addresses) == 1
    assert other.untyped_storage()._cdata not in addresses


# --- what autograd saves: labkit.tracker --------------------------------------------------------


def test_entering_saved_tensors_hooks_pushes_the_default_hooks():
    """``saved_tensors_hooks.__enter__`` and ``torch._C._autograd.
    _push_saved_tensors_default_hooks`` (labkit.tracker wraps other people's hooks there)."""
    pushed = []
    hooks = saved_tensors_hooks(lambda t: t, lambda t: t)
    name = "_push_saved_tensors_default_hooks"
    with mock.patch.object(torch._C._autograd, name, lambda *pair: pushed.append(pair)):
        hooks.__enter__()
    assert pushed == [(hooks.pack_hook, hooks.unpack_hook)]


def test_checkpointing_saves_through_saved_tensors_hooks():
    """``torch.utils.checkpoint`` without re-entry (labkit.tracker): it enters
    ``saved_tensors_hooks`` in forward and again when it recomputes."""
    entered = []
    original = saved_tensors_hooks.__enter__

    def enter(hooks):
        entered.append(type(hooks).__qualname__)
        return original(hooks)

    x = torch.ones(4, requires_grad=True)
    with mock.patch.object(saved_tensors_hooks, "__enter__", enter):
        y = checkpoint(torch.sin, x, use_reentrant=False)
        assert len(entered) == 1
        y.sum().backward()
    assert len(entered) == 2


def test_checkpointing_stops_recomputing_early():
    """``torch.utils.checkpoint``'s early stop (labkit.tracker): the last tensor that backward
    needs is kept, then an exception leaves the recomputation; later operators do not run again."""
    calls = []

    def block(x):
        y = x.sin()
        calls.append("sin")
        y = y * 2  # saves nothing of x's size that backward would wait for
        calls.append("times")
        return y + 1

    x = torch.ones(4, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert calls == ["sin", "times"]  # the second time it stopped inside `sin`


def test_checkpointing_keeps_the_random_state_through_torch():
    """``torch.get_rng_state`` and ``set_rng_state`` (labkit.fake.mode answers both for real):
    looked up on the module at the time of the call."""
    x = torch.ones(4, requires_grad=True)
    with (
        mock.patch.object(torch, "get_rng_state", wraps=torch.get_rng_state) as get,
        mock.patch.object(torch, "set_rng_state", wraps=torch.set_rng_state) as put,
    ):
        checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert get.called
    assert put.called


def test_the_graph_task_says_whether_backward_runs():
    """``torch._C._current_graph_task_id`` (labkit.tracker's backward phase): -1 outside."""
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(torch._C._current_graph_task_id()))
    assert torch._C._current_graph_task_id() == -1
    (x * 2).sum().backward()
    assert seen[0] != -1
    assert torch._C._current_graph_task_id() == -1


# --- fake tensors: labkit.fake.mode --------------------------------------------------------------


def test_fake_mode_can_be_left_for_a_moment():
    """``unset_fake_temporarily`` and ``_disable_current_modes`` (labkit.fake.mode: the random state
    is real)."""
    from torch.utils._python_dispatch import _disable_current_modes

    with FakeTensorMode(), Recorder() as seen:
        with _disable_current_modes(), unset_fake_temporarily():
            real = torch.ones(2)
        assert torch.ones(2).device.type == "cpu"
    assert type(real) is torch.Tensor
    assert seen.names == ["ones"]


def test_moving_a_module_swaps_tensors_through_torch_utils():
    """``torch.utils.swap_tensors`` (labkit.fake.mode replaces it): ``Module.to`` looks it up there
    for parameters that are tensor sub-classes, fake ones too."""
    with FakeTensorMode():
        layer = nn.Linear(2, 2)
        with mock.patch(
            "torch.utils.swap_tensors", side_effect=lambda a, b: setattr(a, "data", b.data)
        ) as swap:
            layer.to(torch.bfloat16)
    assert swap.call_count == 2
    assert layer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "optimizer", ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam",
                  "RMSprop", "Rprop", "SGD"],
)  # fmt: skip
def test_optimizers_choose_their_form_by_one_function(optimizer):
    """``_default_to_fused_or_foreach`` in each optimizer's module (labkit.fake.mode): returns
    (fused, foreach); on the CPU neither, and what it returns is obeyed."""
    from labkit.fake.mode import _optimizer_modules

    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def operators():
        stepper = getattr(torch.optim, optimizer)(layers.parameters(), lr=0.1)
        for p in layers.parameters():
            p.grad = torch.ones_like(p)
        with Recorder() as seen:
            stepper.step()
        return any(name.startswith("_foreach") for name in seen.names)

    assert not operators()
    patches = [
        mock.patch.object(module, "_default_to_fused_or_foreach", return_value=(False, True))
        for module in _optimizer_modules()
    ]
    for patch in patches:
        patch.start()
    try:
        assert operators()
    finally:
        for patch in patches:
            patch.stop()


def test_packed_sequences_are_looked_for_by_one_function():
    """``transformers.masking_utils.find_packed_sequence_indices`` (labkit.fake.mode answers None):
    the masks look it up in their module, and None means that nothing is packed."""
    import transformers.masking_utils as masking
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=16,
                    num_attention_heads=1, use_cache=False)
    )  # fmt: skip
    tokens = torch.zeros(1, 4, dtype=torch.long)
    expected = model(input_ids=tokens).logits
    with mock.patch.object(masking, "find_packed_sequence_indices", return_value=None) as find:
        assert torch.equal(model(input_ids=tokens).logits, expected)
    assert find.called


# --- autocast: labkit.fake.autocast -------------------------------------------------------------


def test_the_cpus_autocast_rule_of_one_operator_can_be_replaced():
    """``torch.library.Library.impl(..., "AutocastCPU")``, ``_ExcludeDispatchKeyGuard`` and
    ``Library._destroy`` (labkit.fake.autocast)."""
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def in_float32(x, *args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(without):
            return aten.exp.default(x.float())

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("exp", in_float32, "AutocastCPU")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert x.exp().dtype == torch.float32
        assert x.exp().dtype == torch.bfloat16
    finally:
        library._destroy()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert x.exp().dtype == torch.bfloat16


# --- attention: labkit.fake.attention -----------------------------------------------------------


def test_attention_can_be_taken_over_above_autograd():
    """``torch.library.Library.impl(..., "AutogradCPU")``, ``Library._destroy`` and
    ``OpOverload.decompose`` (labkit.fake.attention): the kernel stands below autocast, sees
    ``requires_grad``, and PyTorch's own is still there to be called."""
    operator, seen = aten.scaled_dot_product_attention.default, []
    x = torch.ones(1, 1, 4, 8, requires_grad=True)

    def kernel(query, *args, **kwargs):
        seen.append((query.dtype, query.requires_grad))
        return operator.decompose(query, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", kernel, "AutogradCPU")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = nn.functional.scaled_dot_product_attention(x, x, x)
        out.sum().backward()
    finally:
        library._destroy()
    nn.functional.scaled_dot_product_attention(x, x, x)
    assert seen == [(torch.bfloat16, True)]
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "extra", "rows"),
    [("flash", (), (40,)), ("efficient", (None, True), (64,)), ("cudnn", (None, True), (40, 1))],
)
def test_cudas_attention_operators_have_shapes_on_fake_cpu_tensors(name, extra, rows):
    """``aten._scaled_dot_product_{flash,efficient,cudnn}_attention`` (labkit.fake.attention): the
    meta functions serve a CPU device too, and tell what backward keeps: the log-sum-exp."""
    operator = getattr(aten, f"_scaled_dot_product_{name}_attention")
    gpu = torch.device("cpu", 0)
    with FakeTensorMode():
        x = torch.ones(2, 4, 40, 16, dtype=torch.float16, device=gpu, requires_grad=True)
        out, log_sum_exp, *_ = operator(x, x, x, *extra)
        out.sum().backward()
    assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, gpu)
    assert (log_sum_exp.shape, log_sum_exp.dtype) == ((2, 4, *rows), torch.float32)
    assert (x.grad.shape, x.grad.device) == (x.shape, gpu)


def test_what_sdpa_kernel_sets_can_be_read():
    """``torch._C._get_sdp_priority_order`` and ``torch.backends.cuda.*_sdp_enabled``
    (labkit.fake.attention), in a build without CUDA too."""
    from torch.nn.attention import sdpa_kernel

    from labkit.fake.attention import _preferences
    from labkit.fake.attention_rules import CUDNN, EFFICIENT, FLASH, MATH, ORDER

    assert tuple(torch._C._get_sdp_priority_order())[: len(ORDER)] == tuple(map(int, ORDER))
    assert _preferences() == (frozenset({FLASH, EFFICIENT, MATH, CUDNN}), None)
    with sdpa_kernel([CUDNN, EFFICIENT], set_priority=True):
        allowed, order = _preferences()
    assert (allowed, order[:2]) == ({CUDNN, EFFICIENT}, (CUDNN, EFFICIENT))


def test_which_version_groups_heads_in_the_memory_efficient_kernel():
    """PyTorch's own ``sdp_utils_cpp.h``: the change that taught that kernel grouped heads also
    gave the check a ``supports_mqa`` (labkit.fake.attention_rules' ``EFFICIENT_TAKES_GROUPS``)."""
    from labkit.fake.attention_rules import EFFICIENT_TAKES_GROUPS

    header = Path(torch.__file__).parent / "include/ATen/native/transformers/sdp_utils_cpp.h"
    if not header.exists():
        pytest.skip("this PyTorch came without its headers")
    text = header.read_text()
    assert "check_batch_size_and_num_heads_dense" in text
    assert ("supports_mqa" in text) == EFFICIENT_TAKES_GROUPS


def test_the_plain_forms_softmax_has_that_backward():
    """``aten._safe_softmax`` and ``_softmax_backward_data`` (labkit.fake.attention's plain form):
    autograd keeps the result only, and rows without any score are zeros."""
    from labkit.fake.attention import _SafeSoftmax

    scores = torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]], requires_grad=True)
    ours, theirs = _SafeSoftmax.apply(scores), aten._safe_softmax(scores, -1)
    assert torch.equal(ours, theirs)
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    gradients = [torch.autograd.grad((y * weights).sum(), scores)[0] for y in (ours, theirs)]
    assert torch.equal(*gradients)


# --- bitsandbytes: labkit.fake.bitsandbytes, labkit.tracker -------------------------------------


def test_fake_tensors_keep_two_cpus_apart():
    """``FakeTensor.fake_device`` (labkit.fake.mode, labkit.fake.bitsandbytes): a tensor's device
    is this attribute, ``cpu`` and ``cpu:0`` are two, and setting ``.data`` leaves it alone."""
    with FakeTensorMode():
        host, gpu = torch.zeros(2), torch.zeros(2, device="cpu:0")
        assert (host.device.index, gpu.device.index) == (None, 0)
        with pytest.raises(RuntimeError, match="same device"):
            host + gpu
        host.data = gpu.data
        assert host.device.index is None
        host.fake_device = gpu.device
        assert host.device == gpu.device
        assert (host + gpu).device.index == 0


def test_a_fake_parameter_can_become_a_kind_of_its_own():
    """``FakeTensor.__class__`` can be set to a class that also descends from a parameter's
    (labkit.fake.bitsandbytes), and ``Parameter`` then asks ``detach`` for the same class."""
    from torch._subclasses.fake_tensor import FakeTensor

    class Kind(nn.Parameter):
        pass

    both = type("Kind", (FakeTensor, Kind), {})
    with FakeTensorMode():
        parameter = nn.Parameter(torch.zeros(2), False)
        parameter.__class__ = both
        assert isinstance(parameter, Kind)
        assert isinstance(parameter + 1, FakeTensor)


def test_bitsandbytes_looks_up_what_is_replaced():
    """``Tensor._make_subclass``, and names in bitsandbytes' modules (labkit.fake.bitsandbytes):
    each is found in its module at the time of the call."""
    import inspect

    import bitsandbytes
    from bitsandbytes import functional
    from bitsandbytes.autograd import _functions
    from bitsandbytes.nn import modules
    from bitsandbytes.optim import optimizer

    for kind in (modules.Params4bit, modules.Int8Params):
        assert "torch.Tensor._make_subclass(cls," in inspect.getsource(kind.__new__)
    assert "bnb.matmul(" in inspect.getsource(modules.Linear8bitLt.forward)
    assert "has_avx512bf16()" in inspect.getsource(modules.Linear4bit.__init__)
    assert modules.bnb is bitsandbytes
    for function, operator in (
        (_functions.MatMul8bitLt.forward, "int8_scaled_mm.default("),
        (_functions.MatMul4Bit.forward, "gemm_4bit.default("),
        (_functions.matmul_4bit, "gemm_4bit.default("),
    ):
        assert f"torch.ops.bitsandbytes.{operator}" in inspect.getsource(function)
    assert "F.create_dynamic_map(" in inspect.getsource(optimizer.Optimizer8bit.fill_qmap)
    assert optimizer.F is functional
    assert "is_on_gpu(" in inspect.getsource(functional.optimizer_update_32bit)
    assert 'name2qmap["dynamic"]' in inspect.getsource(functional.quantize_blockwise)


def test_bitsandbytes_pages_and_copies_from_these_sizes():
    """The bounds in bitsandbytes' source that labkit.fake.bitsandbytes repeats."""
    import inspect

    import bitsandbytes
    from bitsandbytes.optim.optimizer import Optimizer8bit

    from labkit.fake.bitsandbytes import COPIED_ROWS, PAGED_ELEMENTS

    assert "p.numel() < 1e5" in inspect.getsource(Optimizer8bit.get_state_buffer)
    assert PAGED_ELEMENTS == 1e5
    folder = Path(bitsandbytes.__file__).parent
    cuda = (folder / "backends/cuda/ops.py").read_text()
    assert f"return M < {COPIED_ROWS}\n" in cuda
    assert "if M > 512:\n        return False" in cuda


# --- counting work and bytes: tracker, measurement --------------------------------------------


def test_the_profiler_gives_every_allocation_and_free():
    """``profile(profile_memory=True).profiler.kineto_results.events()`` (labkit.measurement's
    allocator record): ``[memory]`` events with signed ``nbytes`` and ``start_ns``."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as record:
        x = torch.zeros(1 << 18)
        del x
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if abs(e.nbytes()) > 9]
    assert sizes == [1 << 20, -(1 << 20)]


def test_attention_flops_come_from_shapes():
    """``sdpa_flop_count`` and ``sdpa_backward_flop_count`` (labkit.work, for the CPU's flash
    kernel, which the registry has since 2.15 only): two products forward, five backward."""
    from torch.utils.flop_counter import (
        flop_registry,
        sdpa_backward_flop_count,
        sdpa_flop_count,
    )

    from labkit.work import FLOP_FORMULAS

    shape = (2, 4, 16, 8)  # batch, heads, tokens, head
    product = 2 * 2 * 4 * 16 * 16 * 8
    assert sdpa_flop_count(shape, shape, shape) == 2 * product
    assert sdpa_backward_flop_count(shape, shape, shape, shape) == 5 * product
    kernel, x = aten._scaled_dot_product_flash_attention_for_cpu, torch.ones(shape)
    assert FLOP_FORMULAS[kernel](x, x, x, out_val=x) == 2 * product
    if kernel in flop_registry:
        assert flop_registry[kernel](x, x, x, out_val=x) == 2 * product


def test_attention_on_the_cpu_is_the_flash_kernel():
    """``aten._scaled_dot_product_flash_attention_for_cpu`` (labkit.fake.attention, for the host's
    tensors and for cards of other vendors): it keeps the output and the log-sum-exp."""
    q = torch.ones(1, 2, 8, 4, requires_grad=True)
    with Recorder() as seen:
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    at = seen.names.index("_scaled_dot_product_flash_attention_for_cpu")
    out, log_sum_exp = seen.given[at]
    assert out.shape == q.shape
    assert log_sum_exp.numel() == 1 * 2 * 8


# --- CUDA: hardware.cuda --------------------------------------------------------------------------


def test_private_cuda_functions_exist():
    """``torch.cuda.memory._record_memory_history`` and ``_dump_snapshot`` (hardware.cuda), with the
    arguments that it gives them; clearing cuBLAS workspaces, where PyTorch was built with CUDA."""
    import inspect

    names = inspect.signature(torch.cuda.memory._dump_snapshot).parameters
    assert next(iter(names)) == "filename"
    source = inspect.getsource(torch.cuda.memory._record_memory_history)
    assert all(word in source for word in ("enabled", "stacks", "max_entries"))
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces") or torch.version.cuda is None


# --- Jupyter: hardware.cuda.free_memory -----------------------------------------------------------


def test_ipython_keeps_the_last_error_where_we_clear_it():
    """``InteractiveShell.InteractiveTB.tb`` and ``.last_execution_result`` (hardware.cuda)."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    try:
        with mock.patch.object(sys, "stdout"):
            shell.run_cell("1 / 0")
        assert shell.InteractiveTB.tb is not None
        assert shell.last_execution_result.error_in_exec is not None
    finally:
        shell.InteractiveTB.tb = shell.last_execution_result = None
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        shell.history_manager.end_session()

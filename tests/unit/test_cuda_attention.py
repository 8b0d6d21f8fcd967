"""Which attention kernel a card takes, what the kernel then keeps, and that all of it goes away."""

import itertools
import math

import pytest
import torch
from torch.backends.cuda import SDPAParams
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from gpumem.fake_cuda import attention
from gpumem.fake_cuda.attention import cuda_attention_choice
from gpumem.fake_cuda.attention_rules import CUDNN, EFFICIENT, FLASH, MATH, attention_kernel
from gpumem.fake_cuda.fake_tensors import GPU_DEVICE, fake_tensors
from gpumem.hardware.catalogue import GPUS, gpu
from gpumem.inputs import InputError
from gpumem.torch_release import following
from gpumem.tracker import track

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
T4, A100, RTX_3090, RTX_5090, H100 = (7, 5), (8, 0), (8, 6), (12, 0), (9, 0)
BATCH, HEADS, TOKENS, HEAD = 2, 4, 40, 16


def described(query, key, value, mask=None, dropout=0.0, causal=False, grouped=False):
    return SDPAParams(query, key, value, mask, dropout, causal, grouped)


def shaped(*shape, dtype=FP16, needs_grad=True):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_grad)


def call(
    dtype=FP16,
    key_heads=HEADS,
    tokens=TOKENS,
    keys=None,
    head=HEAD,
    needs_grad=True,
    mask=None,
    mask_needs_grad=False,
    gaps=False,
    **others,
):
    how = {"dtype": dtype, "needs_grad": needs_grad}
    query = shaped(BATCH, HEADS, tokens, head, **how)
    key = shaped(BATCH, key_heads, keys or tokens, head, **how)
    mask = mask and shaped(*mask, dtype=dtype, needs_grad=mask_needs_grad)
    others.setdefault("grouped", key_heads != HEADS)
    return described(query, key.mT.contiguous().mT if gaps else key, key, mask, **others)


MASK = (TOKENS, TOKENS)
LETTERS = {EFFICIENT: "E", FLASH: "F", CUDNN: "C", MATH: "M"}
# The call, and what each generation takes: T4, A100, RTX 3090, H100.
TABLE = {
    "half precision": (call(FP16), "EFFC"),
    "bfloat16": (call(BF16), "MFFC"),
    "float32": (call(FP32), "EEEE"),
    "float64": (call(torch.float64), "MMMM"),
    "causal": (call(causal=True), "EFFC"),
    "causal, one query": (call(causal=True, tokens=1, keys=40), "EEEC"),
    "grouped": (call(key_heads=2), "MFFC"),
    "grouped float32": (call(FP32, key_heads=2), "MMMM"),
    "grouped and masked": (call(key_heads=2, mask=MASK), "MMMC"),
    "heads that do not divide": (call(key_heads=3), "MMMM"),
    "fewer key heads, not grouped": (call(key_heads=1, grouped=False), "MMMM"),
    "masked": (call(mask=MASK), "EEEC"),
    "a mask that is trained": (call(mask=MASK, mask_needs_grad=True), "EEEE"),
    "a mask of three dimensions": (call(mask=(HEADS, 40, 40)), "EEEE"),
    "dropout": (call(dropout=0.1), "EFFF"),
    "dropout in sixteenths": (call(dropout=0.125), "EFFC"),
    "odd head": (call(head=15), "MFFF"),
    "odd head, float32": (call(FP32, head=15), "EMMM"),
    "head of 192": (call(head=192), "EFFF"),
    "head of 224": (call(head=224), "EFEF"),
    "head of 224, no grad": (call(head=224, needs_grad=False), "EFFF"),
    "head of 256": (call(head=256), "EFFF"),
    "head of 256, dropout": (call(head=256, dropout=0.1), "EFEF"),
    "head of 264": (call(head=264), "EEEE"),
    "head of 264, grouped": (call(head=264, key_heads=2), "MMMM"),
    "one key": (call(keys=1), "EFFF"),
    "no token": (call(tokens=0), "MMMM"),
    "gaps": (call(gaps=True), "MMMM"),
}


@pytest.mark.parametrize("name", TABLE)
def test_every_generation_takes_its_kernel(name):
    wanted, expected = TABLE[name]
    with following("2.13"):
        taken = [attention_kernel(wanted, c) for c in (T4, A100, RTX_3090, H100)]
    assert "".join(LETTERS[kernel] for kernel in taken) == expected


def test_shapes_that_do_not_match():
    assert attention_kernel(described(*3 * [shaped(4, 40, 16)]), A100) is MATH
    query, key = shaped(2, 4, 40, 16), shaped(1, 4, 40, 16)
    assert attention_kernel(described(query, key, query), A100) is MATH
    key, value = shaped(2, 4, 40, 192), shaped(2, 4, 40, 128)
    mixed = described(key, key, value)
    assert attention_kernel(mixed, H100) is CUDNN
    assert attention_kernel(mixed, A100) is EFFICIENT  # flash wants one size


def test_newer_versions_group_heads_in_the_memory_efficient_kernel():
    with following("2.14"):
        assert attention_kernel(call(FP32, key_heads=2), T4) is EFFICIENT
        assert attention_kernel(call(FP32, key_heads=3), T4) is MATH


def test_a_choice_and_its_order_are_obeyed():
    assert attention_kernel(call(), A100, frozenset({EFFICIENT, MATH})) is EFFICIENT
    assert attention_kernel(call(), A100, frozenset({MATH})) is MATH
    assert attention_kernel(call(), A100, frozenset({CUDNN})) is CUDNN
    assert attention_kernel(call(), A100, order=(MATH, FLASH)) is MATH
    # Without an order of the experiment's own, cuDNN comes after math on most cards.
    assert attention_kernel(call(mask=MASK), A100, frozenset({CUDNN, MATH})) is MATH


def test_what_cuda_would_refuse_is_refused_with_the_reason():
    with pytest.raises(InputError, match=r"7\.5 flash needs compute capability 8\.0"):
        attention_kernel(call(), T4, frozenset({FLASH}))
    with pytest.raises(InputError, match="flash takes no explicit mask; cuDNN takes float16 and"):
        attention_kernel(call(FP32, mask=MASK), A100, frozenset({FLASH, CUDNN}))
    with pytest.raises(InputError, match="nothing is enabled"):
        attention_kernel(call(), A100, frozenset())


def test_compute_capabilities_fit_what_the_catalogue_says_of_bfloat16():
    for card in GPUS.values():
        if card.name.startswith("NVIDIA"):
            assert card.bf16_native == (card.compute_capability >= (8, 0))
        else:
            assert card.compute_capability is None


# --- what the kernels keep, byte for byte ------------------------------------------------------


def attend(card, dtype=FP16, key_heads=HEADS, head=HEAD, only=None, grad=True, **options):
    """One attention: bytes it leaves, bytes at its peak, both beyond its inputs, and operators."""
    with fake_tensors(gpu(card) if isinstance(card, str) else card), track(device="cpu:0") as log:
        made = {"device": GPU_DEVICE, "dtype": dtype, "requires_grad": grad}
        query = torch.randn(BATCH, HEADS, TOKENS, head, **made)
        key = torch.randn(BATCH, key_heads, TOKENS, head, **made)
        value = torch.randn(BATCH, key_heads, TOKENS, head, **made)
        if mask := options.pop("mask", None):
            options["attn_mask"] = torch.ones(*mask, dtype=torch.bool, device=GPU_DEVICE)
        before, first = log.live_bytes["cpu:0"], len(log.trace().events)
        with sdpa_kernel(only or [FLASH, EFFICIENT, MATH, CUDNN]):
            out = F.scaled_dot_product_attention(
                query, key, value, enable_gqa=key_heads != HEADS, **options
            )
        after, last = log.live_bytes["cpu:0"], len(log.trace().events)
        assert (out.shape, out.dtype, out.device) == (query.shape, dtype, GPU_DEVICE)
        if grad:
            out.sum().backward()
            for tensor in (query, key, value):
                assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, dtype)
    trace = log.trace()
    peak_bytes = trace.peak(start=first, stop=last).total_bytes
    return after - before, peak_bytes - before, {s.operator for s in trace.storages}


OUT = BATCH * HEADS * TOKENS * HEAD * 2  # in half precision
ROWS = BATCH * HEADS * TOKENS
PADDED_ROWS = BATCH * HEADS * 64  # 40 queries are padded to 64
SCORES = ROWS * TOKENS * 4  # float32
SEEDS = 16  # of dropout: two numbers of eight bytes; flash has a third, the others' are the host's


def test_flash_keeps_its_output_and_the_log_sum_exp():
    kept, peak, operators = attend("l4")
    assert kept == peak == OUT + 4 * ROWS + SEEDS + 8
    assert "_scaled_dot_product_flash_attention_backward" in operators
    assert attend("l4", is_causal=True)[:2] == (kept, peak)
    assert attend("l4", dropout_p=0.25)[:2] == (kept, peak)
    assert attend("l4", key_heads=2)[:2] == (kept, peak)  # no repeated keys


def test_flash_pads_heads_to_eight():
    kept, _, operators = attend("l4", head=15)
    assert kept == 4 * OUT + 4 * ROWS + SEEDS + 8  # three inputs and the output, of 16 again
    assert "_scaled_dot_product_flash_attention" in operators


def test_the_memory_efficient_kernel_pads_the_log_sum_exp():
    kept, peak, operators = attend("t4")
    assert kept == peak == OUT + 4 * PADDED_ROWS
    assert "_scaled_dot_product_efficient_attention_backward" in operators
    assert attend("t4", grad=False)[:2] == (OUT, OUT)  # none without backward


def test_nothing_is_kept_for_a_backward_that_autograd_does_not_record():
    with fake_tensors(gpu("t4")), track(device="cpu:0") as log, torch.no_grad():
        query = torch.randn(1, 1, 8, 8, device=GPU_DEVICE, requires_grad=True)
        F.scaled_dot_product_attention(query, query, query)
    made = [s for s in log.trace().storages if s.operator.endswith("efficient_attention")]
    assert (1, 1, 0) in [s.shape for s in made]  # the log-sum-exp


def test_the_memory_efficient_kernel_keeps_an_additive_mask():
    kept, peak, _ = attend("t4", mask=(TOKENS, TOKENS))
    assert kept == OUT + 4 * PADDED_ROWS + 2 * TOKENS * TOKENS
    assert peak == kept
    odd, _, _ = attend("t4", mask=(TOKENS, 1))  # padded to eight columns, the padding is kept
    assert odd == OUT + 4 * PADDED_ROWS + 2 * TOKENS * 8


def test_cudnn_takes_masks_and_groups():
    kept, _, operators = attend("h100", key_heads=2, mask=(TOKENS, TOKENS))
    assert kept == OUT + 4 * ROWS + SEEDS + 2 * TOKENS * TOKENS
    assert "_scaled_dot_product_cudnn_attention_backward" in operators


@pytest.mark.parametrize("card", ["t4", "a100-80gb", "h100"])
def test_grouped_heads_in_float32_build_the_scores(card):
    kept, peak, operators = attend(card, FP32, key_heads=2)
    # Scaled queries, keys for every head and scaled, values for every head, output.
    assert kept == 4 * (2 * OUT) + SCORES
    assert "_softmax_backward_data" in operators
    assert peak > kept + SCORES


def test_the_plain_form_widens_half_precision():
    kept, _, _ = attend("t4", FP16, key_heads=2)
    assert kept == 3 * (2 * OUT) + SCORES + OUT
    assert attend("t4", BF16)[0] == kept  # no bfloat16 in its kernels


def test_the_plain_forms_peak_is_two_matrices_of_scores_and_a_quarter():
    _, peak, _ = attend("l4", FP32, key_heads=2, grad=False)
    scaled_and_repeated, masked_rows = 3 * (2 * OUT), ROWS
    # Scores, their softmax, and where they are masked, a byte each.
    assert peak == scaled_and_repeated + 2 * SCORES + SCORES // 4 + masked_rows


def test_the_plain_form_takes_cudas_dropout():
    """A byte for each score that autograd keeps, where the CPU keeps a number of four."""
    without, _, _ = attend("l4", only=[MATH], dtype=FP32)
    kept, _, operators = attend("l4", only=[MATH], dtype=FP32, dropout_p=0.5)
    assert kept == without + SCORES + SCORES // 4
    assert "native_dropout" in operators


def test_an_experiments_own_choice_works_where_the_cpu_lacks_the_kernel():
    for only, name in ((EFFICIENT, "efficient"), (CUDNN, "cudnn"), (FLASH, "flash")):
        assert f"_scaled_dot_product_{name}_attention" in attend("l4", only=only)[2]
    assert "_softmax" in attend("l4", only=MATH)[2]
    with pytest.raises(InputError, match="no available attention kernel"):
        attend("t4", only=FLASH)
    with pytest.raises(InputError, match="not both"):
        attend("l4", only=MATH, mask=(TOKENS, TOKENS), is_causal=True)
    with sdpa_kernel([MATH, FLASH], set_priority=True):
        assert attention_kernel(call(), A100, *attention._preferences()) is MATH


@pytest.mark.parametrize("card", ["mi300x", "m4-max-128gb", None])
def test_cards_without_a_compute_capability_keep_the_fused_kernel(card):
    assert "_scaled_dot_product_flash_attention_for_cpu" in attend(card, FP32, key_heads=2)[2]


def test_attention_on_the_host_is_the_cpus():
    with fake_tensors(gpu("t4")), track() as log:
        query = torch.randn(1, 4, 8, 16, requires_grad=True)
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    operators = {s.operator for s in log.trace().storages}
    assert "_scaled_dot_product_flash_attention_for_cpu_backward" in operators


def test_autocast_and_checkpointing_reach_the_choice():
    with fake_tensors(gpu("l4")), track(device="cpu:0") as log:
        query = torch.randn(BATCH, HEADS, TOKENS, HEAD, device=GPU_DEVICE, requires_grad=True)
        with torch.autocast("cpu", dtype=FP16):
            out = checkpoint(
                lambda x: F.scaled_dot_product_attention(x, x, x), query, use_reentrant=False
            )
        assert out.dtype is FP16
        out.sum().backward()
    made = [s for s in log.trace().storages if s.operator == "_scaled_dot_product_flash_attention"]
    assert sum(s.shape == (BATCH, HEADS, TOKENS) for s in made) == 2  # once again in backward


def test_the_choice_goes_away_with_the_context():
    query = torch.randn(1, 2, 8, 4)
    expected = F.scaled_dot_product_attention(query, query, query)
    with pytest.raises(ZeroDivisionError), cuda_attention_choice(gpu("t4")):
        raise ZeroDivisionError
    with track() as log:
        assert torch.equal(F.scaled_dot_product_attention(query, query, query), expected)
    names = {s.operator for s in log.trace().storages}
    assert names == {"_scaled_dot_product_flash_attention_for_cpu"}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not has_kernel("aten::scaled_dot_product_attention", "AutogradCPU")


# --- the plain form against PyTorch's own, with real numbers -----------------------------------

PLAIN = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped": {"key_heads": 2, "is_causal": True},
    "masked": {"mask": True},
    "float mask": {"mask": False},
    "half": {"dtype": BF16, "is_causal": True},
    "scaled": {"scale": -0.3},
    "no heads": {"shape": (5, 8)},
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_form_computes_what_pytorchs_does(name):
    options = dict(PLAIN[name])
    torch.manual_seed(0)
    dtype, key_heads = options.pop("dtype", FP32), options.pop("key_heads", HEADS)
    shape = options.pop("shape", (2, HEADS, 6, 8))
    key_shape = (2, key_heads, 6, 8) if len(shape) == 4 else shape
    inputs = [torch.randn(s, dtype=dtype, requires_grad=True) for s in (shape, *2 * [key_shape])]
    if "mask" in options:
        allowed = torch.rand(6, 6) > 0.5
        allowed[0] = False  # a query that may look nowhere
        as_numbers = torch.zeros(6, 6, dtype=dtype).masked_fill(~allowed, -math.inf)
        options["attn_mask"] = allowed if options.pop("mask") else as_numbers
    grouped = key_heads != HEADS

    def gradients(out):
        return torch.autograd.grad(out.float().square().sum(), inputs)

    with sdpa_kernel(MATH):
        expected = F.scaled_dot_product_attention(*inputs, enable_gqa=grouped, **options)
    mask, scale = options.get("attn_mask"), options.get("scale")
    causal = options.get("is_causal", False)
    out = attention._math(described(*inputs, mask, causal=causal, grouped=grouped), scale)
    assert torch.equal(out, expected)
    for ours, theirs in zip(gradients(out), gradients(expected), strict=True):
        assert torch.equal(ours, theirs)


def allocated(work):
    """What the CPU's allocator gave: most bytes at once, and all together."""
    work()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as record:
        work()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes)), sum(n for n in changes if n > 0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("dtype", "key_heads"), [(FP32, 2), (FP32, 4), (BF16, 2)])
def test_the_plain_form_allocates_what_pytorchs_does(dtype, key_heads, grad):
    shapes = [(2, HEADS, 96, 16), *2 * [(2, key_heads, 96, 16)]]
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]
    plain = described(*inputs, causal=True, grouped=key_heads != HEADS)

    def theirs():
        with sdpa_kernel(MATH):
            return F.scaled_dot_product_attention(
                *inputs, is_causal=True, enable_gqa=key_heads != HEADS
            )

    ours = allocated(lambda: attention._math(plain, None))
    assert ours == pytest.approx(allocated(theirs), abs=64)  # numbers of one element

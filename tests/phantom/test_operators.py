"""Watching changes no operator's requests, and simulations know what each of them takes.

Each operator runs forward and backward on the phantom, unwatched and watched, and on fake tensors.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import labkit as lab
from gpumem.files import SOURCE
from gpumem.hardware import cuda
from phantom_gpu.known_values import MOST_KNOWN_FLOATS

B, T, C = 8, 128, 256


def x(*shape):
    return torch.randn(*(shape or (B, T, C)), requires_grad=True)


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.int64)


def ones(*shape, **options):
    return torch.ones(*shape, **options)


def mask(*shape):
    return torch.ones(*shape, dtype=torch.bool)


def image(channels=16, size=16):
    return x(B, channels, size, size)


def of_one(module, names):
    return {name: lambda name=name: getattr(module, name)(x()) for name in names.split()}


def of_dimension(names):
    return {
        f"{name} of a dimension": lambda name=name: getattr(torch, name)(x(), dim=-1)
        for name in names.split()
    }


def slice_assigned():
    whole = x(T, C) * 1
    whole[:5] = x(5, C)
    return whole


def autocast(dtype, build):
    with torch.autocast("cuda", dtype):
        return build()


def heads(**options):
    query, key, value = (x(B, 4, T, 64) for _ in range(3))
    return F.scaled_dot_product_attention(query, key, value, **options)


def attention(**options):
    tensors = (x() for _ in range(3))
    return nn.MultiheadAttention(C, 4, batch_first=True)(*tensors, **options)[0]


def gradient_penalty():
    rows = x(T, C)
    return torch.autograd.grad(F.linear(rows, x(8, C)).sum(), rows, create_graph=True)[0].norm(2, 1)


OPERATORS = {
    **of_one(torch, "exp log sqrt rsqrt sin cos tanh sigmoid abs sign reciprocal square erf"),
    **of_one(torch, "lgamma digamma log1p expm1 sinc atan nan_to_num prod sum mean std var norm"),
    **of_one(torch, "erfinv max min median amax amin relu"),
    **of_one(F, "gelu silu mish elu selu celu leaky_relu hardswish hardsigmoid softplus softsign"),
    **of_one(F, "tanhshrink logsigmoid hardtanh relu6 rrelu glu hardshrink softshrink normalize"),
    **of_one(F, "dropout alpha_dropout feature_alpha_dropout"),
    **of_dimension("sum mean std var norm prod amax amin logsumexp"),
    "softmax": lambda: x().softmax(-1),
    "log_softmax": lambda: x().log_softmax(-1),
    "gelu_tanh": lambda: F.gelu(x(), approximate="tanh"),
    "prelu": lambda: F.prelu(image(), x(16)),
    "dropout2d": lambda: F.dropout2d(image()),
    # losses
    "cross_entropy": lambda: F.cross_entropy(x(B * T, C), zeros(B * T)),
    "smoothed": lambda: F.cross_entropy(x(B * T, C), zeros(B * T), label_smoothing=0.1),
    "weighted": lambda: F.cross_entropy(x(B * T, C), zeros(B * T), weight=ones(C)),
    "soft targets": lambda: F.cross_entropy(x(B * T, C), ones(B * T, C)),
    "of pixels": lambda: F.cross_entropy(image(20), zeros(B, 16, 16), ignore_index=255),
    "bce_logits": lambda: F.binary_cross_entropy_with_logits(x(), ones(B, T, C)),
    "bce_pos_weight": lambda: F.binary_cross_entropy_with_logits(
        x(), ones(B, T, C), pos_weight=ones(C)
    ),
    "bce": lambda: F.binary_cross_entropy(x().sigmoid(), ones(B, T, C)),
    "mse": lambda: F.mse_loss(x(), ones(B, T, C)),
    "l1": lambda: F.l1_loss(x(), ones(B, T, C)),
    "smooth_l1": lambda: F.smooth_l1_loss(x(), ones(B, T, C)),
    "huber": lambda: F.huber_loss(x(), ones(B, T, C)),
    "kl_div": lambda: F.kl_div(x().log_softmax(-1), ones(B, T, C), reduction="batchmean"),
    "cosine": lambda: F.cosine_similarity(x(), x(), dim=-1),
    "triplet": lambda: F.triplet_margin_loss(x(T, C), x(T, C), x(T, C)),
    "cosine embedding": lambda: F.cosine_embedding_loss(x(T, C), x(T, C), ones(T)),
    "multi_margin": lambda: F.multi_margin_loss(x(T, C), zeros(T)),
    "poisson": lambda: F.poisson_nll_loss(x(T, C), ones(T, C)),
    "gaussian": lambda: F.gaussian_nll_loss(x(T, C), ones(T, C), ones(T, C)),
    # norms
    "layer_norm": lambda: F.layer_norm(x(), (C,), x(C), x(C)),
    "rms_norm": lambda: F.rms_norm(x(), (C,), x(C)),
    "group_norm": lambda: F.group_norm(image(32), 8, x(32), x(32)),
    "batch_norm": lambda: nn.BatchNorm2d(16)(image()),
    "instance_norm": lambda: F.instance_norm(image()),
    "local_response": lambda: F.local_response_norm(image(), 5),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(C, C))(x(T, C)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(C, C))(x(T, C)),
    # along a dimension
    "cumsum": lambda: x().cumsum(1),
    "cumprod": lambda: x().cumprod(1),
    "logcumsumexp": lambda: x().logcumsumexp(1),
    "sort": lambda: x().sort(-1).values,
    "topk": lambda: x().topk(5).values,
    "max of a dimension": lambda: x().max(-1).values,
    "median of a dimension": lambda: x().median(-1).values,
    "norm of ones": lambda: x().norm(p=1, dim=-1),
    "vector_norm": lambda: torch.linalg.vector_norm(x(), dim=-1),
    "segment_reduce": lambda: torch.segment_reduce(
        x(T, C), "sum", lengths=zeros(2) + T // 2, unsafe=True
    ),
    "quantile": lambda: x(T, C).quantile(0.5, dim=-1),
    "renorm": lambda: torch.renorm(x(T, C), 2, 0, 1.0),
    "diff": lambda: x(T, C).diff(),
    # indices
    "index": lambda: x(T, C)[zeros(50)],
    "mask as index": lambda: x(T, C)[~mask(T)],
    "unique": lambda: x(T * C) * torch.unique(zeros(T * C), return_inverse=True)[1],
    "index_select": lambda: x(T, C).index_select(0, zeros(50)),
    "gather": lambda: x(T, C).gather(1, zeros(T, 5)),
    "scatter_add": lambda: x(T, C).scatter_add(1, zeros(T, 5), x(T, 5)),
    "scatter_reduce": lambda: x(T, C).scatter_reduce(1, zeros(T, 5), x(T, 5), "mean"),
    "index_add": lambda: x(T, C).index_add(0, zeros(50), x(50, C)),
    "index_put": lambda: x(T, C).index_put((zeros(50),), x(50, C)),
    "masked_fill": lambda: x(T, C).masked_fill(mask(T, C), 0.0),
    "masked_scatter": lambda: x(T, C).masked_scatter(mask(T, C), x(T, C)),
    "where": lambda: torch.where(mask(T, C), x(T, C), x(T, C)),
    "clamp": lambda: x(T, C).clamp(-1, 1),
    "embedding": lambda: F.embedding(zeros(B, T), x(C, 64)),
    "padded embedding": lambda: F.embedding(zeros(B, T), x(C, 64), padding_idx=0),
    "embedding_bag": lambda: F.embedding_bag(zeros(B, T), x(C, 64), mode="mean"),
    "one_hot": lambda: F.one_hot(zeros(T), C).float() @ x(C, 4),
    "take_along_dim": lambda: torch.take_along_dim(x(T, C), zeros(T, 5), 1),
    "slice assigned": slice_assigned,
    # shapes
    "cat": lambda: torch.cat([x(T, C), x(T, C)]),
    "stack": lambda: torch.stack([x(T, C), x(T, C)]),
    "split": lambda: sum(part.sum() for part in x(T, C).split(32)),
    "chunk": lambda: x(T, C).chunk(2, -1)[0] * 2,
    "contiguous": lambda: x().transpose(1, 2).contiguous(),
    "clone": lambda: x(T, C).clone(),
    "roll": lambda: x(T, C).roll(3, 0),
    "flip": lambda: x(T, C).flip(0),
    "repeat": lambda: x(T, C).repeat(2, 2),
    "repeat_interleave": lambda: x(T, C).repeat_interleave(2, 0),
    "tril": lambda: x(T, C).tril(),
    "pad": lambda: F.pad(image(3), (1, 1, 1, 1)),
    "reflected": lambda: F.pad(image(3), (1, 1, 1, 1), "reflect"),
    "unfold": lambda: F.unfold(image(3), 3),
    "fold": lambda: F.fold(x(B, 27, 196), (16, 16), 3),
    "pixel_shuffle": lambda: F.pixel_shuffle(image(16, 8), 2),
    "to half and back": lambda: x(T, C).half().float(),
    "expanded": lambda: x(T, 1).expand(T, C) * x(T, C),
    "in place": lambda: (x(T, C) * 1).mul_(2).relu_(),
    "used three times": lambda: (lambda rows: rows.sin() + rows.cos() + rows.tanh())(x(T, C)),
    # images
    "nearest": lambda: F.interpolate(image(3), scale_factor=2),
    "bilinear image": lambda: F.interpolate(image(3), scale_factor=2, mode="bilinear"),
    "bicubic": lambda: F.interpolate(image(3), size=8, mode="bicubic", antialias=True),
    "grid_sample": lambda: F.grid_sample(image(3), x(B, 8, 8, 2)),
    "affine_grid": lambda: F.affine_grid(x(B, 2, 3), (B, 3, 16, 16)),
    "max_pool": lambda: F.max_pool2d(image(), 2),
    "avg_pool": lambda: F.avg_pool2d(image(), 2),
    "adaptive_avg": lambda: F.adaptive_avg_pool2d(image(), 1),
    "adaptive_max": lambda: F.adaptive_max_pool2d(image(), 2),
    "max_pool1d": lambda: F.max_pool1d(x(B, 16, 64), 2),
    "lp_pool": lambda: F.lp_pool2d(image().abs() + 1, 2, 2),
    # products
    "linear": lambda: F.linear(x(), x(C, C), x(C)),
    "bilinear": lambda: F.bilinear(x(T, 32), x(T, 32), x(16, 32, 32), x(16)),
    "einsum": lambda: torch.einsum("btc,bsc->bts", x(), x()),
    "matmul": lambda: x() @ x(C, T),
    "bmm": lambda: torch.bmm(x(), x(B, C, T)),
    "baddbmm": lambda: torch.baddbmm(x(B, T, T), x(), x(B, C, T)),
    "addmm": lambda: torch.addmm(x(T, T), x(T, C), x(C, T)),
    "outer": lambda: torch.outer(x(T), x(C)),
    "mv": lambda: x(T, C) @ x(C),
    "tensordot": lambda: torch.tensordot(x(), x(C, T), 1),
    "multi_dot": lambda: torch.linalg.multi_dot([x(T, C), x(C, T), x(T, 8)]),
    "kron": lambda: torch.kron(x(8, 8), x(8, 8)),
    "cross": lambda: torch.linalg.cross(x(T, 3), x(T, 3)),
    "cdist": lambda: torch.cdist(x(B, T, 8), x(B, T, 8)),
    "cdist by products": lambda: torch.cdist(
        x(B, T, 64), x(B, T, 64), compute_mode="use_mm_for_euclid_dist"
    ),
    "pdist": lambda: F.pdist(x(T, 8)),
    "vmap": lambda: torch.vmap(lambda a, b: a @ b)(x(B, T), x(B, T)),
    "trace": lambda: x(8, 8).trace(),
    "inv": lambda: torch.linalg.inv(x(8, 8)),
    "det": lambda: torch.linalg.det(x(8, 8)),
    "solve": lambda: torch.linalg.solve(x(8, 8), x(8, 2)),
    # attention and cells
    "mha": lambda: attention(),
    "mha without weights": lambda: attention(need_weights=False),
    "encoder layer": lambda: nn.TransformerEncoderLayer(C, 4, batch_first=True)(x()),
    "decoder layer": lambda: nn.TransformerDecoderLayer(C, 4, batch_first=True)(x(), x()),
    "sdpa": lambda: heads(),
    "masked sdpa": lambda: heads(attn_mask=mask(T, T)),
    "causal sdpa": lambda: heads(is_causal=True, dropout_p=0.1),
    "lstm_cell": lambda: nn.LSTMCell(64, 64)(x(B, 64))[0],
    "gru_cell": lambda: nn.GRUCell(64, 64)(x(B, 64)),
    "lstm": lambda: nn.LSTM(64, 64, 2, batch_first=True)(x(B, T, 64))[0],
    "gru": lambda: nn.GRU(64, 64, 2, bidirectional=True)(x(T, B, 64))[0],
    "rnn": lambda: nn.RNN(64, 64)(x(T, B, 64))[0],
    # complex numbers
    "fft": lambda: torch.fft.fft(x()).abs(),
    "rfft": lambda: torch.fft.rfft(x()).abs(),
    "stft": lambda: torch.stft(
        x(4, 8000), 400, window=torch.hann_window(400), return_complex=True
    ).abs(),
    "complex": lambda: (
        (torch.view_as_complex(x(B, T, 32, 2)) * torch.view_as_complex(x(B, T, 32, 2))).real
    ),
    "polar": lambda: torch.polar(x(T, C), x(T, C)).real,
    # what wraps others
    "checkpoint": lambda: checkpoint(lambda rows: rows.relu().sin(), x(T, C), use_reentrant=False),
    "reentrant": lambda: checkpoint(lambda rows: rows.relu().sin(), x(T, C), use_reentrant=True),
    "fp16 linear": lambda: autocast(torch.float16, lambda: F.linear(x(), x(C, C))),
    "bf16 loss": lambda: autocast(
        torch.bfloat16, lambda: F.cross_entropy(F.linear(x(B * T, C), x(C, C)), zeros(B * T))
    ),
    "bf16 sdpa": lambda: autocast(torch.bfloat16, lambda: heads(is_causal=True)),
    "double backward": lambda: torch.autograd.grad(
        (rows := x(T, C)).pow(3).sum(), rows, create_graph=True
    )[0],
    "gradient penalty": gradient_penalty,
    "gumbel": lambda: F.gumbel_softmax(x(T, C), hard=True),
}


def experiment(build):
    def run(device):
        with torch.device(device):
            out = build()
            # Some kernels of a backward pass copy a gradient that `sum` has expanded.
            loss = (out * torch.ones_like(out)).sum()
        loss.backward()
        yield loss

    return run


def measured(build):
    """Return the peak, in bytes, and the number of requests."""
    cuda.free_memory()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run = lab.measure(experiment(build), track=False)
    return run.peak_bytes, torch.cuda.memory_stats()["allocation.all.allocated"] - before


def simulated(build):
    return lab.simulate(experiment(build), gpu="a100-80gb").peak_bytes


#: Operators whose simulated peak is higher than the phantom's, by no more than a few tensors. Where
#: a mode is active, autograd's formulas make new tensors instead of writing into their own
#: (``prod``, ``cumprod``, ``bce_pos_weight``). The CPU, on which simulations run, takes the rest
#: apart, or puts it together, in another way. None is lower.
SIMULATED_MORE = {
    *("prod", "prod of a dimension", "cumprod", "bce_logits", "bce_pos_weight", "renorm"),
    *("rms_norm", "lstm_cell", "embedding_bag", "median", "vmap", "trace"),
}
#: Of these a simulation asks for a value, refuses (recurrent layers), or has 2 KiB less
#: (``segment_reduce``: the room in which a GPU sums up lengths).
UNSIMULATED = {"gaussian", "mask as index", "unique", "lstm", "gru", "rnn", "segment_reduce"}
#: Here the mode makes fewer requests, of the same bytes at the peak.
FEWER_REQUESTS = {"logcumsumexp"}


def test_the_guide_counts_them():
    guide = (SOURCE / "docs" / "PHANTOM.md").read_text(encoding="utf-8")
    assert f"{len(OPERATORS)} operators forward and backward" in guide
    assert f"up to {MOST_KNOWN_FLOATS:,} numbers" in guide


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_takes_the_same(name):
    build = OPERATORS[name]
    measured(build)
    peak_bytes, requests = measured(build)
    with _disable_current_modes():
        unwatched_bytes, unwatched_requests = measured(build)
    assert peak_bytes == unwatched_bytes
    assert (requests == unwatched_requests) == (name not in FEWER_REQUESTS)
    if name in UNSIMULATED:
        return
    difference = simulated(build) - peak_bytes
    assert difference >= 0
    assert (difference > 0) == (name in SIMULATED_MORE), difference


#: What inference mode hands to the watch as a whole.
COMPOSITE = (
    *("lstm", "gru", "rms_norm", "nearest", "bilinear image", "one_hot", "mha", "bf16 loss"),
    "sdpa",
)


def taken(context, build, loss=False):
    """Return the peak, the bytes of all requests and their number inside ``context``."""
    for _ in range(2):
        cuda.free_memory()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        with torch.device("cuda"), context():
            out = build()
            if loss:
                (out.float() * torch.ones_like(out)).sum().backward()
            del out
        after = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.allocated", "allocation.all.allocated")
    return after["allocated_bytes.all.peak"], *(after[name] - before[name] for name in names)


@pytest.mark.parametrize("name", COMPOSITE)
def test_inference_mode_takes_the_same(name):
    watched = taken(torch.inference_mode, OPERATORS[name])
    with _disable_current_modes():
        assert watched == taken(torch.inference_mode, OPERATORS[name])


@pytest.mark.parametrize("name", ["affine_grid", "lstm_cell", "bilinear", "cdist", "mha", "linear"])
def test_a_backward_pass_inside_autocast_takes_the_same(name):
    def autocast():
        return torch.autocast("cuda", dtype=torch.bfloat16)

    watched = taken(autocast, OPERATORS[name], loss=True)
    with _disable_current_modes():
        assert watched == taken(autocast, OPERATORS[name], loss=True)

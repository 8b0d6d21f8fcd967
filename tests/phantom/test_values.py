"""Small values are followed on the CPU, so that control flow goes the way a GPU would take."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gpumem.fake_cuda.process_group import one_of


def arithmetic(device):
    x = torch.arange(12, device=device).view(3, 4)
    return (x * 2 + 1) % 5, x.sum(dim=1), x.T.contiguous(), x.max(), x.cumsum(0)


def masks(device):
    tokens = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0]], device=device)
    mask = (tokens != 0).long()
    return mask, mask.sum(-1), (mask[:, -1] == 0).all(), mask.bool()[:, None, None, :]


def shapes_from_values(device):
    x = torch.tensor([0, 3, 0, 3, 1], device=device)
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return x.nonzero(), x[x > 0], values, inverse, counts, torch.bincount(x), torch.where(x > 0)


def read_inside_of_operators(device):
    x = torch.diag(torch.tensor([3.0, 0.0, 2.0, 0.0], device=device))
    blocks = x.to_sparse_bsr((2, 2))
    stored = x.to_sparse()._nnz(), len(x.to_sparse_csc().values()), len(blocks.values())
    return stored, x.to_sparse(1)._nnz(), torch.linalg.eig(x), torch.linalg.eigvals(x)


def writes_through_views(device):
    x = torch.zeros(4, 4, dtype=torch.int64, device=device)
    x[1] = 7
    x[:, 2].add_(1)
    x.view(-1)[0] = 5
    row = x[3]
    row.fill_(9)
    x[x == 7] = 8
    return x, x.tolist()


def copies(device):
    x = torch.tensor([1, 2, 3]).to(device)
    y = torch.empty_like(x)
    y.copy_(x + 1, non_blocking=True)
    z = torch.zeros(3, dtype=torch.int64)
    z.copy_(y)
    return x.clone(), y.cpu(), z, copy.deepcopy(x), torch.stack([x, y]), x.to(torch.int32)


def reading(device):
    x = torch.tensor([4, 2, 9], device=device)
    lengths = [int(n) for n in x]
    same = torch.equal(x, x.clone()), torch.equal(x, x + 1), torch.allclose(x, x), 9 in x
    return x.argmax().item(), x[1].item(), lengths, bool((x > 1).all()), x.tolist(), len(x), same


def other_ways_of_reading(device):
    x = torch.tensor([1, 2, 3], device=device)
    at, largest = torch.searchsorted(x, x + 1), max(x).item()
    parts = [len(part) for part in torch.split(torch.arange(6, device=device), x.tolist())]
    chosen = list(range(5))[x[1]], x.topk(1).values, torch.is_nonzero(x[0]), f"{x.sum():d}"
    return at, largest, parts, chosen, x.cpu().numpy().tolist(), len(x.repeat_interleave(x))


def few_floats(device):
    scale = torch.full((), 65536.0, device=device)
    return scale * 0.5, torch.tensor(3.5, device=device).item(), torch.ones(4, device=device).sum()


def many_floats_of_the_host(device):
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0]] * 50).to(device)
    batch = torch.empty(1000, device=device)
    batch.copy_(torch.arange(1000.0))
    schedule = torch.cumprod(
        1 - torch.linspace(0, 0.5, 1000, device=device, dtype=torch.float64), 0
    )
    degenerate = boxes[:, 2:] <= boxes[:, :2]
    return degenerate.any().item(), boxes.amax(1), batch.sum(), schedule[20], (boxes + 1).tolist()


def lengths_of_a_loss(device):
    scores = torch.zeros(50, 4, 20, device=device).log_softmax(-1)
    targets = torch.ones(4, 10, dtype=torch.int64, device=device)
    lengths = [torch.full((4,), n, device=where) for where in (device, "cpu") for n in (50, 10)]
    given, beside = lengths[:2], lengths[2:]
    ctc = F.ctc_loss(scores, targets, *given), F.ctc_loss(scores, targets, *beside)
    return [loss.shape for loss in ctc], given


def lengths_without_a_mask(device):
    """Return what a speech model takes as the lengths of rows that need no padding."""
    sound = torch.randn(8, 200_000, device=device)
    mask = torch.ones_like(sound, dtype=torch.int64)
    return (mask.sum(-1) - 400) // 320 + 1, sound.new_full((3,), 2, dtype=torch.int32)


def resized(device):
    x = torch.tensor([1, 2], device=device)
    x.resize_(4)[2:] = 3
    return x


def packing(device):
    lengths = torch.tensor([3, 5, 2], device=device)
    starts = F.pad(lengths.cumsum(0), (1, 0))
    ids = torch.repeat_interleave(torch.arange(3, device=device), lengths)
    return starts, ids, starts.diff(), int(lengths.max())


def one_hot_and_scatter(device):
    x = torch.tensor([1, 0, 2], device=device)
    counts = torch.zeros(3, dtype=torch.int64, device=device).scatter_add_(0, x, torch.ones_like(x))
    return F.one_hot(x), counts, x.sort(), torch.isin(x, torch.tensor([0, 2], device=device))


def selected(device):
    x = torch.randn(4, 3, device=device)
    mask = torch.tensor([True, False, True], device=device)
    of_rows = torch.arange(8, device=device).view(4, 2)[:, :1] > 2
    return [list(x.masked_select(each).shape) for each in (mask, of_rows)], x.new_ones(3)[mask]


def anchors(device):
    """Return what a detector decides by the overlap of a grid with boxes of the host."""
    side = 300
    steps = torch.arange(side, device=device, dtype=torch.float32)
    corners = torch.stack(torch.meshgrid(steps, steps, indexing="ij"), -1).view(-1, 2)
    box = torch.tensor([[10.0, 20.0, 60.0, 70.0]]).to(device)
    inside = ((corners >= box[:, :2]) & (corners <= box[:, 2:])).all(1)
    return inside.sum(), corners[inside].amax(0), inside.nonzero()[:3]


def conditions(device):
    x = torch.tensor(3, device=device)
    branches = (lambda x: x * 2, lambda x: x + 1, (x,))
    return torch.cond(x > 2, *branches), torch.cond(x > 9, *branches)


def masked_gradients(device):
    x = torch.zeros(4, 2, device=device, requires_grad=True)
    mask = torch.tensor([True, False, True, True], device=device)
    x[mask].sum().backward()
    y = torch.arange(4, device=device)
    y[mask] = torch.tensor([7, 8, 9], device=device)
    return mask.sum(), list(x.grad.shape), y, y.index_put((~mask,), mask.sum())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "of",
    [
        arithmetic,
        masks,
        shapes_from_values,
        read_inside_of_operators,
        writes_through_views,
        copies,
        reading,
        other_ways_of_reading,
        few_floats,
        many_floats_of_the_host,
        lengths_of_a_loss,
        lengths_without_a_mask,
        resized,
        packing,
        one_hot_and_scatter,
        selected,
        anchors,
        conditions,
        masked_gradients,
    ],
)
def test_what_is_known_is_as_on_the_cpu(of, mode):
    if of is masked_gradients and mode is torch.inference_mode:
        pytest.skip("it has no gradients")
    flat = torch.utils._pytree.tree_leaves
    with mode():
        pairs = list(zip(flat(of("cuda")), flat(of("cpu")), strict=True))
    for found, right in pairs:
        if isinstance(right, torch.Tensor):
            assert found.shape == right.shape
            assert torch.equal(found.cpu(), right)
        else:
            assert found == right


def test_an_unknown_mask_chooses_everything():
    x = torch.randn(8, 100, device="cuda")
    assert x[x > 0].shape == x.masked_select(x <= 0.5).shape == (800,)
    assert (x.abs() >= 1e-3).nonzero().shape == x.nonzero().shape == (800, 2)
    assert x.to_sparse()._nnz() == x.to_sparse_csr()._nnz() == 800
    assert len(x.sum(1).nonzero()) == 8
    large = torch.randn(3000, 1000, device="cuda")
    assert torch.where(large > 0)[0].shape == large[large > 0].shape == (3_000_000,)
    large[large > 1] = large[large > 1] * 2
    kept = torch.zeros(50, dtype=torch.bool, device="cuda")
    kept[x[0].argsort()[:50]] = True
    assert kept.nonzero().shape == (50, 1)
    assert not (x[0, 0] > 0)  # what is read as one value is zero


@pytest.mark.parametrize("tokens", [1 << 10, 1 << 15])
def test_each_token_takes_the_first_experts_however_many_tokens_there_are(tokens):
    """As transformers' mixtures look for them: 16.8 million numbers for 32,768 tokens."""
    _, experts = torch.randn(tokens, 64, device="cuda").topk(8)
    taken = F.one_hot(experts, 64).permute(2, 1, 0)
    assert taken.sum((-1, -2)).gt(0).nonzero().flatten().tolist() == list(range(8))
    choices, rows = torch.where(taken[3] > 0)
    assert choices.unique().tolist() == [3]
    assert torch.equal(rows.cpu(), torch.arange(tokens))
    ranked = torch.randn(3, 5, device="cuda").sort(0, descending=True).indices
    assert ranked.tolist() == [[0] * 5, [1] * 5, [2] * 5]
    assert torch.randn((), device="cuda").sort().indices.item() == 0


READS = {
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "written by mask": lambda x: x.masked_fill_(x > 0, 1).index_put_((x > 0,), x.new_zeros(())),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.view(10, 10).to_sparse_csr(),
    "eigenvalues": lambda x: torch.linalg.eig(x[:9].view(3, 3)),
    "unique": lambda x: torch.unique(x),
    "bincount": lambda x: x.long().bincount(),
    "repeats": lambda x: torch.repeat_interleave(x, x.long()),
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(force=True),
    "cpu": lambda x: x.cpu(),
    "copy": lambda x: torch.ones(100).copy_(x),
    "equal": lambda x: torch.equal(x, x.clone()),
    "argmax": lambda x: x.argmax().item(),
    "format": lambda x: f"{x.mean():.2f}",
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("of", READS)
def test_every_unknown_value_that_is_read_is_reported(of, mode, monkeypatch):
    [known] = _get_current_dispatch_mode_stack()
    read = []
    monkeypatch.setattr(known, "on_unknown", read.append)
    with mode():
        READS[of](torch.ones(100, device="cuda"))
        assert not read
        READS[of](torch.randn(100, device="cuda"))
    assert read


def test_what_is_unknown_reads_as_zero_and_says_so():
    x = torch.randn(1000, device="cuda")
    assert x.sum().item() == 0
    assert "unknown on a phantom GPU" in repr(x)
    values, vectors = torch.linalg.eig(torch.randn(2, 3, 3, device="cuda"))
    assert [*values.shape] == [2, 3]
    assert [*vectors.shape] == [2, 3, 3]
    assert "unknown" in repr(values)
    assert "unknown" in repr(vectors)
    mask = torch.tensor([1, 1, 0], device="cuda")
    assert "[1, 1, 0]" in repr(mask)
    mask.copy_(x[:3] > 0)  # overwritten by what is unknown
    assert "unknown" in repr(mask)
    mask.fill_(2)
    assert mask.tolist() == [2, 2, 2]


def loss_scaling():
    weight = torch.nn.Parameter(torch.ones(8, 8, device="cuda"))
    optimizer, scaler = torch.optim.AdamW([weight]), torch.amp.GradScaler("cuda", growth_interval=2)
    scales = []
    for _ in range(3):
        scaler.scale((torch.randn(8, 8, device="cuda") @ weight).mean()).backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales == [2**16, 2**17, 2**17] and len(optimizer.state) == 1


def finite_losses_and_gradients():
    weight = torch.nn.Parameter(torch.ones(2048, 2048, device="cuda"))
    loss = (torch.randn(8, 2048, device="cuda") @ weight).mean()
    loss.backward()
    nothing = loss.isnan() | torch.isinf(loss) | weight.grad.isnan().any()
    return not nothing and loss.isfinite().all() and weight.grad.isfinite().all() and loss < 1


def figures_that_are_printed():
    loss = torch.randn(2000, device="cuda").mean()
    as_array = loss.cpu().numpy()
    return f"{loss:.2f} {loss.exp().item()} {as_array} {loss.tolist()}" == "0.00 1.0 0.0 0.0"


def predictions():
    logits = torch.randn(8, 1000, device="cuda")
    right = logits.argmax(-1) == torch.arange(8, device="cuda")
    best = logits.topk(2).indices
    return right.sum().item() == 1 and (best[:, 0] != best[:, 1]).all() and best.max() < 1000


def comparisons():
    x = torch.randn(1000, device="cuda")
    zero = torch.zeros(1 << 22, dtype=torch.int64, device="cuda") * 2  # unknown, since it is large
    none = (x == 0).any() or (x <= 0).any() or x.isnan().any() or x.isinf().any()
    every = (x != 0).all() and (x > 0).all() and x.isfinite().all()
    every = every and zero.min() >= 0 and zero.max() < 2
    return not none and every and (zero.min() == 0).item() and not len((x == 0).nonzero())


def tokens_that_are_drawn():
    ids = torch.ones(2, 3, dtype=torch.int64, device="cuda")
    while ids.shape[1] < 6 and not (ids[:, -1] == 2).any():
        probabilities = torch.randn(2, 100, device="cuda").softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)], 1)
    return ids.tolist() == [[1, 1, 1, 0, 0, 0]] * 2


OF_TRAINING = [loss_scaling, finite_losses_and_gradients]
WITHOUT_GRADIENTS = [figures_that_are_printed, predictions, comparisons, tokens_that_are_drawn]


@pytest.mark.parametrize(
    ("decide", "mode"),
    [(decide, torch.enable_grad) for decide in OF_TRAINING + WITHOUT_GRADIENTS]
    + [(decide, torch.inference_mode) for decide in WITHOUT_GRADIENTS],
)
def test_what_is_decided_by_unknown_values_goes_on_and_is_reported(decide, mode, monkeypatch):
    read = []
    [values] = _get_current_dispatch_mode_stack()
    monkeypatch.setattr(values, "on_unknown", read.append)
    with mode():
        assert decide()
    assert read


def test_values_are_known_where_new_tensors_go_elsewhere(monkeypatch):
    with torch.device("cuda"):
        x = torch.arange(4)
        assert (x[x > 1] * 2).tolist() == [4, 6]
    half = functools.partial(torch.empty, dtype=torch.float16, device="cuda")
    monkeypatch.setattr(torch, "empty", lambda *sizes, **_: half(*sizes))  # as `zero.Init` does
    assert (torch.full((), 0.25, device="cuda") * 2).item() == 0.5


def test_a_storage_that_was_freed_is_not_remembered_for_another():
    for n in range(2000):
        x = torch.full((4,), n, device="cuda")
        assert x.sum().item() == 4 * n
        del x
        assert torch.empty(4, dtype=torch.int64, device="cuda").sum().item() == 0


def test_fake_tensors_and_the_tracker_work_beside_it():
    from torch._subclasses import FakeTensorMode

    from gpumem.tracker import Tracker

    with FakeTensorMode():
        assert torch.ones(3, device="cuda").sum().shape == ()
    with Tracker(device="cuda:0") as tracker:
        x = torch.zeros(1000, dtype=torch.int64, device="cuda")
        assert x.sum().item() == 0
    assert tracker.trace().peak().total_bytes == 8008


def test_a_tensor_in_parts_draws_random_numbers():
    from torch.distributed.tensor import Shard, distribute_tensor

    with one_of(2):
        mesh = torch.distributed.init_device_mesh("cuda", (2,))
        weight = distribute_tensor(torch.zeros(8, 4, device="cuda"), mesh, [Shard(0)])
        torch.nn.init.trunc_normal_(weight)
        assert "unknown" in repr(weight.to_local())


def test_sparse_tensors_are_left_alone(monkeypatch):
    [known] = _get_current_dispatch_mode_stack()
    faults = []
    monkeypatch.setattr(known, "note_fault", lambda *fault: faults.append(fault))
    dense = torch.ones(4, 4, device="cuda")
    for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
        assert (sparse @ dense).shape == (4, 4)
        assert "sparse" in repr(sparse)
    assert not faults

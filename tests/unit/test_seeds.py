"""Training with several seeds: what is compared with what, and half precision on a CPU."""

import contextlib
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import labkit as lab
from gpumem.inputs import InputError
from labkit.half_precision import half_products
from labkit.loss_comparison import Difference, Losses, held_out_loss


def falling(device, seed=0, rate=1.0, stop=99):
    """Losses that follow from the seed: 10, 5, 3.33 ..., lower for a higher seed."""
    for step in range(stop):
        yield torch.tensor(rate * (10 - seed) / (step + 1), device=device)


def record(*curves, seeds=None, name="x"):
    seeds = seeds or tuple(range(len(curves)))
    return Losses(name, seeds, tuple(map(tuple, curves)), "a machine")


def test_each_seed_is_trained_once_and_the_last_losses_are_averaged():
    found = lab.losses(falling, seeds=(0, 2), steps=20)
    assert found.seeds == (0, 2)
    assert [len(curve) for curve in found.curves] == [20, 20]
    assert found.curves[0][:2] == (10.0, 5.0)
    assert found.finals == pytest.approx(((10 / 19 + 10 / 20) / 2, (8 / 19 + 8 / 20) / 2))
    assert found.final == pytest.approx(sum(found.finals) / 2)
    assert found.spread == (found.finals[1], found.finals[0])
    assert found.name == "falling"
    assert "2 seeds" in found.label
    assert lab.losses(falling, seeds=[1], steps=1, rate=2.0).name == "falling: rate=2.0"


def test_differences_are_taken_seed_by_seed():
    ours = record([2.0], [4.0])
    theirs = record([1.0], [8.0])
    assert ours.against(theirs) == Difference(mean=0.25, low=-0.5, high=1.0)
    assert str(ours.against(theirs)) == "+25.0% (-50.0% to +100.0%)"


def test_a_run_that_diverged_or_a_reference_of_zero_compares_as_nan():
    broken = record([1.0, math.nan])
    assert all(map(math.isnan, broken.spread))
    assert math.isnan(broken.against(record([1.0, 1.0])).mean)
    assert math.isnan(record([1.0, 0.5]).against(record([1.0, 0.0])).mean)


@pytest.mark.parametrize("other", [record([1.0], seeds=(5,)), record([1.0, 1.0])])
def test_runs_with_other_seeds_or_steps_are_not_compared(other):
    with pytest.raises(InputError, match="cannot be compared"):
        record([1.0]).against(other)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seeds": ()}, "seeds must be whole numbers"),
        ({"seeds": (True,)}, "seeds must be whole numbers"),
        ({"seeds": 3}, "seeds must be whole numbers"),
        ({"stop": 3, "steps": 5}, "ended after 3 of 5"),
        ({"seed": 5}, "seeds="),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(InputError, match=words):
        lab.losses(falling, **arguments)


# --- half precision ------------------------------------------------------------------------------


SEEN = torch.ones(40, 40, dtype=torch.bool).tril()
ADDED = torch.zeros(40, 40).masked_fill(~SEEN, -torch.inf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, SEEN, ADDED], ids=["causal", "mask", "added mask"])
def test_attention_and_its_gradients_are_computed_wide(dtype, mask):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    attention = torch.nn.functional.scaled_dot_product_attention
    with half_products(torch.device("cpu")):
        given = mask.to(dtype) if mask is ADDED else mask
        out = attention(q, k, v, is_causal=mask is None, attn_mask=given)
        out.float().square().sum().backward()
    reference = attention(*wide, is_causal=True)
    reference.square().sum().backward()
    assert out.dtype == q.grad.dtype == dtype
    step = torch.finfo(dtype).eps
    assert lab.relative_error(out, reference) < step
    for ours, theirs in zip((q, k, v), wide, strict=True):
        assert lab.relative_error(ours.grad, theirs.grad) < 3 * step


PRODUCTS = {
    "mm": lambda a, b: a @ b,
    "addmm": lambda a, b: torch.addmm(b, a, b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "baddbmm": lambda a, b: torch.baddbmm(b[None], a[None], b[None]),
    "convolution": lambda a, b: torch.conv1d(a[None], b[..., None]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_kind_of_product_is_the_exact_one_rounded_once(name, dtype):
    torch.manual_seed(0)
    a, b = (torch.randn(48, 48).to(dtype) for _ in range(2))
    with half_products(torch.device("cpu")):
        ours = PRODUCTS[name](a, b)
    exact = PRODUCTS[name](a.double(), b.double()).to(dtype)
    assert ours.dtype == dtype
    # Sums in float32: only values next to the middle of two numbers may be rounded the other way.
    assert (ours != exact).double().mean() < 0.01
    step = torch.finfo(dtype).eps
    assert torch.allclose(ours.double(), exact.double(), rtol=1.01 * step, atol=step**2)


def test_float32_is_left_alone_and_other_devices_get_nothing():
    a = torch.randn(8, 8)
    with half_products(torch.device("cpu")):
        inside = a @ a
    assert torch.equal(inside, a @ a)
    with half_products(torch.device("meta")) as context:
        assert context is None


class Idle(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def modes():
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]


def modes_per_step(dtype, within=contextlib.nullcontext):
    """The dispatch modes on the stack in each step of a training."""
    found = []

    def experiment(device, seed=0):
        a = torch.ones(2, 2, dtype=dtype, device=device)
        with within():
            for _ in range(3):
                found.append(modes())
                yield (a @ a).sum()

    lab.losses(experiment, seeds=[0], steps=3)
    assert modes() == []
    return found


def test_training_without_half_precision_is_watched_for_one_step():
    assert modes_per_step(torch.float32) == [["_HalfProducts"], [], []]
    assert modes_per_step(torch.bfloat16) == 3 * [["_HalfProducts"]]
    # A mode of the experiment's own is never left in place of ours.
    assert modes_per_step(torch.float32, within=Idle) == 3 * [["_HalfProducts", "Idle"]]


# --- two numbers ---------------------------------------------------------------------------------


def test_relative_error_takes_all_tensors_as_one_vector():
    ours = [torch.tensor([3.0, 0.0]), torch.tensor(4.0)]
    theirs = [torch.tensor([0.0, 0.0]), torch.tensor(4.0)]
    assert lab.relative_error(ours, theirs) == pytest.approx(3 / 4)
    assert lab.relative_error(theirs, theirs) == 0
    assert lab.relative_error(torch.tensor(1.01), torch.tensor(1.0)) == pytest.approx(
        0.01, rel=1e-4
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([torch.ones(2)], [torch.ones(2)] * 2, "cannot be compared"),
        ([torch.ones(2)], [torch.ones(3)], "cannot be compared"),
        ([torch.ones(2)], [torch.zeros(2)], "zero throughout"),
        ([], [], "zero throughout"),
    ],
)
def test_what_cannot_be_compared_is_refused(ours, theirs, words):
    with pytest.raises(InputError, match=words):
        lab.relative_error(ours, theirs)


# --- text it was not trained on ------------------------------------------------------------------


def test_held_out_loss_is_that_of_all_rows_and_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    model = lab.model("SmolLM2-tiny", vocab_size=256, layers=1)
    loss = held_out_loss(model, rows=6, seq_len=32)
    assert model.training
    seen = []
    model.register_forward_hook(
        lambda *_: seen.append((model.training, torch.is_grad_enabled(), modes()))
    )
    model.model.layers[0].eval()
    held_out_loss(model, rows=1, seq_len=32)
    assert seen == [(False, False, ["_HalfProducts"])]
    assert model.training
    assert not model.model.layers[0].training
    [ids] = lab.batches(device="cpu", batch_size=6, seq_len=32, split="test", steps=1)
    assert loss == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=1e-5)
    with pytest.raises(InputError, match="rows"):
        held_out_loss(model, rows=0)
    with pytest.raises(InputError, match="seq_len"):
        held_out_loss(model, seq_len=1)


# --- the figure ----------------------------------------------------------------------------------


def test_a_band_ends_with_its_line_and_every_source_is_named():
    broken = [record([5, 4, 3], [5, math.nan, 3]), record([5, math.nan, 3], [5, 4, 3])]
    for each in broken:
        [band] = lab.loss_curves(each).axes[0].collections
        assert band.get_datalim(band.axes.transData).x1 == 1  # whichever seed broke
    other = Losses("other", (0,), ((3.0, 2.0, 1.0),), "another machine")
    caption = lab.loss_curves([record([3, 2, 1], [3, 2, 2]), other]).table.text
    assert "a machine, 2 seeds" in caption
    assert "another machine, seed 0" in caption


def test_loss_curves_show_mean_band_and_the_difference_from_the_first():
    first = record([5, 4, 3, 2], [5, 4, 3, 3], name="first")
    second = record([5, 5, 5, 4], [5, 5, 5, 6], name="second")
    broken = record([5, math.nan, 4, 4], [5, 4, 4, 4], name="broken")
    figure = lab.loss_curves([first, second, broken], title="A race")
    text = figure.table.text
    assert "+100.0% (+100.0% to +100.0%)" in text
    assert "2.000 to 3.000" in text
    lines = figure.axes[0].get_lines()
    assert list(lines[0].get_ydata()) == [5, 4, 3, 2.5]
    assert math.isnan(lines[2].get_ydata()[1])
    assert "second: first loss 5.000, last loss 5.000" in figure.alt
    for wrong in ([], [1], None):
        with pytest.raises((InputError, TypeError)):
            lab.loss_curves(wrong)

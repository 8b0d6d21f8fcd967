"""Experiments that name CUDA: autocast is the simulated GPU's, and every other line is refused."""

import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.cuda import is_available, max_memory_allocated
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import labkit as lab
from gpumem.fake_cuda.fake_tensors import GPU_DEVICE

SIDE = 64
OUTSIDE = torch.device("cuda")


def net():
    return nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Linear(SIDE, SIDE))


def plain(device, *, amp=None, scaler=None):
    """Two steps of SGD."""
    model = net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale = scaler() if scaler else None
    for _ in range(2):
        x = torch.ones(8, SIDE, device=device)
        with amp() if amp else torch.autocast("cpu", enabled=False):
            loss = F.mse_loss(F.softmax(model(x), -1), x)
        if scale is None:
            loss.backward()
            optimizer.step()
        else:
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
        optimizer.zero_grad()
        yield loss


def run_of(experiment, gpu="t4", **parameters):
    """All bytes of a run. Autocast drops its casts in no fixed order: events are counted."""
    run = lab.simulate(experiment, gpu=gpu, **parameters)
    return {
        "events": Counter((event.change_bytes, event.phase) for event in run.trace.events),
        "storages": [(s.nbytes, s.category, s.device, s.dtype) for s in run.trace.storages],
        "peaks": (run.peak_bytes, run.by_category, run.step_peaks_bytes),
        "reserved": run.reserved_bytes,
        "host": run.host_bytes,
        "work": (run.flops, run.moved_bytes),
    }


HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
AUTOCASTS = {
    "positional": (lambda: torch.autocast("cuda", BRAIN), {"dtype": BRAIN}),
    "keyword": (lambda: torch.autocast(device_type="cuda", dtype=HALF), {"dtype": HALF}),
    "default type": (lambda: torch.autocast("cuda"), {"dtype": HALF}),
    "torch.amp": (
        lambda: torch.amp.autocast("cuda", cache_enabled=False),
        {"dtype": HALF, "cache_enabled": False},
    ),
    "torch.cuda.amp": (lambda: torch.cuda.amp.autocast(), {"dtype": HALF}),
    "disabled": (lambda: torch.autocast("cuda", enabled=False), {"enabled": False}),
    "on device, default type": (lambda: torch.autocast(GPU_DEVICE.type), {"dtype": HALF}),
}


@pytest.mark.filterwarnings("ignore:.torch.cuda.amp:FutureWarning")
@pytest.mark.parametrize(("amp", "options"), AUTOCASTS.values(), ids=AUTOCASTS)
def test_autocast_for_cuda_is_autocast_on_the_simulated_gpu(amp, options):
    def named(device):
        yield from plain(device, amp=amp)

    def on_device(device):
        yield from plain(device, amp=lambda: torch.autocast(device.type, **options))

    def without(device):
        yield from plain(device)

    found = run_of(named)
    assert found == run_of(on_device)
    assert (found == run_of(without)) is (options == {"enabled": False})


def test_autocasts_state_is_that_of_the_simulated_gpu():
    seen = []

    def asks(device):
        x = torch.ones(4, 4, device=device, requires_grad=True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        with torch.autocast("cuda"):
            seen.append((torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda")))
            seen.append((torch.get_autocast_dtype("cuda"), (x @ x).dtype))
        seen.append((torch.is_autocast_enabled("cuda"), (x @ x).dtype))
        yield (x @ x).sum()

    before = torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")
    lab.simulate(asks, gpu="t4")
    assert seen == [(True, True), (BRAIN, BRAIN), (False, FULL)]
    assert (torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")) == before


def test_custom_functions_cast_for_cuda():
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)
        def forward(ctx, x):
            seen.append((x.dtype, torch.is_autocast_enabled("cuda")))
            return 2 * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            return 2 * grad

    def experiment(device):
        x = torch.ones(4, device=device, requires_grad=True)
        with torch.autocast("cuda"):
            loss = Double.apply(x).sum()
        loss.backward()
        yield loss

    lab.simulate(experiment, gpu="t4")
    assert seen == [(HALF, False)]


@pytest.mark.filterwarnings("ignore:.torch.cuda.amp:FutureWarning")
@pytest.mark.parametrize(
    "scaler",
    [
        lambda: torch.amp.GradScaler("cuda"),
        torch.amp.GradScaler,
        lambda: torch.cuda.amp.GradScaler(),
    ],
    ids=["torch.amp", "default", "torch.cuda.amp"],
)
def test_a_loss_scaler_for_cuda_scales_on_the_simulated_gpu(scaler):
    def amp():
        return torch.autocast("cpu", HALF)

    def named(device):
        yield from plain(device, amp=amp, scaler=scaler)

    def on_device(device):
        yield from plain(device, amp=amp, scaler=lambda: torch.amp.GradScaler(device.type))

    def without(device):
        yield from plain(device, amp=amp)

    found = run_of(named)
    assert found == run_of(on_device)
    assert found != run_of(without)


def test_a_default_device_lasts_as_long_as_the_simulation():
    def experiment(device):
        torch.set_default_device(device)
        assert torch.get_default_device() == device
        assert torch.tensor([1.0, 2.0]).device == device
        yield nn.Linear(SIDE, SIDE)(torch.randn(8, SIDE)).sum()

    lab.simulate(experiment, gpu="t4")
    assert torch.get_default_device() == torch.device("cpu")


def test_pinned_batches_are_copies_on_the_host():
    def by_loader(device):
        data = TensorDataset(torch.randn(16, SIDE))
        for [rows] in DataLoader(data, batch_size=8, pin_memory=True):
            yield rows.to(device, non_blocking=True).sum()

    def by_hand(device):
        data = TensorDataset(torch.randn(16, SIDE))
        for rows in map(pinned, DataLoader(data, batch_size=8)):
            yield rows.to(device, non_blocking=True).sum()

    assert run_of(by_loader) == run_of(by_hand)


def pinned(batch):
    return batch[0].pin_memory()


def test_what_names_no_cuda_or_changes_speed_alone_is_allowed():
    def experiment(device):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
        assert torch.device(device.type, 0) == device != torch.device("cpu")
        assert torch.device("cpu").type == "cpu"
        for loss in plain(device, amp=lambda: torch.autocast(device.type, enabled=False)):
            assert f"{loss.device.type}:0" == "cpu:0"
            yield loss

    assert run_of(experiment) == run_of(plain)
    assert torch.device("cuda").type == "cuda"  # nothing is left behind
    assert torch.cuda.is_available() is torch.backends.cuda.is_built()


class Checks:
    def kind(self, x):
        return x.device.type == "cuda"


def made_in_a_context():
    with torch.device("cuda"):
        return torch.ones(2)


def made_by_default():
    torch.set_default_device(OUTSIDE)
    return torch.ones(2)


REFUSED = {
    "cuda()": lambda x: x.cuda(),
    "to a name": lambda x: x.to("cuda:0"),
    "to a number": lambda x: x.to(0),
    "to a device made outside": lambda x: net().to(device=OUTSIDE, non_blocking=True),
    "a device": lambda x: x.device == torch.device("cuda", 0),
    "a tensor": lambda x: torch.ones(2, device="cuda"),
    "a tensor from data": lambda x: torch.tensor([1.0], device="cuda"),
    "a module": lambda x: nn.Linear(2, 2, device="cuda"),
    "a tensor's type": lambda x: x.type("torch.cuda.FloatTensor"),
    "a generator": lambda x: torch.Generator("cuda"),
    "a context": lambda x: made_in_a_context(),
    "a default device": lambda x: made_by_default(),
    "is_available": lambda x: torch.cuda.is_available(),
    "imported is_available": lambda x: is_available(),
    "imported max_memory_allocated": lambda x: max_memory_allocated(),
    "memory_allocated": lambda x: torch.cuda.memory_allocated(),
    "a stream": lambda x: torch.cuda.Stream(),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "current_accelerator": lambda x: torch.accelerator.current_accelerator(),
    "is_built": lambda x: torch.backends.cuda.is_built(),
    "cuDNN": lambda x: torch.backends.cudnn.is_available(),
    "flash": lambda x: torch.backends.cuda.can_use_flash_attention(None),
    "is_cuda": lambda x: x.is_cuda,
    "type ==": lambda x: x.device.type == "cuda",
    "== type": lambda x: "cuda" == x.device.type,  # noqa: SIM300
    "type != cpu": lambda x: x.device.type != "cpu",
    "type in a set": lambda x: x.device.type in {"cuda", "mps"},
    "a key": lambda x: {"cuda": 1}.get(x.device.type),
    "startswith": lambda x: x.device.type.startswith("cuda"),
    "in type": lambda x: "cuda" in x.device.type,
    "in a method": lambda x: Checks().kind(x),
}


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("line", REFUSED.values(), ids=REFUSED)
def test_what_else_names_cuda_is_refused_with_its_line(line):
    def asks(device):
        line(torch.ones(2, device=device))
        yield torch.ones((), device=device)

    with pytest.raises(lab.InputError, match=r"names CUDA itself.*labkit phantom") as caught:
        lab.simulate(asks, gpu="t4")
    assert re.match(rf"{re.escape(__file__)}, line \d+, `.*`, ", str(caught.value))
    assert torch.get_default_device() == torch.device("cpu")


def test_on_the_cpu_a_check_of_the_devices_type_is_right():
    def experiment(device):
        seen.append(device.type == "cpu")
        yield torch.ones((), device=device)

    seen = []
    lab.simulate(experiment)
    assert seen == [True]


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_loss_scaler_made_outside_is_refused_for_it_has_switched_itself_off():
    scaler = torch.amp.GradScaler("cuda")

    def experiment(device):
        yield scaler.scale(torch.ones((), device=device))

    with pytest.raises(lab.InputError, match=r"line \d+, .*made outside the experiment"):
        lab.simulate(experiment, gpu="t4")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("run", [lab.simulate, lab.measure])
@pytest.mark.parametrize("kind", [torch.autocast, torch.amp.GradScaler])
def test_on_the_cpu_autocast_and_loss_scaling_for_cuda_are_refused(kind, run):
    def experiment(device):
        kind("cuda", enabled=False)
        yield torch.ones((), device=device)
        kind("cuda")
        yield torch.ones((), device=device)

    with pytest.raises(lab.InputError, match=r"line .*on the CPU"):
        run(experiment, steps=2)

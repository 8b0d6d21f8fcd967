"""Experiments that name CUDA: the simulated GPU is meant, byte for byte, or the line is refused."""

import re
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import labkit as lab
from labkit.fake.mode import GPU_DEVICE

SIDE = 64
OUTSIDE = torch.device("cuda")


def net(device=None):
    return nn.Sequential(nn.Linear(SIDE, SIDE, device=device), nn.ReLU(), nn.Linear(SIDE, SIDE))


def training(device, *, move, amp=None, scaler=None, ids=None):
    """Two steps of SGD; ``move`` puts a module or tensor on the GPU."""
    model = move(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scale = scaler() if scaler else None
    for _ in range(2):
        x = move(torch.ones(8, SIDE))
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


def plain(device, **how):
    yield from training(device, move=lambda it: it.to(device), **how)


MOVES = {
    "cuda()": lambda it: it.cuda(),
    "cuda(0)": lambda it: it.cuda(0),
    "cuda(device)": lambda it: it.cuda(device="cuda:0"),
    "to a name": lambda it: it.to("cuda"),
    "to a numbered name": lambda it: it.to("cuda:0"),
    "to a number": lambda it: it.to(0),
    "to(device=)": lambda it: it.to(device="cuda", non_blocking=True),
    "to a device": lambda it: it.to(torch.device("cuda")),
    "to a device by type and number": lambda it: it.to(torch.device("cuda", 0)),
    "to a device made outside": lambda it: it.to(OUTSIDE),
    "to the accelerator": lambda it: it.to(torch.accelerator.current_accelerator()),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moves_to_cuda_go_to_the_simulated_gpu(move):
    def named(device):
        yield from training(device, move=move)

    assert run_of(named) == run_of(plain)


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
        x = torch.ones(4, 4, device="cuda", requires_grad=True)
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
        x = torch.ones(4, device="cuda", requires_grad=True)
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


def factories(device):
    kept = [torch.randn(8, SIDE, device=device), torch.zeros(7, device=device)]
    kept.append(torch.arange(9, device=device))
    kept.append(torch.tensor([1.0, 2.0], device=device))
    kept.append(kept[0].new_tensor([1.0], device=device))
    kept.append(torch.ones_like(kept[0], device=device))
    kept.append(torch.as_tensor([3], device=device))
    model = nn.Linear(SIDE, SIDE, device=device)
    yield model(kept[0]).sum()


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, OUTSIDE])
def test_what_is_made_on_cuda_is_on_the_simulated_gpu(device):
    def named(_):
        yield from factories(device)

    assert run_of(named) == run_of(factories)


def made_by_default(device):
    x = torch.randn(8, SIDE)
    y = torch.tensor([1.0, 2.0])
    yield nn.Linear(SIDE, SIDE)(x).sum() + y.sum()


def made_in_a_context(device):
    with torch.device("cuda"):
        yield from made_by_default(device)


def made_by_the_default_device(device):
    torch.set_default_device("cuda")
    assert torch.get_default_device() == device
    yield from made_by_default(device)


@pytest.mark.parametrize("named", [made_in_a_context, made_by_the_default_device])
def test_a_default_device_of_cuda_is_the_simulated_gpu(named):
    def on_device(device):
        with torch.device(device):
            yield from made_by_default(device)

    assert run_of(named) == run_of(on_device)
    assert torch.get_default_device() == torch.device("cpu")


def test_a_default_device_chosen_outside_is_the_simulated_gpu():
    def on_device(device):
        with torch.device(device):
            yield from made_by_default(device)

    expected = run_of(on_device)
    torch.set_default_device("cuda")
    try:
        assert run_of(made_by_default) == expected
        assert torch.utils._device.CURRENT_DEVICE == OUTSIDE
    finally:
        torch.set_default_device(None)


def test_events_and_waiting_change_nothing():
    def streams(device):
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(here)
        started = torch.cuda.Event(enable_timing=True)
        for loss in plain(device):
            started.record()
            with torch.cuda.stream(side), torch.cuda.device(0):
                loss.detach()
            assert not isinstance(here, torch.cuda.device)  # as torch.cuda.synchronize asks
            side.record_event().wait()
            here.wait_stream(side)
            torch.cuda.synchronize()
            yield loss

    assert run_of(streams) == run_of(plain)


def test_each_stream_has_blocks_of_its_own():
    side_by_side = 30 << 20

    def streams(device):
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        for loss in plain(device):
            with torch.cuda.stream(side):
                x = torch.empty(side_by_side, dtype=torch.uint8, device=device)
            x.record_stream(here)
            assert torch.cuda.current_stream() is here
            del x  # the default stream cannot have its block
            y = torch.empty(side_by_side, dtype=torch.uint8, device=device)
            del y
            with side:  # this takes what x had
                z = torch.empty(side_by_side, dtype=torch.uint8, device=device)
            del z
            torch.cuda.set_stream(side)
            w = torch.empty(side_by_side, dtype=torch.uint8, device=device)
            torch.cuda.set_stream(here)
            del w
            yield loss

    run = lab.simulate(streams, gpu="t4")
    assert run.reserved_bytes - lab.simulate(plain, gpu="t4").reserved_bytes == 2 * side_by_side
    stream_of = {e.storage: e.stream for e in run.trace.events if e.change_bytes > 0}
    assert set(stream_of.values()) == {0, 1}
    uses = [
        e for e in run.trace.events if run.trace.storages[e.storage].nbytes and not e.change_bytes
    ]
    assert [(stream_of[e.storage], e.stream) for e in uses] == 2 * [(1, 0)]


def pinned(batch):
    return batch[0].pin_memory()


def test_pinned_batches_are_copies_on_the_host():
    def by_loader(device):
        data = TensorDataset(torch.randn(16, SIDE))
        for [rows] in DataLoader(data, batch_size=8, pin_memory=True):
            yield rows.to("cuda", non_blocking=True).sum()

    def by_hand(device):
        data = TensorDataset(torch.randn(16, SIDE))
        loader = DataLoader(data, batch_size=8)
        for rows in map(pinned, loader):
            yield rows.to(device, non_blocking=True).sum()

    assert run_of(by_loader) == run_of(by_hand)


def test_what_changes_speed_alone_is_allowed():
    def fast(device):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
        torch.cuda.manual_seed_all(0)
        torch.cuda.set_device(0)
        torch.cuda.reset_peak_memory_stats()
        yield from plain(device)

    assert run_of(fast) == run_of(plain)


def test_questions_about_the_gpu_are_answered_for_the_simulated_one():
    found = {}

    def asks(device):
        x = torch.ones(4, device="cuda" if torch.cuda.is_available() else "cpu")
        found["seen"] = torch.cuda.device_count(), torch.cuda.current_device(), x.is_cuda
        found["name"] = torch.cuda.get_device_name(0)
        found["capability"] = torch.cuda.get_device_capability(x.device)
        found["memory"] = torch.cuda.get_device_properties(0).total_memory
        found["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        found["accelerator"] = torch.accelerator.is_available()
        yield x.sum()

    lab.simulate(asks, gpu="t4")
    t4 = lab.gpu("t4")
    assert found == {
        "seen": (1, 0, True),
        "name": t4.name,
        "capability": (7, 5),
        "memory": t4.usable_bytes,
        "bf16": False,
        "accelerator": True,
    }
    assert torch.cuda.is_available() is torch.backends.cuda.is_built()


REFUSED = {
    "torch.cuda.memory_allocated": lambda: torch.cuda.memory_allocated(),
    "peak_bytes": lambda: torch.cuda.max_memory_allocated(),
    "reserved_bytes": lambda: torch.cuda.memory.memory_summary(),
    "the run": lambda: torch.cuda.mem_get_info(),
    "torch.accelerator": lambda: torch.accelerator.max_memory_reserved(),
    "_record_memory_history": lambda: torch.cuda.memory._record_memory_history(),
    "what is cached": lambda: torch.cuda.empty_cache(),
    "a smaller GPU": lambda: torch.cuda.set_per_process_memory_fraction(0.5),
    "times nothing": lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event()),
    "CUDAGraph": lambda: torch.cuda.CUDAGraph(),
    "get_rng_state": lambda: torch.cuda.get_rng_state(),
    "can_use_flash_attention": lambda: torch.backends.cuda.can_use_flash_attention(None),
    "names GPU 1": lambda: torch.ones(2).to("cuda:1"),
    "tensor type": lambda: torch.ones(2).type("torch.cuda.FloatTensor"),
    "needs CUDA": lambda: torch.Generator("cuda"),
    "outside the experiment": lambda: scaled_outside(),
}
OUTSIDE_SCALER = []


def scaled_outside():
    OUTSIDE_SCALER[0].scale(torch.ones(()))


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_answered_is_refused_with_its_line(words):
    def asks(device):
        REFUSED[words]()
        yield torch.ones((), device=device)

    OUTSIDE_SCALER[:] = [torch.amp.GradScaler("cuda")]
    with pytest.raises(lab.InputError, match=re.escape(words)) as caught:
        lab.simulate(asks, gpu="t4")
    assert re.match(rf"{re.escape(__file__)}, line \d+, `.*`, ", str(caught.value))


def helper(device):
    return device.type != "cuda"


class Checks:
    def kind(self, x):
        return x.device.type == "cuda"


def by_type(device):
    x = torch.ones(2, device=device)
    yield x.sum() * (device.type == "cuda")


def by_membership(device):
    yield torch.ones(2, device=device).sum() * (device.type in ("cuda", "mps"))


def by_the_cpu(device):
    yield torch.ones(2, device=device).sum() * (device.type == "cpu")


def by_a_helper(device):
    yield torch.ones(2, device=device).sum() * helper(device)


def by_a_class(device):
    yield torch.ones(2, device=device).sum() * Checks().kind(torch.ones(2, device=device))


@pytest.mark.parametrize("check", [by_type, by_membership, by_the_cpu, by_a_helper, by_a_class])
def test_a_check_of_the_devices_type_is_refused_with_its_line(check):
    with pytest.raises(lab.InputError, match=r"line \d+, `.*type.*torch.device"):
        lab.simulate(partial(check), gpu="t4")
    lab.simulate(check)  # on the CPU it is right


def test_a_comparison_with_the_cpu_is_right_everywhere():
    def experiment(device):
        on_gpu.append(device != torch.device("cpu"))
        yield torch.ones((), device=device)

    on_gpu = []
    lab.simulate(experiment, gpu="t4")
    lab.simulate(experiment)
    assert on_gpu == [True, False]


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

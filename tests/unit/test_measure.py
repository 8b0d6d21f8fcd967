"""measure(), simulate() and run(): three modes, one record; and what errors leave."""

import dataclasses
import gc
import re
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import labkit as lab
from gpumem import measurement
from gpumem.hardware import cuda, this_machine
from gpumem.inputs import InputError
from gpumem.out_of_memory import is_out_of_memory, requested_bytes
from gpumem.units import GIB, KIB, MIB

CPU = torch.device("cpu")


def mlp(device, batch_size=256, width=128, precision="fp32"):
    """Two layers on data that can be learnt; AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))
    model.to(device)
    alive.append(weakref.ref(model))
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(batch_size, width, device=device)
    target = x[:, :1].clone()
    while True:
        loss = (model(x) - target).square().mean()
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        yield loss


alive: list[weakref.ref] = []


def tensors():
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def hooks():
    """Everything that tracking and simulating put in place of PyTorch's own."""
    from torch.nn.modules import module

    optimizer = sys.modules["torch.optim.optimizer"]
    softmax = torch.nn.functional.softmax
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast_dtype = softmax(torch.zeros(2, dtype=torch.bfloat16), -1).dtype
    return (
        _get_current_dispatch_mode_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.autograd.graph.saved_tensors_hooks.__enter__,
        torch.UntypedStorage.resize_,
        torch.utils.swap_tensors,
        torch.get_rng_state,
        sys.modules["torch.optim.adam"]._default_to_fused_or_foreach,
        len(module._global_forward_hooks) + len(module._global_forward_pre_hooks),
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        this_machine.current_budget_bytes(),
        autocast_dtype,
    )


@pytest.fixture(autouse=True)
def nothing_stays_hooked():
    """Whatever a test does, PyTorch is afterwards as it was."""
    before = hooks()
    alive.clear()
    yield
    assert hooks() == before


def everything_is_gone():
    gc.collect()
    assert alive
    assert not any(ref() is not None for ref in alive)


# --- the three modes agree ----------------------------------------------------------------------


def test_fake_equals_tracked_to_the_byte():
    real, fake = lab.measure(mlp, steps=2), lab.simulate(mlp, steps=2)
    assert (real.mode, fake.mode, fake.device) == ("tracked", "simulated", "CPU")
    assert fake.peak_bytes == real.peak_bytes > MIB
    assert fake.by_category == real.by_category
    assert fake.step_peaks_bytes == real.step_peaks_bytes
    assert fake.flops == real.flops > 0
    assert fake.moved_bytes == pytest.approx(real.moved_bytes, abs=8)  # the loss that was read
    assert [e[1:] for e in fake.trace.events] == [e[1:] for e in real.trace.events]
    assert fake.parameters == real.parameters
    everything_is_gone()


def test_categories_sum_and_losses_fall():
    run = lab.measure(mlp, steps=6)
    assert sum(run.by_category.values()) == run.peak_bytes
    assert len(run.losses) == 6
    assert run.losses[-1] < run.losses[0] / 2
    assert len(run.step_seconds) == 4  # the first two were tracked, not timed
    assert run.seconds_per_step > 0
    assert run.reserved_bytes is None
    assert run.capacity_bytes is None
    assert run.fits is None


def test_the_second_step_holds_the_optimizers_state():
    run = lab.simulate(mlp, steps=3)
    assert (run.losses, run.step_seconds, run.reserved_bytes) == ((), (), None)
    assert len(run.step_peaks_bytes) == 3
    assert run.step_peaks_bytes[0] < run.step_peaks_bytes[1] == run.step_peaks_bytes[2]
    assert run.peak_bytes == max(run.step_peaks_bytes)


def test_parameters_are_recorded_plainly_with_their_defaults():
    def experiment(device, optimizer=torch.optim.SGD, sizes=(1, 2), rate=0.1, name=None, steps=1):
        yield from [torch.ones(()), 2.0, 1][:steps]

    run = lab.measure(experiment, rate=0.5, steps=3)
    assert run.losses == (1.0, 2.0, 1.0)  # it is told how many
    recorded = {"optimizer": "SGD", "sizes": "(1, 2)", "rate": 0.5, "name": None, "steps": 3}
    assert run.parameters == recorded


# --- running out of memory ----------------------------------------------------------------------


def new_peaks(trace, phase):
    """Totals that an event of ``phase`` was the first to reach, with the event's number."""
    total = best = 0
    for index, _, change_bytes in trace.changes():
        total += change_bytes
        if total > best:
            best = total
            if trace.events[index].phase == phase:
                yield index, total


@pytest.mark.parametrize("phase", ["setup", "forward", "backward", "optimizer"])
def test_running_out_of_memory_says_where_and_frees_everything(phase):
    clean = lab.simulate(mlp, batch_size=8, width=256)
    [(index, needed_bytes), *_] = new_peaks(clean.trace, phase)
    before, first = tensors(), lab.measure(mlp, batch_size=8, width=256)
    alive.clear()
    with lab.pretend(budget_bytes=needed_bytes - 1):
        run = lab.measure(mlp, batch_size=8, width=256)
        predicted = lab.simulate(mlp, batch_size=8, width=256)
    culprit = clean.trace.storages[clean.trace.events[index].storage]
    oom = run.oom
    for field in ("requested_bytes", "live_bytes", "step", "phase", "module", "operator"):
        assert getattr(oom, field) == getattr(predicted.oom, field), field
    assert (oom.phase, oom.module, oom.operator) == (phase, culprit.module, culprit.operator)
    assert oom.step == (0 if phase == "setup" else 1)
    assert oom.requested_bytes == clean.trace.events[index].change_bytes
    assert oom.live_bytes == needed_bytes - oom.requested_bytes == sum(oom.by_category.values())
    assert oom.capacity_bytes == run.capacity_bytes == needed_bytes - 1
    assert run.fits is False
    assert oom.live_bytes <= run.peak_bytes < needed_bytes
    assert run.losses == ()
    if phase != "setup":
        everything_is_gone()
    assert tensors() == before
    again = lab.measure(mlp, batch_size=8, width=256)
    assert (again.losses, again.peak_bytes) == (first.losses, first.peak_bytes)


def test_an_experiment_may_catch_its_own_out_of_memory():
    def halving(device, batch_size=1024):
        while True:
            try:
                yield torch.zeros(batch_size, KIB, device=device).sum()
                return
            except torch.OutOfMemoryError:
                batch_size //= 2

    with lab.pretend(budget_bytes=MIB):
        run = lab.measure(halving)
    assert run.oom is None
    assert len(run.losses) == 1
    assert run.peak_bytes <= MIB


WORDINGS = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"), 2 * GIB),
    (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 MiB."), 20 * MIB),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 bytes."), 512),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), 0),
    (RuntimeError("can't allocate memory: you tried to allocate 4096 bytes. Error"), 4096),
    (torch.OutOfMemoryError("Tried to allocate many GiB"), 0),
    (MemoryError(), 0),
]


def test_out_of_memory_in_all_its_wordings():
    for error, requested in WORDINGS:
        assert is_out_of_memory(error)
        assert requested_bytes(error) == requested
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))

    def failing(device):
        yield torch.ones(())
        raise WORDINGS[-1][0]

    run = lab.measure(failing)
    assert (run.oom.requested_bytes, run.oom.step, len(run.losses)) == (0, 2, 1)


def test_a_cpu_that_runs_out_says_where():
    class Greedy(nn.Linear):
        def forward(self, count):
            return self.weight.sum() * torch.empty(count, dtype=torch.uint8).float().sum()

    def greedy(device):
        model = nn.Sequential(Greedy(1000, 1, bias=False))
        yield model(10)
        yield model(1 << 52)

    oom = lab.measure(greedy, steps=5).oom
    assert (oom.phase, oom.module, oom.operator, oom.step) == ("forward", "0", "empty", 2)
    assert oom.by_category["weights"] == 4000


# --- experiments that are wrong -----------------------------------------------------------------

MODES = pytest.mark.parametrize("mode", [lab.measure, lab.simulate])


@MODES
def test_what_is_no_experiment_is_refused(mode):
    def nothing(device):
        return
        yield

    def no_device():
        yield torch.ones(())

    def needs_more(device, size):
        yield torch.ones(size, device=device)

    for thing in (None, "mlp", mlp(CPU), nn.Linear):
        with pytest.raises(InputError, match="an experiment is a generator function"):
            mode(thing)
    with pytest.raises(InputError, match="nothing ended without yielding a loss"):
        mode(nothing)
    with pytest.raises(InputError, match="no_device"):
        mode(no_device)
    with pytest.raises(InputError, match=r"needs_more.*size"):
        mode(needs_more)


@MODES
@pytest.mark.parametrize("value", [None, torch.ones(2), {"loss": 1.0}])
def test_an_experiment_that_yields_no_loss(mode, value):
    def wrong(device):
        yield value

    message = f"yields the loss, a tensor with one element.* yielded {type(value).__name__}"
    with pytest.raises(InputError, match=message):
        mode(wrong)


ASKING = {
    "item": lambda loss: loss.item(),
    "if": lambda loss: bool(loss > 3),
    "tolist": lambda loss: loss.tolist(),
    "equal": lambda loss: torch.equal(loss, loss),
    "mask": lambda loss: loss.reshape(1)[loss.reshape(1) > 0],
}


@pytest.mark.parametrize("ask", ASKING)
def test_a_simulation_has_no_values_to_give(ask):
    def curious(device):
        loss = nn.Linear(8, 1, device=device)(torch.ones(1, 8, device=device)).sum()
        ASKING[ask](loss.detach())
        yield loss

    assert lab.measure(curious).losses
    with pytest.raises(InputError, match=r"curious asks for a value .*Yield the loss tensor"):
        lab.simulate(curious)


class OwnError(Exception):
    pass


@MODES
@pytest.mark.parametrize("error", [OwnError, KeyboardInterrupt, GeneratorExit])
def test_an_experiments_own_error_comes_through(mode, error):
    """Hooks and modes are gone (the fixture looks), and nothing outlives the error."""

    def failing(device):
        steps = mlp(device, batch_size=8)
        yield next(steps)
        next(steps)
        raise error

    with pytest.raises(error):
        mode(failing)
    lab.free_memory()
    everything_is_gone()


@MODES
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batchsize": 4}, "unknown argument of mlp 'batchsize'. Did you mean 'batch_size'? Known"),
        ({"device": "cpu"}, "unknown argument of mlp 'device'."),
        ({"batch_size": "x"}, "batch_size must be a whole number of at least 1, not 'x'"),
        ({"precision": "fp23"}, "unknown precision 'fp23'. Did you mean 'fp32'? Known: fp32, amp"),
        ({"steps": 0}, "steps must be from 1 to 2147483648, not 0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_built(mode, arguments, message):
    with pytest.raises(InputError, match=re.escape(message)):
        mode(mlp, **arguments)
    assert not alive


def test_an_unknown_gpu_is_refused_and_a_precision_may_be_in_capitals():
    for mode in (lab.simulate, lab.run):
        with pytest.raises(InputError, match="'t5'"):
            mode(mlp, gpu="t5")
    assert lab.simulate(mlp, Precision="AMP_bf16").parameters["precision"] == "amp-bf16"


# --- simulating a named GPU ---------------------------------------------------------------------


def test_a_large_run_does_not_fit_and_the_simulation_says_how_much_it_needs():
    large = {"batch_size": 1, "width": 20_000}  # 6 GiB of weights; AdamW needs four times that
    weights = 20_000 * 80_000 + 80_000 + 80_000 + 1
    run = lab.simulate(mlp, gpu="t4", **large)
    assert run.fits is False
    assert run.peak_bytes > 4 * 4 * weights > run.capacity_bytes
    oom = run.oom
    assert oom.live_bytes == sum(oom.by_category.values()) <= run.capacity_bytes
    assert oom.live_bytes + oom.requested_bytes > run.capacity_bytes
    assert (oom.step, oom.phase) == (1, "optimizer")
    assert oom.by_category["weights"] == oom.by_category["gradients"] == 4 * weights
    fitting = lab.simulate(mlp, gpu="b200", **large)
    assert (fitting.fits, fitting.oom, fitting.device) == (True, None, lab.gpu("b200").name)
    assert fitting.capacity_bytes == lab.gpu("b200").budget_bytes


def test_the_pretended_gpu_is_simulated():
    with lab.pretend("t4"):
        assert lab.simulate(mlp).device == lab.gpu("t4").name
        assert lab.run(mlp).capacity_bytes == lab.gpu("t4").budget_bytes
        assert lab.simulate(mlp, gpu="l4").device == lab.gpu("l4").name
    with lab.pretend(budget_bytes=MIB):
        run = lab.simulate(mlp)
    assert (run.device, run.capacity_bytes, run.fits) == ("CPU", MIB, False)


# --- run ----------------------------------------------------------------------------------------


def test_run_simulates_a_t4_here_and_takes_another(monkeypatch):
    monkeypatch.setattr(this_machine, "machine", lambda: machine("cpu"))
    assert lab.run(mlp).device == lab.gpu("t4").name
    assert lab.run(mlp, gpu="l4").device == lab.gpu("l4").name
    assert len(lab.run(mlp, steps=3).step_peaks_bytes) == 3
    with lab.pretend(budget_bytes=GIB):
        assert lab.run(mlp).capacity_bytes == GIB


def test_run_measures_where_there_is_a_gpu(monkeypatch):
    calls = []
    monkeypatch.setattr(this_machine, "machine", lambda: machine("cuda"))
    monkeypatch.setattr(measurement, "measure", lambda *a, **k: calls.append((a, k)))
    lab.run(mlp, gpu="t4", steps=3, batch_size=2)
    lab.run(mlp)
    # Two more than are tracked, to be timed.
    assert calls == [((mlp,), {"steps": 4, "batch_size": 2}), ((mlp,), {})]
    phantom = dataclasses.replace(machine("cuda"), phantom=True)  # which times none
    monkeypatch.setattr(this_machine, "machine", lambda: phantom)
    lab.run(mlp, steps=3)
    assert calls[2:] == [((mlp,), {"steps": 3})]
    with pytest.raises(InputError, match="'t5'"):
        lab.run(mlp, gpu="t5")


# --- on CUDA, by proxy; on a phantom GPU: tests/phantom/test_measure.py -------------------------

BASE = 5 * MIB  # what the process held before the run


HERE = this_machine.machine()


def machine(kind):
    capacity_bytes = 16 * GIB if kind == "cuda" else None
    return dataclasses.replace(HERE, kind=kind, name=f"a {kind}", capacity_bytes=capacity_bytes)


class FakeCuda:
    """An allocator that answers from a script: one entry per time the peaks are reset."""

    def __init__(self, *peaks):
        self.script = [(BASE + allocated, reserved) for allocated, reserved in peaks]
        self.resets, self.calls = -1, []

    def __getattr__(self, name):  # synchronize, empty_cache, clear_workspaces
        return lambda *_: self.calls.append(name)

    def allocated(self):
        return BASE

    def reset_peaks(self):
        self.resets = min(self.resets + 1, len(self.script) - 1)

    def peak_allocated(self):
        return self.script[self.resets][0]

    def peak_reserved(self):
        return self.script[self.resets][1]


@pytest.fixture
def fake_cuda(monkeypatch):
    """Tensors stay on the CPU; ``measure`` takes that for the GPU and asks the script."""

    def install(*peaks):
        fake = FakeCuda(*peaks)
        monkeypatch.setattr(cuda, "cuda_memory", fake)
        monkeypatch.setattr(this_machine, "device", lambda: torch.device("cuda", 0))
        monkeypatch.setattr(this_machine, "machine", lambda: machine("cuda"))
        monkeypatch.setattr(measurement, "_name", lambda device: "cpu")
        return fake

    return install


def on_gpu(device, batch_size=8):
    assert device == torch.device("cuda", 0)
    yield from mlp(CPU, batch_size=batch_size)


def test_cuda_peaks_are_the_allocators_above_what_was_held(fake_cuda):
    tracked = lab.measure(mlp, batch_size=8)
    fake = fake_cuda(
        (70 * MIB, 80 * MIB), (90 * MIB, 120 * MIB), (60 * MIB, 110 * MIB), (1, 1), (1, 1)
    )
    run = lab.measure(on_gpu)
    assert (run.mode, run.device, run.capacity_bytes) == ("measured", "a cuda", 16 * GIB)
    assert run.step_peaks_bytes == (70 * MIB, 90 * MIB, 60 * MIB, 1)
    assert run.peak_bytes == 90 * MIB == sum(run.by_category.values())
    assert run.reserved_bytes == 120 * MIB
    assert run.by_category.pop("unattributed") == 90 * MIB - tracked.peak_bytes
    assert run.by_category == tracked.by_category
    assert run.losses == tracked.losses
    assert len(run.step_seconds) == 2
    assert fake.calls.index("clear_workspaces") < fake.calls.index("synchronize")
    assert fake.calls.count("synchronize") >= 6  # seconds end when the device is done
    assert run.fits is True


def test_what_only_one_of_tracker_and_allocator_sees(fake_cuda, monkeypatch):
    tracked = lab.measure(mlp, batch_size=8)
    fake_cuda(*[(1, MIB)] * 5)  # it cannot count less than the tensors that it holds
    assert lab.measure(on_gpu).by_category == tracked.by_category
    fake_cuda(*[(n * MIB, 2 * n * MIB) for n in (30, 50, 40, 40, 0)])
    run = lab.measure(on_gpu, track=False)
    assert (run.reserved_bytes, len(run.step_seconds)) == (100 * MIB, 4)
    assert run.by_category == {"unattributed": 50 * MIB}
    fake_cuda(*[(30 * MIB, 40 * MIB)] * 5)
    monkeypatch.setattr(measurement, "_name", str)  # tensors on the host are counted apart
    run = lab.measure(on_gpu)
    assert run.host_bytes == tracked.peak_bytes
    assert run.by_category == {"unattributed": 30 * MIB}

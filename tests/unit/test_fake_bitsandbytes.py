"""bitsandbytes in simulation: the bytes of real runs, the host's share, and nothing left behind."""

import logging
import subprocess
import sys
import textwrap

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes import functional
from bitsandbytes.autograd import _functions
from bitsandbytes.nn import modules
from bitsandbytes.optim.optimizer import Optimizer8bit
from torch import nn

import labkit as lab
from gpumem.fake_cuda.bitsandbytes import COPIED_ROWS, PAGED_ELEMENTS, _multiplies_packed
from gpumem.fake_cuda.fake_tensors import GPU_DEVICE, fake_tensors
from gpumem.hardware.catalogue import gpu
from gpumem.tracker import track
from labkit.exercises.checks import train_steps

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
ROWS, COLUMNS = 256, 512
WEIGHT = ROWS * COLUMNS
TABLE, WIDE_TABLE = 16 * 4, 256 * 4  # the values of a 4-bit and of an 8-bit number


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, logger="bitsandbytes")


def four_bit(double):
    options = {"quant_type": "nf4", "compress_statistics": double}
    return bnb.nn.Linear4bit(COLUMNS, ROWS, bias=False, **options)


def eight_bit(threshold):
    options = {"has_fp16_weights": False, "threshold": threshold}
    return bnb.nn.Linear8bitLt(COLUMNS, ROWS, bias=False, **options)


LAYERS = {
    "nf4": lambda: four_bit(double=False),
    "nf4 double": lambda: four_bit(double=True),
    "int8": lambda: eight_bit(threshold=0.0),
    "int8, threshold": lambda: eight_bit(threshold=6.0),
}
# Four bits a weight and a scale for 64 of them; or a scale of a byte, and one more for 256 scales.
BYTES = {
    "nf4": WEIGHT // 2 + WEIGHT // 64 * 4 + TABLE,
    "nf4 double": WEIGHT // 2 + WEIGHT // 64 + WEIGHT // 64 // 256 * 4 + 4 + TABLE + WIDE_TABLE,
    "int8": WEIGHT + 4 * ROWS,
    "int8, threshold": WEIGHT + 4 * ROWS,
}


def quantised(device, kind="nf4", tokens=2048):
    """A quantised layer between trained ones. Fewer tokens leave the peak to the quantising."""
    before, after = nn.Linear(32, COLUMNS), nn.Linear(ROWS, 8)
    layer = LAYERS[kind]().to(device)
    trained = nn.ModuleList([before, after]).to(device)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    while True:
        inputs = torch.randn(tokens, 32, device=device)
        loss = after(layer(before(inputs))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def full(device, name="AdamW8bit"):
    """Batches that large keep the peak out of the optimizer, which on a CPU widens its state."""
    model = lab.model("SmolLM2-tiny", device=device, layers=1)
    optimizer = getattr(bnb.optim, name)(model.parameters())
    batches = lab.batches(device=device, batch_size=4, seq_len=128)
    yield from train_steps(model, optimizer, batches)


CASES = [
    *((quantised, {"kind": kind}) for kind in LAYERS),
    *((full, {"name": name}) for name in ("AdamW8bit", "PagedAdamW")),
    pytest.param(full, {"name": "PagedAdamW8bit"}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("experiment", "parameters"), CASES)
def test_a_simulated_cpu_takes_what_the_real_one_takes(experiment, parameters):
    simulated = lab.simulate(experiment, **parameters)
    tracked = lab.measure(experiment, steps=2, **parameters)
    allocated = lab.measure(experiment, steps=2, track=False, **parameters)
    assert simulated.peak_bytes == pytest.approx(allocated.peak_bytes, rel=0.01)
    assert simulated.peak_bytes == pytest.approx(tracked.peak_bytes, rel=0.01)
    for category in ("weights", "optimizer", "buffers"):
        assert simulated.bytes_of(category) == tracked.bytes_of(category)
    if experiment is not quantised:
        assert simulated.bytes_of("optimizer") > 0


# --- what quantised weights take ---------------------------------------------------------------


def classified(kind, device):
    """What one layer's weights take once it has run, and the trace."""
    with track(device=str(device)) as log:
        layer = LAYERS[kind]().to(device)
        layer(torch.randn(2, COLUMNS, device=device))
        live = log.live_by_category()
    return live, log


@pytest.mark.parametrize("kind", LAYERS)
def test_quantised_weights_take_their_formula(kind):
    functional.name2qmap.clear()  # a table that another test has made would not be met
    cpu = torch.device("cpu")
    live, log = classified(kind, cpu)
    assert live["weights"] == BYTES[kind]
    assert sum(live.values()) == log.live_bytes["cpu"]
    for card, device in ((None, cpu), (gpu("t4"), GPU_DEVICE)):
        with fake_tensors(card):
            live, log = classified(kind, device)
            assert live["weights"] == BYTES[kind]
            assert sum(live.values()) == log.live_bytes[str(device)]


def test_a_layer_made_on_the_host_is_quantised_on_the_gpu():
    with fake_tensors(gpu("t4")), track(device="cpu:0") as log:
        layer = LAYERS["nf4"]()
        assert log.live_bytes["cpu"] >= 4 * WEIGHT
        assert not log.live_bytes["cpu:0"]
        layer = layer.to(GPU_DEVICE)
        assert layer.weight.device == layer.weight.quant_state.absmax.device == GPU_DEVICE
        assert isinstance(layer.weight, bnb.nn.Params4bit)
        assert log.live_bytes["cpu:0"] == BYTES["nf4"]
        assert log.live_bytes["cpu"] == 0


def copies(rows, card):
    with fake_tensors(card), track() as log:
        device = GPU_DEVICE if card else torch.device("cpu")
        layer = LAYERS["nf4 double"]().to(device)
        layer(torch.randn(rows, COLUMNS, device=device))
    made = [s for s in log.trace().storages if s.operator == "dequantize_4bit"]
    return [s.nbytes for s in made]


def test_many_rows_need_a_copy_of_the_weight_and_few_on_a_gpu_none():
    whole = [4 * WEIGHT]
    assert copies(2048, gpu("t4")) == copies(COPIED_ROWS - 1, None) == whole
    assert copies(COPIED_ROWS - 1, gpu("t4")) == copies(COPIED_ROWS - 1, gpu("mi300x")) == []
    # Between, it is the GPU's own rule.
    assert _multiplies_packed(gpu("rtx-4090"), torch.bfloat16, 8, 4096, 4096)
    assert not _multiplies_packed(gpu("b200"), torch.bfloat16, 8, 4096, 4096)
    assert copies(64, gpu("b200")) == copies(64, gpu("mi300x")) == whole


def test_cudas_int8_product_is_of_whole_numbers_then_of_half_precision():
    with fake_tensors(gpu("t4")), track(device="cpu:0") as log:
        layer = LAYERS["int8, threshold"]().to(GPU_DEVICE)
        layer(torch.randn(32, COLUMNS, device=GPU_DEVICE, requires_grad=True)).sum().backward()
    made = {(s.operator, s.dtype): s.nbytes for s in log.trace().storages}
    assert made["int8_linear_matmul", "int32"] == 4 * 32 * ROWS
    assert made["int8_mm_dequant", "float16"] == 2 * 32 * ROWS
    assert made["int8_vectorwise_quant", "int8"] == 32 * COLUMNS  # the newest: the activations


# --- optimizers --------------------------------------------------------------------------------


def one_layer(device, name="AdamW8bit", size=512, columns=512):
    layer = nn.Linear(columns, size, bias=False, device=device)
    optimizer = getattr(bnb.optim, name)(layer.parameters())
    while True:
        loss = layer(torch.randn(4, columns, device=device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def state_bytes(name, card="t4", **size):
    """Optimizer bytes held after a step: on the GPU and on the host."""
    trace = lab.simulate(one_layer, gpu=card, name=name, **size).trace
    held = [s for s in trace.storages if str(s.category) == "optimizer"]
    on = {device: sum(s.nbytes for s in held if s.device == device) for device in ("cpu:0", "cpu")}
    return on["cpu:0"], on["cpu"]


def test_eight_bit_state_is_two_bytes_a_weight_and_two_scales_for_256():
    weights = 512 * 512
    scales = 2 * weights // 256 * 4
    assert state_bytes("AdamW8bit") == (2 * weights + scales + 2 * WIDE_TABLE, 0)


def test_paged_state_lies_on_the_host():
    weights = 512 * 512
    assert state_bytes("PagedAdamW") == (0, 8 * weights)
    scales_and_tables = 2 * weights // 256 * 4 + 2 * WIDE_TABLE
    assert state_bytes("PagedAdamW8bit") == (scales_and_tables, 2 * weights)
    assert PAGED_ELEMENTS > 128 * 512
    assert state_bytes("PagedAdamW", size=128) == (8 * 128 * 512, 0)  # too small to be paged
    run = lab.simulate(one_layer, gpu="t4", name="PagedAdamW")
    assert run.bytes_of("optimizer") == 0
    assert run.host_bytes >= 8 * weights


# --- nothing stays behind ----------------------------------------------------------------------


def names():
    return (
        bnb.matmul,
        functional.create_dynamic_map,
        functional.is_on_gpu,
        _functions.torch,
        modules.has_avx512bf16,
        Optimizer8bit.get_state_buffer,
        vars(torch.Tensor).get("_make_subclass"),
    )


@pytest.mark.parametrize("card", [None, "t4"])
def test_nothing_fake_stays_behind(card):
    def broken(device):
        four_bit(double=True).to(device)
        raise ZeroDivisionError
        yield

    real = torch.randn(256)
    functional.name2qmap.clear()
    functional.quantize_blockwise(real)  # fills the process's table
    before, table = names(), functional.name2qmap["dynamic"]
    lab.simulate(quantised, gpu=card, kind="nf4 double")
    with pytest.raises(ZeroDivisionError):
        lab.simulate(broken, gpu=card)
    assert names() == before
    assert functional.name2qmap["dynamic"] is table
    codes, state = functional.quantize_blockwise(real)
    assert functional.dequantize_blockwise(codes, state).sub(real).abs().max() < 0.1
    layer = four_bit(double=True).to("cpu")
    assert type(layer.weight) is bnb.nn.Params4bit
    assert layer(torch.randn(2, COLUMNS)).isfinite().all()


LATE = """
    import sys
    import torch
    from torch import nn
    import labkit as lab

    def experiment(device):
        import bitsandbytes as bnb
        layer = bnb.nn.Linear4bit(512, 256, bias=False, quant_type="nf4").to(device)
        last = nn.Linear(256, 64, device=device)
        optimizer = bnb.optim.AdamW8bit(last.parameters())
        while True:
            loss = last(layer(torch.randn(16, 512, device=device))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    assert "bitsandbytes" not in sys.modules
    first = lab.simulate(experiment, gpu="t4")
    import bitsandbytes
    assert not [f for f in sys.meta_path if type(f).__module__.startswith("gpumem")]
    assert "exec_module" not in vars(bitsandbytes.__loader__)
    assert bitsandbytes.matmul.__module__ == "bitsandbytes.autograd._functions"
    second = lab.simulate(experiment, gpu="t4")
    assert first.by_category == second.by_category, (first.by_category, second.by_category)
    assert first.bytes_of("optimizer") > 0
    lab.measure(experiment, steps=2)
"""


def test_an_experiment_may_be_the_first_to_import_it():
    code = textwrap.dedent(LATE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]

"""Convolutions take what they take with cuDNN, less its workspaces; CUDA graphs are captured."""

from math import prod

import pytest
import torch
from torch import nn
from torch.backends import cudnn

import labkit as lab
from gpumem.allocator.reductions import sum_workspaces
from gpumem.hardware import this_machine

ORDINARY, LAST = torch.contiguous_format, torch.channels_last
LAST_3D = torch.channels_last_3d
CONVOLUTIONS = [
    (nn.Conv1d, {}, (64,), torch.float32, ORDINARY),
    (nn.Conv2d, {}, (48, 40), torch.float32, ORDINARY),
    (nn.Conv2d, {"stride": 2, "dilation": 2}, (48, 40), torch.float16, ORDINARY),
    (nn.Conv2d, {}, (48, 40), torch.float16, LAST),
    (nn.Conv2d, {"groups": 4}, (48, 40), torch.bfloat16, LAST),
    (nn.Conv3d, {}, (12, 10, 14), torch.float32, ORDINARY),
    (nn.Conv3d, {"groups": 2}, (12, 10, 14), torch.bfloat16, LAST_3D),
    (nn.ConvTranspose1d, {"stride": 2}, (64,), torch.float16, ORDINARY),
    (nn.ConvTranspose2d, {"stride": 2, "groups": 4}, (48, 40), torch.float32, ORDINARY),
    (nn.ConvTranspose2d, {}, (48, 40), torch.bfloat16, LAST),
    (nn.ConvTranspose3d, {}, (12, 10, 14), torch.float16, ORDINARY),
]


def rounded(*sizes: int) -> int:
    """Return what the allocator takes for blocks of so many bytes."""
    return sum(-(-nbytes // 512) * 512 for nbytes in sizes)


def peak_of(function) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("benchmark", [False, True])
@pytest.mark.parametrize(("kind", "options", "size", "dtype", "memory_format"), CONVOLUTIONS)
def test_a_convolution_takes_its_tensors(kind, options, size, dtype, memory_format, benchmark):
    layer = kind(16, 32, 3, **options).to("cuda", dtype, memory_format=memory_format)
    x = torch.ones(2, 16, *size, device="cuda", dtype=dtype).to(memory_format=memory_format)
    x.requires_grad_()
    with cudnn.flags(enabled=True, benchmark=benchmark, deterministic=benchmark):
        with torch.no_grad():
            shape = layer(x).shape
            result_bytes = prod(shape) * dtype.itemsize
            assert peak_of(lambda: layer(x)) == rounded(result_bytes)
        y = layer(x)
        assert y.is_contiguous(memory_format=memory_format)
        dy = torch.ones_like(y)
        over = [dim for dim in range(y.dim()) if dim != 1]
        bias_sum = sum_workspaces(dy, over, dtype, this_machine.this_gpu())
        gradients = rounded(x.nbytes, layer.weight.nbytes, layer.bias.nbytes)
        assert peak_of(lambda: y.backward(dy)) == gradients + rounded(*bias_sum)
        first = torch.autograd.grad(layer(x).pow(2).sum(), layer.weight, create_graph=True)
        first[0].sum().backward()


def test_a_large_convolution_takes_no_columns():
    layer = nn.Conv2d(128, 128, 3, padding=1).cuda()
    x = torch.ones(1, 128, 1024, 1024, device="cuda")
    with torch.no_grad():
        assert peak_of(lambda: layer(x)) == x.nbytes
        with cudnn.flags(enabled=False):
            assert peak_of(lambda: layer(x)) > 5 * x.nbytes


def train_convolution(device, side=1024):
    layer = nn.Conv2d(128, 128, 3, padding=1).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    while True:
        x = torch.randn(1, 128, side, side, device=device)
        loss = layer(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_simulated_convolution_takes_what_the_phantom_does():
    gpu = this_machine.this_gpu()
    simulated = lab.simulate(train_convolution, gpu=gpu)

    def train():
        for _, _loss in zip(range(3), train_convolution("cuda"), strict=False):
            pass

    dy = torch.empty(1, 128, 1024, 1024, device="cuda")
    bias_sum = sum_workspaces(dy, [0, 2, 3], torch.float32, gpu)
    x_bytes, weight_bytes, bias_bytes = dy.nbytes, 4 * 9 * 128 * 128, 512
    losses = rounded(4, 4, 4)  # of two steps, and its gradient
    expected = 2 * (x_bytes + weight_bytes + bias_bytes) + losses + rounded(*bias_sum)
    del dy
    assert peak_of(train) == simulated.peak_bytes == expected


class ResidualBlock(nn.Module):
    """The one of diffusers' autoencoders."""

    def __init__(self, channels):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for _ in range(2))
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        hidden = x
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = norm(hidden)
            hidden = nn.functional.silu(hidden)
            hidden = layer(hidden)
        return (x + hidden) / 1.0


def test_an_autoencoder_of_large_pictures_takes_its_tensors():
    """As Stable Diffusion XL's encodes a picture: one convolution's columns would take 4.5 GiB."""
    first = nn.Conv2d(3, 128, 3, padding=1).cuda()
    blocks = nn.Sequential(*[ResidualBlock(128) for _ in range(2)]).cuda()
    picture = torch.ones(1, 3, 1024, 1024, device="cuda")
    one = 4 * 128 << 20

    def encode():
        with torch.no_grad():
            x = first(picture)
            blocks(x)

    # The first block's input, and in the second its own, what it has computed, sum, and quotient.
    assert peak_of(encode) == 5 * one


def test_bf16_has_no_cudnn_before_ampere(on_phantom):
    """On Ampere it has, among the convolutions above."""
    code = """
        import torch
        layer = torch.nn.Conv2d(16, 16, 3, padding=1).cuda()
        for dtype in (torch.float16, torch.bfloat16):
            x = torch.ones(1, 16, 256, 256, device="cuda", dtype=dtype)
            layer.to(dtype).requires_grad_(False)
            layer(x)  # with cuBLAS's block
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layer(x)
            print((torch.cuda.max_memory_allocated() - before) // x.nbytes)
    """
    code = "if True:" + code
    assert on_phantom("t4", "-c", code).split() == ["1", "10"]  # the result; 9 columns for each


@pytest.mark.parametrize("memory_format", [ORDINARY, LAST])
def test_batch_norm_takes_its_tensors(memory_format):
    layer = nn.BatchNorm2d(16).cuda()
    x = torch.ones(2, 16, 48, 40, device="cuda").to(memory_format=memory_format).requires_grad_()
    y = layer(x)
    assert "Cudnn" in type(y.grad_fn).__name__
    assert y.is_contiguous(memory_format=memory_format)
    statistics = rounded(64, 64)
    assert peak_of(lambda: layer(x)) == rounded(x.nbytes) + statistics
    dy = torch.ones_like(y)
    assert peak_of(lambda: y.backward(dy)) == rounded(x.nbytes) + statistics
    assert peak_of(lambda: layer.eval()(x)) == rounded(x.nbytes)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_take_pytorchs_kernels(kind):
    def train():
        layer = kind(32, 64, num_layers=2, bidirectional=True, dropout=0.1).cuda()
        layer.flatten_parameters()
        with torch.inference_mode():
            layer(x)
        layer(x)[0].sum().backward()

    x = torch.ones(12, 4, 32, device="cuda")
    torch.cuda._lazy_init()
    peak_of(train)  # with cuBLAS's blocks
    with cudnn.flags(enabled=True):
        peak = peak_of(train)
    with cudnn.flags(enabled=False):
        assert peak == peak_of(train)


def test_other_functions_of_cudnn_run():
    assert cudnn.is_available()
    cudnn.enabled = True  # as scripts say
    x = torch.ones(50, 4, 20, device="cuda", requires_grad=True)
    targets, lengths = torch.ones(40, dtype=torch.int32), torch.full((4,), 10)
    loss = nn.functional.ctc_loss(x.log_softmax(2), targets, torch.full((4,), 50), lengths)
    loss.backward()
    image = torch.ones(2, 3, 32, 32, device="cuda", requires_grad=True)
    grid = nn.functional.affine_grid(image[:, 0, :2, :3], list(image.shape), align_corners=True)
    nn.functional.grid_sample(image, grid, align_corners=True).sum().backward()
    assert cudnn.version() >= 90000


def test_a_graph_keeps_its_pool():
    x = torch.ones(8 << 20, device="cuda")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        doubled = x * 2
        y = doubled + 1
        del doubled
        y = y * 3  # where `doubled` was
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            on_side = x + 1
        captured = side.record_event()
        torch.cuda.current_stream().wait_event(captured)
    assert not torch.cuda.is_current_stream_capturing()
    side.wait_event(captured)
    with torch.cuda.stream(side):
        assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()
    reserved_bytes = torch.cuda.memory_reserved()
    assert reserved_bytes == 4 * x.nbytes + (2 << 20)  # `x`, three of the graph's, its random state
    graph.replay()
    z = x + 1  # not where the graph has `doubled`
    assert torch.cuda.memory_reserved() == reserved_bytes + z.nbytes
    del x, y, z, on_side, graph


def test_graphed_callables_train():
    layer = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(), nn.BatchNorm2d(8)).cuda()
    x = torch.ones(2, 3, 32, 32, device="cuda")
    graphed = torch.cuda.make_graphed_callables(layer, (x,))
    for _ in range(3):
        graphed(x).sum().backward()


REDUCED_OVERHEAD = """
import torch

model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 8, 3))
model = model.cuda()
optimizer = torch.optim.SGD(model.parameters())
compiled = torch.compile(model, mode="reduce-overhead")
for _ in range(4):
    compiled(torch.ones(8, 3, 128, 128, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
assert any(segment["segment_pool_id"] != (0, 0) for segment in torch.cuda.memory_snapshot())
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


def test_compiled_graphs_are_answered(run):
    verdict, printed = run(REDUCED_OVERHEAD, gpu="a100-80gb")
    [answer] = verdict.answers
    [gpu] = answer.gpus
    assert [gpu.peak_allocated_bytes, gpu.peak_reserved_bytes] == list(map(int, printed.split()))
    assert answer.steps == 4
    assert "workspaces of cuDNN, whose sizes are unknown; a convolution's may be" in str(verdict)


@pytest.mark.nightly
def test_compiled_graphs_take_the_same_watched_and_unwatched(run, on_phantom, tmp_path):
    run(REDUCED_OVERHEAD, gpu="a100-80gb")  # the cache knows the fastest kernels from then on
    unwatched = on_phantom("a100-80gb", tmp_path / "train.py")
    _, watched = run(REDUCED_OVERHEAD, gpu="a100-80gb")
    assert watched == unwatched

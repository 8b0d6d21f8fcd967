"""labkit measures on a phantom GPU as on a real one, and estimates what it measures."""

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import left

import labkit as lab
from benchmarks.setups import GPU_RECIPES
from gpumem.fake_cuda.process_group import one_of
from gpumem.hardware import this_machine
from gpumem.inputs import InputError
from gpumem.units import GIB, MIB
from labkit.doctor import check_gpu
from labkit.lesson.claims import Verdict

#: One for each kind of thing that estimates must know, the small models'.
CHOSEN = [
    "SmolLM2-135M, 4 × 1024, fp32, adamw",
    "SmolLM2-135M, 4 × 1024, fp32, adamw, optimizer in backward",
    "SmolLM2-135M, 4 × 1024, fp32, adamw, activations on the host",
    "SmolLM2-135M, 4 × 1024, amp-fp16, adamw",
    "SmolLM2-135M, 4 × 1024, fp32, fused-adamw",
    "SmolLM2-135M, 4 × 1024, amp-fp16, fused-adamw, checkpointing",
    "SmolLM2-135M, 4 × 1024, bf16, adamw8bit",
    "GPT-2, 4 × 1024, amp-fp16, adamw",
    "Qwen2.5-0.5B, 2 × 1024, bf16, adamw, checkpointing, LoRA 16, int8",
    "Qwen2.5-0.5B, 2 × 1024, bf16, adamw, checkpointing, weights on the host",
    "Llama-3.2-1B, 4 × 2048, bf16, paged-adamw8bit, checkpointing, LoRA 16, nf4-double, "
    "chunked loss",
]


def test_all_recipes_one_after_the_other_are_estimated_and_nothing_stays():
    gpu = this_machine.this_gpu()
    for name in CHOSEN:
        model, recipe = GPU_RECIPES[name]
        run = lab.measure(lab.training(model, recipe), track=False)
        estimate = lab.estimate(model, gpu=gpu, recipe=recipe).run
        assert run.mode == "phantom"
        assert run.label == "on a phantom NVIDIA A100 SXM 80 GB"
        assert run.losses == run.step_seconds == ()
        assert estimate.peak_bytes == pytest.approx(run.peak_bytes, rel=0.001), name
        assert estimate.reserved_bytes == pytest.approx(run.reserved_bytes, rel=0.002), name
        assert left() == 0, name


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("OLMoE-1B-7B", {"lora": 16}),
        ("LLaVA-1.5-7B", {"lora": 16}),
        pytest.param(
            *("OLMoE-1B-7B", {"optimizer": "sgd", "checkpointing": True, "batch_size": 2}),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("LLaVA-1.5-7B", {"optimizer": "sgd", "checkpointing": True}),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_experts_and_images_take_what_was_estimated(model, fields):
    recipe = lab.Recipe(precision="bf16", **fields)
    run = lab.measure(lab.training(model, recipe), track=False)
    estimate = lab.estimate(model, gpu=this_machine.this_gpu(), recipe=recipe).run
    assert estimate.peak_bytes == run.peak_bytes
    assert estimate.reserved_bytes == run.reserved_bytes
    assert left() == 0


def test_shards_are_gathered_on_streams_of_their_own():
    recipe = lab.Recipe(precision="bf16", checkpointing=True, ranks=8)
    estimate = lab.estimate("Llama-3.1-8B", gpu=this_machine.this_gpu(), recipe=recipe).run
    with one_of(recipe.ranks):
        run = lab.measure(lab.training("Llama-3.1-8B", recipe))
    assert len({event.stream for event in run.trace.events}) == 3
    assert estimate.peak_bytes == pytest.approx(run.peak_bytes, rel=0.0001)
    assert estimate.reserved_bytes == run.reserved_bytes
    assert run.reserved_bytes > 1.3 * run.peak_bytes
    assert left() == 0


LENGTHS = """
import torch
import labkit as lab
from benchmarks.setups import training_of_lengths
from gpumem.allocator.replay import ReplayedCuda
from gpumem.measure_or_simulate import measured_or_replayed
from gpumem.fake_cuda.step_extension import continued
from gpumem.hardware import cuda, this_machine

model, recipe, gpu = "SmolLM2-135M", lab.Recipe(batch_size=4), this_machine.this_gpu()
lengths = (606, 694, 130, 744, 512, 701, 755, 388, 760, 570)
traces = {n: lab.estimate(model, gpu=gpu, recipe=recipe, seq_len=n).run.trace for n in lengths}
trace = continued(traces, lengths)
longest_first = sorted(lengths, reverse=True)
ways = (
    (lengths, trace, False),
    (longest_first, continued(traces, longest_first), False),
    (lengths, trace, True),
)


def train(device, lengths):
    yield from training_of_lengths(model, recipe, lengths)(device)


for order, trace_in_order, expandable in ways:
    asked, steps = measured_or_replayed(train, order, gpu="t4", expandable_segments=expandable)
    replayed = ReplayedCuda(trace_in_order, gpu, expandable_segments=expandable)
    torch.cuda.reset_peak_memory_stats()
    reserved = [asked.memory_reserved() for _ in steps]
    said = [replayed.memory_reserved() for _ in replayed.steps()]
    print(reserved == said, len(set(reserved)) > 1)
    print(torch.cuda.max_memory_allocated() == replayed.max_memory_allocated())
    steps.close()
    cuda.free_memory()
    print(torch.cuda.memory_reserved() == 0)


def ask(cuda):
    requested = cuda.memory_stats()["requested_bytes.all.current"]
    highest = cuda.max_memory_allocated()
    cuda.reset_peak_memory_stats()
    return requested, cuda.memory_allocated(), highest, cuda.memory_reserved(), cuda.mem_get_info()


torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
torch.cuda.reset_peak_memory_stats()
replayed = ReplayedCuda(trace, gpu)
steps = replayed.steps()
for _ in training_of_lengths(model, recipe, lengths[:3])(torch.device("cuda")):
    next(steps)
    print(ask(torch.cuda) == ask(replayed))
    torch.cuda.empty_cache()
    replayed.empty_cache()
    print(torch.cuda.memory_reserved() == replayed.memory_reserved())
"""


@pytest.mark.nightly
def test_steps_of_varied_length_reserve_what_was_estimated(on_phantom):
    said = on_phantom("t4", "-c", LENGTHS, PYTHONPATH="site").split()
    assert said == 18 * ["True"]


def test_the_machine_says_that_it_is_a_phantom():
    here = this_machine.machine()
    assert here.phantom
    assert here.label == f"on a phantom {here.name}"
    assert "nothing is computed" in here.note

    [finding] = check_gpu()
    assert finding.text == here.note
    # A claim that needs a GPU is not judged by what a phantom times.
    assert lab.claim("pinned-faster", 2.0).verdict == Verdict.NOT_TESTABLE


def test_an_experiment_that_does_not_fit_says_where():
    run = lab.measure(lab.training("Llama-3.1-8B", lab.Recipe(precision="fp32")))
    assert run.oom is not None
    assert run.oom.step == 1
    assert run.oom.live_bytes > 60 << 30


class Greedy(torch.nn.Module):
    def forward(self, x):
        return torch.empty(90 * GIB, dtype=torch.uint8, device=x.device)


@pytest.mark.parametrize("fails_in_step", [1, 2, 3])
def test_a_step_that_does_not_fit_is_described_tracked_or_not(fails_in_step):
    """The first two steps are tracked. Afterwards nothing is held, or the fixture fails."""

    def failing(device):
        steps, model = linear(device), torch.nn.Sequential(torch.nn.ReLU(), Greedy())
        for _ in range(fails_in_step - 1):
            yield next(steps)
        next(steps)
        yield model(torch.ones(4, device=device))

    run = lab.measure(failing)
    assert (run.oom.requested_bytes, run.oom.step, run.fits) == (90 * GIB, fails_in_step, False)
    assert 0 < run.oom.live_bytes <= run.step_peaks_bytes[-1] <= run.peak_bytes
    assert run.oom.live_bytes == sum(run.oom.by_category.values())
    if fails_in_step < 3:
        assert (run.oom.phase, run.oom.operator) == ("forward", "empty")
        assert run.oom.module.endswith("1")
        assert run.oom.by_category["weights"] > 0


def test_a_smaller_gpu_is_a_cap_that_ends_with_an_error_too():
    def held(device, gib):
        yield torch.empty(gib * GIB, dtype=torch.uint8, device=device)[:1].float().sum()

    with contextlib.suppress(ZeroDivisionError), lab.pretend("l4"):
        with lab.pretend("t4"):
            run = lab.measure(held, gib=20)
            assert (run.fits, run.capacity_bytes) == (False, lab.gpu("t4").budget_bytes)
        assert lab.measure(held, gib=20).fits
        assert not lab.measure(held, gib=24).fits
        with lab.pretend():
            raise ZeroDivisionError
    assert this_machine.current_budget_bytes() is None
    with lab.pretend(budget_bytes=64 * MIB):
        assert lab.measure(held, gib=1).oom.requested_bytes == GIB
    assert lab.measure(held, gib=70).fits


def test_a_larger_gpu_cannot_be_pretended():
    message = r"B200.* needs .*, but this machine's GPU has 79\.\d GiB"
    with pytest.raises(InputError, match=message), lab.pretend("b200"):
        pytest.fail("entered")
    with pytest.raises(InputError, match="That budget"), lab.pretend(budget_bytes=90 * GIB):
        pytest.fail("entered")
    assert this_machine.current_budget_bytes() is None


def linear(device, seed=0):
    torch.manual_seed(seed)
    layer = torch.nn.Linear(8, 1, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    while True:
        loss = (layer(torch.ones(4, 8, device=device)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_losses_come_from_the_cpu():
    trained = lab.losses(linear, steps=5)
    assert "trained on the CPU" in trained.label
    assert all(curve[0] > curve[-1] > 0 for curve in trained.curves)


@pytest.mark.nightly
def test_the_page_shows_what_the_published_runs_take_here(on_phantom):
    here = Path(__file__).parents[2]
    table = on_phantom("v100", "-W", "ignore", here / "benchmarks/published.py")
    assert table in (here / "docs/PHANTOM.md").read_text(encoding="utf-8")


def test_the_notebooks_magics_say_what_the_allocator_does(on_phantom):
    said = on_phantom(
        "t4",
        "-c",
        "import torch\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from gpumem.notebook import held_now, run_cell\n"
        "shell = InteractiveShell()\n"
        "shell.run_cell('import torch; net = torch.nn.Linear(512, 512).cuda()')\n"
        "run, _ = run_cell(shell, 'net(torch.ones(256, 512, device=\"cuda\")).sum().backward()')\n"
        "assert run.mode == 'phantom'\n"
        "assert run.peak_bytes == torch.cuda.max_memory_allocated()\n"
        "assert run.reserved_bytes == torch.cuda.max_memory_reserved()\n"
        "print(held_now(shell.user_ns))\n",
    )
    assert "net, weights" in said
    assert "16.2 MiB  no name: autograd's graphs, workspaces, other modules" in said


def test_a_single_rank_is_this_process_in_a_group_of_its_own():
    def alone(device):
        assert dist.get_world_size() == 1
        yield torch.ones(1 << 20, device=device, requires_grad=True).sum()

    run = lab.run(alone, ranks=1, steps=1)
    assert (run.mode, dist.is_initialized()) == ("phantom", False)

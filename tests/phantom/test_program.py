"""Programs as people write them run on phantom GPUs unmodified, and the answers are right."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup

import labkit as lab
from gpumem.estimation.estimate import recipe_log
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.script import script as script_of
from gpumem.models.config import find_config
from gpumem.simulation import run_of
from gpumem.units import GIB, MIB, format_bytes
from labkit.lesson.notebooks import find
from phantom_gpu import report, run_script

STEP = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
    vocab_size=8000,
)

def make(device):
    model = LlamaForCausalLM(CONFIG).to(device)
    return model, torch.optim.AdamW(model.parameters())

def step(model, optimizer, device):
    ids = torch.ones(4, 512, dtype=torch.int64, device=device)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

def experiment(device):
    model, optimizer = make(device)
    for _ in range(3):
        yield step(model, optimizer, device)
"""
SCRIPT = (
    STEP
    + """
model, optimizer = make("cuda")
for _ in range(3):
    loss = step(model, optimizer, "cuda")
    del loss
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""
)


def experiment_of(text):
    names = {}
    exec(text, names)
    return names["experiment"]


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory):
    """What the script prints where nobody watches it."""
    script = tmp_path_factory.mktemp("unwatched") / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "phantom_gpu", "rtx-4090", str(script)]
    variables = os.environ | {"LD_PRELOAD": ""}
    return subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True).stdout


def test_the_figures_are_those_of_pytorch_and_of_the_same_step_as_an_experiment(run, unwatched):
    verdict, printed = run(SCRIPT, record=True)
    assert printed == unwatched  # watching changes nothing that the allocator does
    [answer] = verdict.answers
    [gpu] = answer.gpus
    assert verdict.fits
    assert answer.ended == "finished"
    assert answer.steps == 3
    assert [gpu.peak_allocated_bytes, gpu.peak_reserved_bytes] == list(map(int, printed.split()))
    assert sum(gpu.made_of.values()) == gpu.peak_allocated_bytes
    simulated = lab.simulate(experiment_of(STEP), gpu="rtx-4090")
    assert simulated.reserved_bytes == gpu.peak_reserved_bytes
    for category in ("weights", "gradients", "optimizer"):
        assert gpu.made_of.get(category, 0) == simulated.bytes_of(category)
    assert (gpu.allocated_at.phase, gpu.allocated_at.step) == ("backward", 2)
    assert answer.work.flops == {"fp32": simulated.flops}
    # What the host moves is not counted here.
    assert answer.work.moved_bytes == pytest.approx(simulated.moved_bytes, rel=1e-4)
    assert answer.work.crossing_bytes == answer.work.sent_bytes == 0
    assert f"computes {simulated.flops / 1e9:.3g} GFLOP" in str(verdict)
    # What crosses the link is counted and takes its time.
    offloaded = SCRIPT.replace("    loss = model(", "    with save():\n        loss = model(")
    assert offloaded != SCRIPT
    slower, _ = run("from torch.autograd.graph import save_on_cpu as save\n" + offloaded)
    work = slower.answers[0].work
    assert work.flops == answer.work.flops
    assert work.crossing_bytes > gpu.made_of["activations"]  # there and back
    more = slower.least_seconds(slower.answers[0]) - verdict.least_seconds(answer)
    assert more > 0.9 * work.crossing_bytes / 31.5e9  # PCI Express 4


def test_attention_without_a_fused_kernel_computes_what_the_mask_hides_too(run):
    size = "vocab_size=8000,"
    shared = size + " num_key_value_heads=2,"  # which no fused kernel takes in FP32
    verdict, _ = run(SCRIPT.replace(size, shared))
    simulated = lab.simulate(experiment_of(STEP.replace(size, shared)), gpu="rtx-4090")
    [answer] = verdict.answers
    assert answer.work.flops == {"fp32": simulated.flops}
    assert {"autocast", "bf16"} <= {offer.name for offer in answer.remedies}


LEAK = """
import torch

def main():
    layer = torch.nn.Sequential()
    layer.add_module("a|b", torch.nn.Linear(64, 64, device="cuda"))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    kept = []
    for _ in range(6):
        layer(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        kept.append(torch.zeros(1 << 20, device="cuda"))

main()  # and all of it is freed
"""


def test_what_each_step_leaves_behind_is_found_with_its_line(run):
    verdict, _ = run(LEAK)
    gpu = verdict.answers[0].gpus[0]
    assert gpu.growth_bytes == 4 * MIB
    assert gpu.growth[0].users_line.endswith("train.py:12")
    assert "each step leaves 4.00 MiB behind" in str(verdict)


TOO_LARGE = """
import torch

def build():
    return torch.empty(20 << 30, dtype=torch.uint8, device="cuda")

for gib in 10, 12:  # freed, and given back for the next
    torch.empty(gib << 30, dtype=torch.uint8, device="cuda")
blocks = [build(), build()]
"""


def test_out_of_memory_is_no_with_the_request_and_the_scripts_own_lines(run):
    verdict, _ = run(TOO_LARGE)
    assert verdict.fits is False
    assert verdict.answers[0].ended == "out of memory"
    failed = verdict.answers[0].gpus[0].failed
    assert failed.nbytes == failed.reserved_bytes == 20 * GIB
    assert verdict.peak_reserved_bytes == 22 * GIB
    assert [line.rpartition(":")[2] for line in failed.stack] == ["5", "9"]
    assert "it asked for 20.0 GiB when 20.0 GiB of 23.0 GiB were reserved" in str(verdict)


# A library that cannot save says so in a warning, or in an error of its own.
SURVIVES = """
try:
    build()
except torch.OutOfMemoryError:
    {then}
"""


@pytest.mark.parametrize(
    ("then", "ended"),
    [
        ("raise RuntimeError('not saved') from None", "out of memory"),
        ("raise SystemExit(0)", "finished"),
    ],
)
def test_an_error_that_is_caught_is_no_all_the_same(run, then, ended):
    text = TOO_LARGE.replace("build(), build()", "build()") + SURVIVES.format(then=then)
    verdict, _ = run(text)
    assert verdict.fits is False
    [answer] = verdict.answers
    assert answer.ended == ended
    assert answer.gpus[0].failed.nbytes == 20 * GIB
    assert "it asked for 20.0 GiB when 20.0 GiB of 23.0 GiB were reserved" in verdict.headline()
    assert ("caught the error and went on" in verdict.headline()) is (ended == "finished")


# Reentrant checkpointing of an input without a gradient: the stack gets none.
UNTRAINED = """
import torch
from torch.utils.checkpoint import checkpoint

stack = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).cuda()
head = torch.nn.Linear(64, 1).cuda()
optimizer = torch.optim.AdamW([*stack.parameters(), *head.parameters()])
for _ in range(2):
    head(checkpoint(stack, torch.ones(8, 64).cuda(), use_reentrant=True)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_weights_that_get_no_gradient_are_said_first(run):
    verdict, _ = run(UNTRAINED)
    title = "Only 2 of 18 trainable tensors got a gradient"
    assert [section.title for section in verdict.sections()][:2] == ["Mistakes", title]
    trained, _ = run(UNTRAINED.replace("use_reentrant=True", "use_reentrant=False"))
    assert title[:4] not in str(trained)


# Each of our hooks raises the first time that the program reaches it, and counting each time.
FAULTS = """
import inspect
import torch
from phantom_gpu import known_values, step_costs, watch_script

def raises_once(hook):
    plain = hook.__wrapped__

    def raising(*arguments, **options):
        hook.__wrapped__ = plain
        raise RuntimeError("injected")

    hook.__wrapped__ = raising

hooks = [
    hook
    for of in (watch_script.Watch, known_values.KnownValues)
    for hook in vars(of).values()
    if inspect.isfunction(hook) and hasattr(hook, "__wrapped__")
]
assert len(hooks) > 20
for hook in hooks:
    raises_once(hook)
step_costs.moved_bytes = None
watch_script.MOST_FAULTS = len(hooks)
"""
# A module whose constructor failed, an update before CUDA is used, an index that is out of range.
ODD = """
import torch

class Half(torch.nn.Module):
    def __init__(self):
        raise ValueError("before its own constructor")

try:
    Half()
except ValueError as error:
    kept = error
early = torch.nn.Linear(4, 4)
first = torch.optim.SGD(early.parameters())
early(torch.ones(4, 4)).sum().backward()
first.step()
torch.arange(4).cuda()[torch.tensor([9]).cuda()]
"""


def test_a_fault_of_ours_neither_ends_a_run_nor_hides_its_answer(run, unwatched):
    verdict, faulty_said = run(FAULTS + ODD + SCRIPT)
    assert faulty_said == unwatched
    assert verdict.fits
    [answer] = verdict.answers
    allocated, reserved = map(int, unwatched.split())
    assert answer.gpus[0].peak_reserved_bytes >= reserved
    assert answer.gpus[0].peak_allocated_bytes >= allocated
    assert answer.work is None
    noted = {holder.dtype for holder in answer.gpus[0].holders if holder.category == "activations"}
    assert "float32" in noted
    hooks = {fault.partition(":")[0] for fault in answer.faults if "injected" in fault}
    assert {"look", "_before_forward", "_before_step", "_note_result", "_follow", "twin"} <= hooks
    assert "Errors inside labkit" in str(verdict)


def test_an_error_of_a_rank_is_shown_and_not_its_launchers(run):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    verdict, _ = run("import torch\nraise ValueError('own')", launch=launch, gpus=2)
    assert verdict.fits is None
    assert "it stopped at train.py:2 with ValueError: own" in verdict.headline()


def test_weights_are_weights_whoever_ran_before_or_not_at_all(run):
    verdict, _ = run("""
        import torch

        torch.nn.Identity()(torch.ones(1))  # prepares data
        student, teacher = (torch.nn.Linear(1024, 1024).cuda() for _ in range(2))
        optimizer = torch.optim.SGD(student.parameters())
        for _ in range(2):
            student(torch.ones(1, 1024).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """)
    made_of = verdict.answers[0].gpus[0].made_of
    assert made_of["weights"] == 2 * 4 * (1024 + 1) * 1024
    assert made_of["inputs"] == 4096
    assert "unattributed" not in made_of


# Whose libraries alone know how large a workspace must be.
LINEAR_ALGEBRA = """
import torch

a, b = torch.eye(64).cuda(), torch.ones(64, 2).cuda()
asked = {
    "qr": lambda: torch.linalg.qr(a),
    "svd": lambda: torch.linalg.svd(a),
    "batched svd": lambda: torch.linalg.svd(a.expand(8, 64, 64)),
    "svd_lowrank": lambda: torch.svd_lowrank(a, 8),
    "eig": lambda: torch.linalg.eig(a),
    "eigh": lambda: torch.linalg.eigh(a),
    "cholesky": lambda: torch.linalg.cholesky(a),
    "cholesky_solve": lambda: torch.cholesky_solve(b, a),
    "inv": lambda: torch.linalg.inv(a),
    "solve": lambda: torch.linalg.solve(a, b),
    "lstsq": lambda: torch.linalg.lstsq(a, b),
    "pinv": lambda: torch.linalg.pinv(a),
    "lu": lambda: torch.linalg.lu_factor(a),
    "ldl": lambda: torch.linalg.ldl_factor(a),
    "householder": lambda: torch.linalg.householder_product(a, a[0]),
    "orthogonal": lambda: torch.nn.init.orthogonal_(torch.empty(64, 64).cuda()),
    "rfft2": lambda: torch.fft.rfft2(a),
    "irfft": lambda: torch.fft.irfft(a),
    "csr": lambda: torch.sparse.mm(a.to_sparse_csr(), b),
    "coordinates": lambda: torch.sparse.mm(torch.eye(64).to_sparse().cuda(), b),
}
for name, function in asked.items():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        function()
        more = torch.cuda.max_memory_allocated() - before
        if not 0 < more < 1 << 24:  # with cuBLAS's
            print(name, more)
    except Exception as error:
        print(name, error)
"""


def test_workspaces_of_unknown_size_are_named_and_not_made_up(run):
    verdict, printed = run(LINEAR_ALGEBRA)
    assert not printed
    assert "workspaces of cuFFT, cuSOLVER, cuSPARSE" in str(verdict)


def test_a_budget_is_held_and_steps_end_the_program(run):
    free, whole = run(SCRIPT, steps=2)
    [stopped] = free.answers
    assert (stopped.steps, stopped.ended, whole) == (2, "stopped", "")
    reserved = free.peak_reserved_bytes
    # With less than its cache would take the allocator gives some of it back, and goes on.
    tight, _ = run(SCRIPT, steps=2, budget_bytes=reserved - 20 * MIB)
    assert tight.fits
    assert tight.answers[0].gpus[0].retries
    small, _ = run(SCRIPT, budget_bytes=100 * MIB)
    assert small.fits is False
    assert small.answers[0].ended == "out of memory"
    assert " of 100 MiB were reserved" in small.headline()


HOLDS = """
import sys
import torch
held = torch.empty(10 * 2**30, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.readline()
"""
#: Each process of a program takes 10 GiB, on GPUs that have 14.
PROCESSES = f"""
import os, subprocess, sys

def start(number):
    variables = os.environ | {{"CUDA_VISIBLE_DEVICES": number}}
    pipes = {{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}}
    child = subprocess.Popen([sys.executable, "-c", {HOLDS!r}], env=variables, **pipes)
    child.stdout.readline()
    return child

first = start("0")
NEXT
for child in others:
    child.communicate("")
"""
AT_ONCE = "others = [first, start('0')]"
ELSEWHERE_OR_AFTERWARDS = """
second = start("1")
first.communicate("")
others = [second, start("0")]
"""
KILLED = """
first.kill()
os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
others = [start("0")]
"""


@pytest.mark.parametrize(
    ("code", "out_of_memory", "answers"),
    [(AT_ONCE, True, 2), (ELSEWHERE_OR_AFTERWARDS, False, 3), (KILLED, False, 1)],
    ids=["at once", "elsewhere or afterwards", "killed"],
)
def test_the_processes_of_a_program_share_its_gpus(run, code, out_of_memory, answers):
    verdict, _ = run(PROCESSES.replace("NEXT", code), gpu="t4", gpus=2)
    assert verdict.out_of_memory == out_of_memory
    assert len(verdict.answers) == answers
    if out_of_memory:
        assert verdict.fits is False
        assert "Other processes held up to 10.0 GiB of GPU 0." in verdict.headline()
    elif code is not KILLED:
        assert verdict.fits, str(verdict)


UNKNOWN = """
import torch
layer = torch.nn.Linear(64, 64, device="cuda")
loss = layer(torch.randn(8, 64, device="cuda")).square().mean()
if loss > 0:
    print("larger")
print(1 / loss.item())
"""


def test_values_that_nobody_computed_are_named_with_their_lines(run):
    verdict, _ = run(UNKNOWN)
    assert verdict.fits is None
    assert verdict.answers[0].ended == "failed"
    text = str(verdict)
    assert "it stopped at train.py:7 with ZeroDivisionError" in text
    assert re.search(r"1 +bool \(\)  train.py:5\n", text)
    assert re.search(r"1  float32 \(\)  train.py:7$", text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def f(:", "it used no GPU, and ended with exit code 1"),
        ("print(1)", "it used no GPU, and ended with exit code 0"),
        ("raise SystemExit('no data')", "it used no GPU, and ended with exit code 1"),
        (
            "import os, subprocess, sys\n"
            "os.environ['LD_PRELOAD'] = 'libm.so.6'\n"
            "code = 'import torch; torch.ones(4, device=\"cuda\")'\n"
            "sys.exit(subprocess.call([sys.executable, '-c', code]))",
            "it used no GPU, and ended with exit code 1",
        ),
    ],
    ids=["syntax", "no GPU", "SystemExit", "LD_PRELOAD"],
)
def test_a_script_that_gives_no_answer_gets_a_sentence(run, text, sentence):
    verdict, _ = run(text)
    assert verdict.fits is None
    assert sentence in str(verdict)


def test_a_hang_is_a_sentence(run, monkeypatch, tmp_path):
    for module in (run_script, report):
        monkeypatch.setattr(module, "HANG_SECONDS", 3.0)
    cpu_seconds = run_script._cpu_seconds

    def busy_until_asleep(process):  # however long the import of torch takes
        return cpu_seconds(process) if (tmp_path / "asleep").exists() else time.monotonic()

    monkeypatch.setattr(run_script, "_cpu_seconds", busy_until_asleep)
    begin = "import time, torch\ntorch.ones(4, device='cuda'); open('asleep', 'w').close()"
    verdict, _ = run(f"{begin}\ntime.sleep(600)")
    assert "nothing happened for 3 s; it was stopped at train.py:3" in str(verdict)


def test_a_program_that_waits_for_a_core_does_not_hang(run, monkeypatch):
    for module in (run_script, report):
        monkeypatch.setattr(module, "HANG_SECONDS", 3.0)
    monkeypatch.setattr(run_script, "_cpu_seconds", lambda process: 0.0)  # as if it got none
    busy = "end = time.monotonic() + 8\nwhile time.monotonic() < end: pass"
    verdict, _ = run(f"import time, torch\ntorch.ones(4, device='cuda')\n{busy}")
    assert verdict.fits, verdict.headline()


MALLOC = """
#include <cstddef>
extern "C" int cudaMalloc(void**, size_t);
extern "C" int cudaFree(void*);
extern "C" void* take(size_t bytes, int, void*) { void* p = 0; cudaMalloc(&p, bytes); return p; }
extern "C" void give(void* p, size_t, int, void*) { cudaFree(p); }
"""
PLUGGED = f"""
import subprocess
open("own.cpp", "w").write({MALLOC!r})
subprocess.run(["g++", "-shared", "-fPIC", "own.cpp", "-o", "own.so"], check=True)
own = torch.cuda.memory.CUDAPluggableAllocator("./own.so", "take", "give")
torch.cuda.memory.change_current_allocator(own)
"""


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        ("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'", "cudaMallocAsync"),
        ("os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'", "NO_CUDA_MEMORY_CACHING"),
        (PLUGGED, "pluggable"),
    ],
    ids=["asynchronous", "uncached", "pluggable"],
)
def test_another_allocator_gets_no_verdict(run, chosen, name):
    before = "import os, torch" if chosen is PLUGGED else "import os"
    verdict, _ = run(f"""{before}\n{chosen}\nimport torch
try:
    torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
except RuntimeError:
    torch.zeros(4, device="cuda")
""")
    assert verdict.fits is None
    assert re.search(f"{name} is in place of the caching allocator", verdict.headline())
    assert not verdict.answers


UNTIL_ASKED = """
import os, torch
layer = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.SGD(layer.parameters())
print(os.getpid(), file=open("pid", "w"), flush=True)
while not os.path.exists("leave"):
    layer(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_program_that_ends_while_its_progress_is_printed_is_answered(run, monkeypatch, tmp_path):
    monkeypatch.setattr(run_script, "PROGRESS_SECONDS", 0.0)
    said = []

    def report(sentence):
        said.append(sentence)
        (tmp_path / "leave").touch()
        stat = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
        while not stat.read_text().rpartition(") ")[2].startswith("Z"):
            time.sleep(0.05)

    verdict, _ = run(UNTIL_ASKED, report=report)
    assert len(said) == 1
    assert verdict.fits, str(verdict)
    assert verdict.answers[0].ended == "finished"


def test_ctrl_c_gives_what_is_known_so_far(tmp_path):
    endless = LEAK.replace("range(6)", "range(10 ** 9)")
    steps = "print('x', end='', file=open('steps', 'a')) or len"
    # It keeps nothing, or a fast machine is full.
    (tmp_path / "train.py").write_text(endless.replace("kept.append", steps))
    command = [sys.executable, "-m", "labkit", "phantom", "--gpu", "t4", "--json", "train.py"]
    started = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What a shell starts in the background ignores Ctrl-C, and so does all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not ((made := tmp_path / "steps").exists() and made.stat().st_size > 9):
            assert started.poll() is None
            time.sleep(0.05)
        os.killpg(started.pid, signal.SIGINT)
        printed, _ = started.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    answer = json.loads(printed)
    assert started.returncode == 130
    assert answer["interrupted"]
    assert answer["processes"][0]["steps"] > 3
    assert answer["peak_reserved_bytes"] > 0


def test_sigterm_ends_what_a_launcher_started_and_leaves_no_folder(tmp_path):
    launcher = tmp_path / "launch.py"
    sleeps = "print('up', flush=True); import time; time.sleep(600)"
    launcher.write_text(
        f"import subprocess, sys\nsubprocess.call([sys.executable, '-c', {sleeps!r}])"
    )
    (scratch := tmp_path / "scratch").mkdir()
    started = subprocess.Popen(
        [sys.executable, "-m", "labkit", "phantom", launcher],
        env=os.environ | {"TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout.readline() == "up\n"
    assert list(scratch.iterdir())
    started.terminate()
    started.communicate(timeout=60)  # to the end of what any of them could print
    assert started.returncode == 128 + signal.SIGTERM
    assert not list(scratch.iterdir())


BRANCHED = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 1 << 16)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in (1000, 1000, 1000, 10, 10, 2000, 1 << 16):
    model(torch.ones(rows, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_page_has_the_answers_numbers(tmp_path):
    """Whose markup is text: tests/unit/test_phantom_page.py."""
    (tmp_path / "train.py").write_text(BRANCHED)
    command = [sys.executable, "-m", "labkit", "phantom", "--gpu", "t4", "--html", "page.html"]
    done = subprocess.run(
        [*command, "--json", "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    [answer] = json.loads(done.stdout)["processes"]
    [gpu] = answer["gpus"]
    _, _, rows, step_starts = gpu["record"]["timeline"]
    totals = [sum(row) for row in zip(*rows.values(), strict=True)]
    assert max(totals) == gpu["peak_allocated_bytes"] - gpu["made_of"]["rounding"]
    assert len(step_starts) == 7
    used = [
        block["size"]
        for segment in gpu["record"]["segments"]
        for block in segment["blocks"]
        if block["state"] != "inactive"
    ]
    assert 0 <= sum(used) - totals[-1] < MIB  # both when memory ran out; one is rounded
    soup = BeautifulSoup((tmp_path / "page.html").read_text(), "html.parser")
    text = soup.get_text()
    for nbytes in (gpu["peak_reserved_bytes"], *filter(None, gpu["made_of"].values())):
        assert format_bytes(nbytes) in text
    assert "Segments at the out-of-memory error" in text
    assert "step 7, forward, in module 0" in text
    assert "out of memory: asked for 16.0 GiB" in soup.find(alt=re.compile("event by"))["alt"]


@pytest.mark.parametrize("status", [0, 3])
def test_a_script_that_leaves_by_os_exit_is_answered(run, status):
    verdict, _ = run(
        f"import os, torch\nx = torch.ones(1 << 20, device='cuda')\nos._exit({status})"
    )
    [answer] = verdict.answers
    assert answer.gpus[0].peak_allocated_bytes == 4 * MIB
    assert answer.ended == ("failed" if status else "finished")
    assert verdict.fits is (None if status else True)
    assert (f"exit code {status} from os._exit" in str(verdict)) is bool(status)


# --- with the libraries that people train with ------------------------------------------------

LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", "logs")
MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM  # which looks whether there is a torch
import os, torch
import torch.distributed as dist

config = LlamaConfig(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
    vocab_size=4000,
)
ids = torch.ones(4, 128, dtype=torch.int64)
rows = [{"input_ids": row, "labels": row} for row in ids.repeat(8, 1)]
"""
LOOP = """
for _ in range(3):
    batch = ids.cuda()
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RANKS = """
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""
PROGRAMS = {
    "ddp": RANKS
    + """
model = torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM(config).cuda())
optimizer = torch.optim.AdamW(model.parameters())
"""
    + LOOP,
    "fsdp2": RANKS
    + """
from torch.distributed.fsdp import fully_shard
model = LlamaForCausalLM(config)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
"""
    + LOOP,
    "compile": """
model = torch.compile(LlamaForCausalLM(config).cuda())
optimizer = torch.optim.AdamW(model.parameters())
"""
    + LOOP,
    "workers": """
loader = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=2, pin_memory=True)
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in loader:
    batch = {name: rows.cuda(non_blocking=True) for name, rows in batch.items()}
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), "model.pt")
""",
    "trainer": """
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(target_modules="all-linear"))
arguments = TrainingArguments(
    "out", max_steps=3, bf16=True, report_to="none", save_steps=2, optim="adamw_bnb_8bit",
    eval_strategy="steps", eval_steps=2,
)
Trainer(model, arguments, train_dataset=rows, eval_dataset=rows).train()
""",
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
""",
    "sft": """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
words = Tokenizer(models.WordLevel({"[pad]": 0, "[end]": 1, "word": 2}, unk_token="word"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="[pad]", eos_token="[end]", unk_token="word"
)
arguments = SFTConfig("out", max_steps=3, bf16=True, report_to="none", max_length=128)
SFTTrainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=Dataset.from_dict({"text": ["some text " * 64] * 32}),
    processing_class=tokenizer,
).train()
""",
    "lightning": """
import pytorch_lightning as lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

loader = torch.utils.data.DataLoader(rows, batch_size=4)
trainer = lightning.Trainer(
    devices=2, strategy="ddp", precision="bf16-mixed", max_steps=3, gradient_clip_val=1.0
)
trainer.fit(Module(), loader)
""",
    "qlora": """
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig
LlamaForCausalLM(config).save_pretrained("model")
model = LlamaForCausalLM.from_pretrained(
    "model",
    device_map={"": 0},
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
)
model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
"""
    + LOOP,
}
HOST = {"device": "cpu", "pin_memory": True}
ZERO = {
    "deepspeed-1": {"stage": 1},
    "deepspeed-2": {"stage": 2},
    "deepspeed-3": {"stage": 3},
    "deepspeed-2-offload": {"stage": 2, "offload_optimizer": HOST},
    "deepspeed-3-offload": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}
for name, zero in ZERO.items():
    PROGRAMS[name] = f"""
import deepspeed
settings = {{
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {{"enabled": True}},
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-4, "torch_adam": True}}}},
    "zero_optimization": {zero},
    "zero_force_ds_cpu_optimizer": False,
}}
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
deepspeed.init_distributed()
model = LlamaForCausalLM(config)
engine, *_ = deepspeed.initialize(model=model, config=settings)
for _ in range(3):
    batch = ids.cuda()
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
"""
STEPS = {"workers": 8, "accelerate": 4}
#: What they alone do runs by day in another program, under its own launcher, in test_cudnn, or in
#: test_reports (DDP's buckets, weights of 4 bits).
AT_NIGHT = (
    *("accelerate", "compile", "ddp", "qlora", "sft"),
    *("deepspeed-1", "deepspeed-2", "deepspeed-3", "deepspeed-2-offload"),
)
#: One rank's 32-bit weights are in page-locked memory.
PINNED = ("deepspeed-2-offload", "deepspeed-3-offload")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.nightly) if n in AT_NIGHT else n for n in PROGRAMS],
)
def test_what_people_run_runs(run, name):
    launched = name in ("ddp", "fsdp2") or "deepspeed" in name
    ranks = 2 if launched or name == "lightning" else 1
    launch = LAUNCH if launched else ()
    verdict, _ = run(MODEL + PROGRAMS[name], launch=launch, gpus=ranks)
    assert verdict.fits, str(verdict)
    assert [answer.rank for answer in verdict.answers] == list(range(ranks))
    for answer in verdict.answers:
        assert answer.ended == "finished"
        assert answer.steps == STEPS.get(name, 3)
        work, made_of = answer.work, answer.gpus[0].made_of
        assert sum(work.flops.values()) > 0
        assert (work.sent_bytes > MIB) == (ranks > 1)
        assert (work.crossing_bytes > MIB) == (name in PINNED)
        assert sum(made_of.values()) == answer.gpus[0].peak_allocated_bytes
        offloaded = name == "deepspeed-3-offload"  # and gathered layer by layer
        assert ("weights" in made_of) != offloaded
        assert made_of["workspaces"] > 0
        if name in PINNED:
            assert answer.pinned_bytes > 27 * MIB
        offered = "checkpointing" in {offer.name for offer in answer.remedies}
        assert not (offered and name == "sft")  # which does so by default


@pytest.mark.parametrize(
    ("launcher", "name", "steps"),
    [
        ("accelerate.commands.launch --num_processes 2", "accelerate", 2),
        pytest.param(
            *("deepspeed.launcher.runner --num_gpus 2", "deepspeed-2", 3),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_launchers_of_libraries_run(run, launcher, name, steps):
    verdict, _ = run(MODEL + PROGRAMS[name], launch=("-m", *launcher.split()), gpus=2)
    assert verdict.fits, str(verdict)
    ends = [(answer.rank, answer.ended, answer.steps) for answer in verdict.answers]
    assert ends == [(0, "finished", steps), (1, "finished", steps)]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(precision="amp-bf16", lora=16, checkpointing=True, chunked_loss=True, batch_size=2),
        pytest.param(Recipe(precision="amp-bf16"), marks=pytest.mark.nightly),
        pytest.param(
            Recipe(precision="bf16", optimizer="fused-adamw", checkpointing=True),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=str,
)
def test_a_script_to_take_away_reserves_what_its_recipe_does(run, tmp_path, recipe):
    """Of a model whose output layer is tied to its embedding, which is a fifth of the weights."""
    (tmp_path / "text.txt").write_text("All of it is made up. " * 4000)
    text = script_of(recipe, model="Llama-3.2-1B")
    verdict, _ = run(text, "text.txt", gpu="a100-80gb", steps=2)
    estimated = lab.estimate("Llama-3.2-1B", gpu="a100-80gb", recipe=recipe)
    assert verdict.peak_reserved_bytes == estimated.peak_reserved_bytes
    peak_bytes = verdict.answers[0].gpus[0].peak_allocated_bytes
    assert peak_bytes == pytest.approx(estimated.run.peak_bytes, rel=1e-3)


TUTORIAL = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

config = AutoConfig.from_pretrained("{model}")
{load}
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for _ in range(3):
    batch = torch.randint(0, 40000, (2, 1024), device="cuda")
    outputs = model(input_ids=batch, labels=batch)
    loss = outputs.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MADE = """
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda")
"""
IN_8_BITS = """
from peft import LoraConfig, get_peft_model

to_8_bits = BitsAndBytesConfig(load_in_8bit=True)
model = AutoModelForCausalLM.from_pretrained(
    "{model}", quantization_config=to_8_bits, dtype=torch.bfloat16, device_map="cuda"
)
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
"""


@pytest.mark.parametrize(
    ("model", "hub_id", "fields", "load"),
    [
        ("GPT-2", "openai-community/gpt2", {}, MADE),  # its cache is a copy
        pytest.param("Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B", {}, MADE, marks=pytest.mark.nightly),
        (
            *("Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
            *({"lora": 16, "quantize": "int8"}, IN_8_BITS),
        ),
    ],
    ids=["gpt2", "qwen", "int8"],
)
def test_a_loop_that_keeps_its_outputs_reserves_what_is_said_of_it(
    run, model, hub_id, fields, load
):
    text = TUTORIAL.format(model=hub_id, load=load.format(model=hub_id))
    verdict, _ = run(text, gpu="a100-80gb")
    gpu, recipe = lab.gpu("a100-80gb"), Recipe(precision="bf16", batch_size=2, **fields)
    log = recipe_log(find_config(model)[1], recipe, gpu, keeps_outputs=True).log
    assert run_of(log, gpu, name=model).reserved_bytes == verdict.peak_reserved_bytes


@pytest.mark.parametrize("gpu", ["rtx-4090", pytest.param("b200", marks=pytest.mark.nightly)])
def test_lesson_23_quotes_the_answers_about_its_script(run, gpu):
    notebook = nbformat.read(find(["23"])[0].path, as_version=4)
    cell = next(cell.source for cell in notebook.cells if "import AutoModel" in cell.source)
    verdict, _ = run(re.search(r"```python\n(.*?)```", cell, re.DOTALL)[1], gpu=gpu)
    quoted = " ".join(cell.split())
    first, peak = (line for line in str(verdict).splitlines() if re.match(r"It |  Peak ", line))
    assert " ".join(first.split()) in quoted
    assert " ".join(peak.split()) in quoted


def _table_of_lesson_22():
    """For each answer in its table: GPU, model, switches, and the answer."""
    jobs = (
        ("rtx-4090", "meta-llama/Llama-3.1-8B"),
        ("a100-80gb", "meta-llama/Llama-2-70b-hf"),
    )
    cell = next(text for text in _cells("22") if "8B on 24 GB" in text)
    lines = re.findall(r"^\| a.*\|$", cell, re.MULTILINE)
    six = re.search(r"`(--amp[^`]*)`", lines[0])[1]
    for number, line in enumerate(lines):
        _, switches, *answers = (part.strip() for part in line.strip("|").split("|"))
        flags = " ".join(re.findall(r"`([^`]*)`", switches))
        if "six" in switches:
            flags = f"{six} {flags}"
        if "nine" in switches:
            flags = f"{six} --bf16 --lora=16 --nf4"
        for (gpu, model), answer in zip(jobs, answers, strict=True):
            marks = () if answer == "8.39 GiB" else pytest.mark.nightly
            yield pytest.param(gpu, model, flags, answer, id=f"{gpu}-{number}", marks=marks)


def _cells(number):
    notebook = nbformat.read(find([number])[0].path, as_version=4)
    return [cell.source for cell in notebook.cells]


@pytest.mark.parametrize(("gpu", "model", "flags", "answer"), list(_table_of_lesson_22()))
def test_lesson_22_quotes_the_answers_about_its_script(run, tmp_path, gpu, model, flags, answer):
    written = [text for text in _cells("22") if text.startswith("%%writefile")]
    parts = [text.partition("\n")[2] for text in written]
    appended = next(text for text in _cells("22") if "import AutoModel" in text)
    parts.append(re.search(r"```python\n(.*?)```", appended, re.DOTALL)[1])
    script = "\n".join(parts)
    (tmp_path / "text.txt").write_text("All of it is made up. " * 4000)
    verdict, _ = run(script, "--model", model, *flags.split(), gpu=gpu, steps=2)
    first = str(verdict).splitlines()[0]
    if not answer.startswith("fails"):
        assert f": {answer} of" in first
        return
    assert "It does not fit" in first
    # transformers loads in threads, and the phase of what a thread asks for is a guess.
    loading = "core_model_loading.py" in verdict.answers[0].gpus[0].failed.stack[0]
    assert loading == (answer == "fails while loading")
    if not loading:
        assert f", {answer.removeprefix('fails in ')}, " in first

"""``labkit phantom`` before and after the program runs: words and answers, without a GPU."""

import pickle
import re
import subprocess
import sys
from dataclasses import replace

import pytest

import labkit as lab
from gpumem.hardware.catalogue import GPUS
from gpumem.units import GIB
from labkit.cli import main
from phantom_gpu import cli, largest, run_script
from phantom_gpu.command_line import command_line, processes_of
from phantom_gpu.environment import SHARED_KIB
from phantom_gpu.report import FitReport
from phantom_gpu.report_records import (
    FailedRequest,
    GpuReport,
    Holder,
    ProcessReport,
    StepWork,
    When,
)


@pytest.mark.parametrize(
    ("words", "own", "command"),
    [
        ("--gpu t4 x.py --steps 2", "--gpu t4", "x.py --steps 2"),
        ("--gpu=t4 --json -m mod --json", "--gpu=t4 --json", "-m mod --json"),
        ("--budget 2GiB -- accelerate launch x.py", "--budget 2GiB", "-- accelerate launch x.py"),
        ("--expandable-segments x.py", "--expandable-segments", "x.py"),
        ("--install-kernel --gpu t4", "--install-kernel --gpu t4", ""),
    ],
)
def test_what_follows_our_options_belongs_to_the_program(words, own, command):
    assert cli.split(words.split()) == (own.split(), command.split())


def test_the_program_is_a_script_a_module_or_a_command(tmp_path):
    script = tmp_path / "x.py"
    script.touch()
    assert command_line([str(script), "-a"]) == [sys.executable, str(script), "-a"]
    assert command_line(["-m", "mod", "-a"]) == [sys.executable, "-m", "mod", "-a"]
    assert command_line(["--", "torchrun", "x.py"]) == ["torchrun", "x.py"]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("-m torch.distributed.run --nproc-per-node 2 x.py", 2),
        ("torchrun --nproc_per_node=4 x.py", 4),
        ("accelerate launch --num_processes 8 x.py", 8),
        ("deepspeed --num_gpus 2 x.py", 2),
        ("torchrun --nproc-per-node gpu x.py", 1),
        ("x.py", 1),
    ],
)
def test_a_launcher_says_how_many_gpus_it_needs(words, count):
    assert processes_of(words.split()) == count


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "say what to run: SCRIPT, -m MODULE, or -- COMMAND"),
        ("--gpu t4", "say what to run"),
        ("nowhere.py", "there is no script 'nowhere.py'"),
        ("--gpu none -m mod", "unknown GPU 'none'"),
        ("--gpu mi300x -m mod", "AMD Instinct MI300X has no CUDA"),
        ("--gpu 24GiB:6.1 -m mod", "unknown compute capability '6.1'"),
        ("--gpus 17 -m mod", "1 to 16 GPUs, not 17"),
        ("--steps -1 -m mod", "--steps must be from 1"),
        ("--budget 1TiB -m mod", "the budget must be more than nothing and at most NVIDIA A100"),
        ("--install-kernel x.py", "leave the script out"),
        ("--largest rows --fix -m mod", "--largest goes with neither --fix nor --html"),
        ("--snapshot x.pickle --fix -m mod", "leave --fix and --largest out"),
        ("--largest rows -m mod", "the command has no --rows"),
        ("--budget much -m mod", "must be a size such as 64GiB"),
        ("--html nowhere/x.html -m mod", "no file can be written at 'nowhere/x.html'"),
        ("--snapshot . -m mod", "no file can be written at '.'"),
    ],
)
def test_bad_input_is_a_sentence(capsys, arguments, sentence):
    assert main.main(["phantom", *arguments.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_every_generation_has_its_shared_memory():
    assert set(SHARED_KIB) == {gpu.compute_capability for gpu in GPUS.values()} - {None}


def test_a_kernel_without_jupyter_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main.main(["phantom", "--install-kernel"]) == 2
    assert "a kernel needs Jupyter: pip install" in capsys.readouterr().err


AT = When(2, "backward", "lm_head", "/home/me/train.py:9")
GPU = GpuReport(
    index=0,
    name="NVIDIA T4",
    capacity_bytes=14 * GIB,
    peak_allocated_bytes=3 * GIB,
    peak_reserved_bytes=4 * GIB,
    allocated_at=AT,
    reserved_at=AT,
    made_of={"weights": 3 * GIB - 512, "rounding": 512},
    holders=[],
    retries=1,
    errors=0,
    failed=None,
    growth_bytes=0,
    growth=[],
)
FULL = replace(GPU, errors=1, failed=FailedRequest(2 * GIB, 22 * GIB, AT, ["/home/me/train.py:9"]))
ANSWER = ProcessReport("train.py", 0, "finished", "", [], 2, [GPU])


def verdict(*answers, budget_bytes=14 * GIB, **how):
    return FitReport(lab.gpu("t4"), len(answers), budget_bytes, list(answers), "/home/me", **how)


@pytest.mark.parametrize(
    ("change", "how", "fits", "sentence"),
    [
        ({}, {"budget_bytes": GIB}, False, "It does not fit a phantom NVIDIA T4: 4.00 GiB"),
        ({}, {}, True, "10.0 GiB left.\n"),
        ({"steps": 0}, {}, True, "10.0 GiB left. It made no training step."),
        ({"gpus": [FULL]}, {}, False, "22.0 GiB of 14.0 GiB were reserved. The program"),
        ({"gpus": [replace(FULL, failed=None)]}, {}, False, "it asked for more memory when"),
        ({"ended": ""}, {"returncode": -9}, None, "it ended with exit code -9, without a word"),
        ({"ended": "interrupted"}, {"interrupted": True, "returncode": 1}, None, "interrupted"),
        ({}, {"others": [replace(ANSWER, gpus=[], allocator="its own")]}, None, "its own is in"),
    ],
)
def test_the_verdict_in_words(change, how, fits, sentence):
    found = verdict(replace(ANSWER, **change), **{"returncode": 0} | how)
    assert found.fits is fits
    assert sentence in str(found)


FULL_ANSWER = replace(ANSWER, gpus=[FULL])
BROKEN_ANSWER = replace(ANSWER, ended="failed", error="ValueError: too many rows")


@pytest.mark.parametrize(
    ("most", "beyond", "fits"),
    [
        (1, FULL_ANSWER, False),
        (299, FULL_ANSWER, False),
        (4321, FULL_ANSWER, False),
        (4321, BROKEN_ANSWER, None),
        (4321, replace(ANSWER, steps=1), None),  # no second batch is full
    ],
)
def test_the_largest_value_is_found_to_within_a_32nd(monkeypatch, most, beyond, fits):
    """With a script: tests/phantom/test_fix.py."""

    def run_program(words, **options):
        return verdict(ANSWER if int(words[-1]) <= most else beyond, returncode=0)

    monkeypatch.setattr(largest, "run_program", run_program)
    [curve] = largest.largest(["x.py", "--rows", "300"], ["rows"], gpu="t4").curves
    for each in curve.tried:
        assert each.fits is (True if each.value <= most else fits)
        assert bool(re.search("too (many|few)", each.failure)) == (each.fits is None)
    too_large = min(each.value for each in curve.tried if not each.fits)
    assert curve.largest <= most < too_large <= curve.largest * 33 / 32 + 1
    assert len(curve.tried) < 16


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/home/me/train.py:9", "train.py:9"),
        ("/home/me/parts/model.py:9", "parts/model.py:9"),
        ("/elsewhere/model.py:9", "model.py:9"),
        ("/e/lib/python3.11/site-packages/a/b/c/d.py:9", "a/…/d.py:9"),
        ("/e/lib/python3.11/site-packages/a/d.py:9", "a/d.py:9"),
        ("/e/lib/python3.11/json/decoder.py:9", "json/decoder.py:9"),
    ],
)
def test_a_line_is_named_as_people_know_it(line, said):
    assert verdict(ANSWER, returncode=0).line(line) == said


@pytest.mark.parametrize(
    ("flops", "said"),
    [(10**7, ""), (10**12, "1 TFLOP, moves 500 MB: at least 123 ms"), (10**14, "at least 12.3 s")],
)
def test_what_a_step_does_is_said_in_units_that_suit_it_or_not_at_all(flops, said):
    work = StepWork({"fp32": flops}, 5 * 10**8 if said else 0, 0, 0)
    text = str(verdict(replace(ANSWER, work=work), returncode=0))
    assert said in text
    assert ("A step" in text) is bool(said)


def test_a_small_report_has_at_most_twenty_lines():
    holder = Holder(GIB, 1, "weights", "lm_head", "/home/me/train.py:9", "/home/me/train.py:9")
    gpu = replace(GPU, retries=0, holders=9 * [holder])
    text = str(verdict(replace(ANSWER, gpus=[gpu]), returncode=0))
    assert len(text.splitlines()) <= 20
    assert text.count("lm_head, train.py:9") == 5


def test_one_process_that_fails_decides_for_all():
    failed = replace(ANSWER, rank=1, ended="out of memory", gpus=[FULL])
    found = verdict(ANSWER, failed, returncode=1)
    assert found.fits is False
    assert "out of memory, 2 steps" in str(found)


def test_what_was_not_there_is_said():
    absent = replace(
        ANSWER,
        weights_not_read=["a/b", "c/d"],
        tokenizers_stood_in=["a/b"],
        saved_in=["/runs/out/checkpoint-2", "/runs/out/checkpoint-4"],
    )
    text = str(replace(verdict(absent, returncode=0), folder="/runs"))
    assert "Weights    of a/b, c/d were not read: they are zeros" in text
    assert "Tokens     not of a/b's own tokenizer" in text
    assert "Saved      zeros, in out/checkpoint-2 and 1 more: no run must go on from them" in text


def test_a_program_that_ends_while_it_is_looked_at_costs_no_answer(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    (tmp_path / f"{ended.pid}.stack").touch()
    (tmp_path / f"{ended.pid}.answer").write_bytes(pickle.dumps(ANSWER))
    ended.wait()
    assert run_script._cpu_seconds(ended) == 0.0
    assert run_script._line_of_hang(ended, tmp_path) == "an unknown line"
    assert run_script.read_answers(tmp_path) == [ANSWER]

"""Lesson 00's exercises: the stub, the solution, and the mistakes people make."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status, lesson_00

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "00_start_here.ipynb"


test_stub_and_solution = stub_and_solution("00")


def fails(id, answer, says):
    outcome = lab.exercise(id).check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("peak_bytes", "knows it: "),
        ("by-category", "optimizer "),
        ("flops", "operations"),
        ("losses", "not among the four"),
        ("speed", "unknown choice 'speed'"),
        (7, "You gave 7"),
    ],
)
def test_choice_mistakes(answer, says):
    fails("00-1", answer, says)


def stub(run): ...


def share(run):
    return run.bytes_of("optimizer") / run.peak_bytes


def over_weights(run):
    return 100 * run.bytes_of("optimizer") / run.bytes_of("weights")


def over_capacity(run):
    return 100 * run.bytes_of("optimizer") / run.capacity_bytes


def only_bytes(run):
    return run.bytes_of("optimizer")


def misspelt(run):
    return 100 * run.bytes_of("optimiser") / run.peak_bytes


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (share, "percent against shares"),
        (over_weights, "the state over the weights"),
        (over_capacity, "the capacity of the card"),
        (only_bytes, "the bytes of the state"),
        (misspelt, "Did you mean 'optimizer'?"),
        (19.5, "without calling it"),
    ],
)
def test_share_mistakes(answer, says):
    fails("00-2", answer, says)


def test_share_stub_is_not_attempted():
    assert lab.exercise("00-2").check(stub).status is Status.NOT_ATTEMPTED


def test_share_that_needs_an_optimizer_is_right_with_a_remark():
    outcome = lab.exercise("00-2").check(
        lambda run: 100 * run.by_category["optimizer"] / run.peak_bytes
    )
    assert outcome.status is Status.CORRECT
    assert "One remark" in outcome.message


def on_the_line(room_bytes, paid_once_bytes):
    """The batch somebody finds who takes these for what there is and what is paid once."""
    few, many = (lesson_00.t4_run(rows).peak_bytes for rows in (8, 16))
    return int((room_bytes - paid_once_bytes) // ((many - few) / 8))


def test_batch_that_scales_the_whole_peak_is_too_small():
    room = lab.gpu("t4").budget_bytes
    answer = int(8 * room // lesson_00.t4_run(8).peak_bytes)
    fails("00-3", answer, "Weights and optimizer state do not grow")


def test_batch_that_forgets_what_is_paid_once_is_too_large():
    answer = on_the_line(lab.gpu("t4").budget_bytes, 0)
    fails("00-3", answer, "take their part of it before the first row")


def test_batch_for_the_figure_on_the_box_is_too_large():
    # Weights and two averages: three numbers of four bytes per weight.
    paid_once = 3 * 4 * lab.model_info("SmolLM2-135M").parameters
    fails("00-3", on_the_line(16 * 10**9, paid_once), "the 16 GB on the box")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (27.4, "You gave 27.4"),
        (19, "You are close"),
        (22, "Very close. The tensors of a batch of 22"),
        (0, "must be from 1"),
        ("all", "'all'"),
        (True, "not True"),
    ],
)
def test_batch_that_is_none(answer, says):
    fails("00-3", answer, says)


def test_checker_and_notebook_train_alike():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    wanted = ("00-parameters-1", "00-baseline-2")
    sources = ["".join(cell["source"]) for cell in cells if cell["id"] in wanted]
    shown = {"lab": lab, "model_name": "SmolLM2-135M", "torch": lesson_00.torch}
    exec("\n".join(sources), shown)
    setting = {"gpu": "t4", "batch_size": 4, "model_name": "SmolLM2-tiny"}
    assert shown["seq_len"] == lesson_00.SEQ_LEN
    assert (
        lab.simulate(shown["train"], **setting).by_category
        == lab.simulate(lesson_00.train, **setting).by_category
    )


def test_first_simulation_of_a_process_is_like_the_next():
    # transformers was imported inside the first one, too late to be told to build no mask.
    code = (
        "import labkit as lab; from labkit.exercises.lesson_00 import train\n"
        "setting = {'gpu': 't4', 'batch_size': 4, 'model_name': 'SmolLM2-tiny'}\n"
        "peaks = [lab.simulate(train, **setting).peak_bytes for _ in range(2)]\n"
        "assert peaks[0] == peaks[1], peaks"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=NOTEBOOK.parents[1])

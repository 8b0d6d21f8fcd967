"""Lesson 02's exercises: the stub, the solution, the mistakes people make; and the toy itself."""

import ast
from pathlib import Path

import nbformat
import pytest
import torch

import labkit as lab
from labkit.exercises import Status, lesson_02
from labkit.exercises.lesson_02 import EXERCISES, ToyAllocator, messy, segments_of, tidy
from labkit.memory import MIB

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_stub_and_solution(exercise):
    assert exercise.check(...).status is Status.NOT_ATTEMPTED
    assert exercise.check(exercise.right_answer).status is Status.CORRECT


def test_stubs_that_are_functions():
    assert lab.exercise("02-1").check(lambda segments: None).status is Status.NOT_ATTEMPTED
    assert lab.exercise("02-2").check(lambda memory: None).status is Status.NOT_ATTEMPTED


def every_free_block(segments):
    blocks = [block for segment in segments for block in segment["blocks"]]
    return sum(block["size"] for block in blocks if block["state"] == "inactive")


def what_stays(segments):
    return sum(s["total_size"] for s in segments) - lesson_02.returned(segments)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (every_free_block, "stranded: a segment goes back as a whole"),
        (what_stays, "segments that must stay"),
        (lambda segments: lesson_02.returned(segments) // MIB, "factor of 1024²"),
        (lambda segments: 0, "The right answer is more"),
        (lambda segments: "all", "'all'"),
        (lambda segments: segments[0]["size"], "KeyError"),
    ],
)
def test_returned_mistakes(answer, says):
    outcome = lab.exercise("02-1").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def rounds(memory, *, early=False, size=4, output=24, before_output=lambda memory: None):
    """Like `messy`, with one thing done differently."""
    for i in range(8):
        memory.take(f"result {i}", 4)
        for j in range(4):
            memory.take(f"scratch {i}.{j}", size)
        for j in range(4):
            if early:
                memory.give(f"scratch {i}.{j}")
    for i in range(8):
        for j in range(4):
            if not early:
                memory.give(f"scratch {i}.{j}")
    before_output(memory)
    memory.take("output", output)


def variant(**changes):
    return lambda memory: rounds(memory, **changes)


def forgetful(memory):
    tidy(memory)
    memory.give("result 3")


def output_first(memory):
    memory.take("output", 24)
    for i in range(8):
        memory.take(f"result {i}", 4)
    for i in range(8):
        for j in range(4):
            memory.take(f"scratch {i}.{j}", 4)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (messy, "128 MiB are free in 8 pieces, the largest of 16 MiB"),
        (variant(before_output=lambda memory: memory.empty_cache()), "128 MiB are free"),
        (variant(early=True), "free none before all of them are there"),
        (variant(size=3), "Your scratch 0.0 has 3 MiB, it needs 4"),
        (variant(output=12), "Your output has 12 MiB, it needs 24"),
        (variant(before_output=lambda memory: memory.give("result 3")), "result 3 is gone"),
        (forgetful, "result 3 is gone"),
        (output_first, "result 0 is gone"),
        (lambda memory: memory.take("output", 24), "never takes result 0"),
        (variant(before_output=lambda memory: memory.take("spare", 4)), "takes spare"),
        (variant(before_output=lambda memory: memory.give("result 9")), "it is not there"),
        (variant(before_output=lambda memory: memory.take("result 0", 4)), "taken twice"),
        (variant(size="4"), "whole number of MiB"),
    ],
)
def test_tidy_mistakes(answer, says):
    outcome = lab.exercise("02-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def test_results_last_are_also_right():
    def results_last(memory):
        for i in range(32):
            memory.take(f"scratch {i // 4}.{i % 4}", 4)
        for i in range(8):
            memory.take(f"result {i}", 4)
        for i in range(32):
            memory.give(f"scratch {i // 4}.{i % 4}")
        memory.take("output", 24)

    assert lab.exercise("02-2").check(results_last).status is Status.CORRECT


def test_the_toy_cuts_joins_and_gives_back():
    toy = ToyAllocator()
    toy.take("a", 8)
    toy.take("b", 8)
    toy.take("c", 8)  # does not fit behind a and b
    toy.take("large", 33)  # a segment of its own, rounded up to an even number
    assert [len(segment) for segment in toy] == [20, 20, 34]
    toy.give("a")
    toy.give("b")  # their blocks join: one hole of 20
    toy.take("d", 20)
    assert [len(segment) for segment in toy] == [20, 20, 34]
    toy.give("d")
    toy.empty_cache()
    assert [len(segment) for segment in toy] == [20, 34]


def test_the_toy_empties_its_cache_before_it_gives_up():
    toy = ToyAllocator()
    for i in range(8):
        toy.take(f"{i}", 20)
    for i in range(1, 8):
        toy.give(f"{i}")
    toy.take("whole", 140)
    with pytest.raises(torch.OutOfMemoryError, match="no hole of 4 MiB"):
        toy.take("more", 4)


def test_segments_have_the_shape_of_pytorchs():
    toy = ToyAllocator()
    toy.take("a", 8)
    [segment] = segments_of(toy)
    assert segment["total_size"] == 20 * MIB == sum(block["size"] for block in segment["blocks"])
    assert [block["state"] for block in segment["blocks"]] == ["active_allocated", "inactive"]


def classes_and_functions(source):
    tree = ast.parse(source)
    return {
        node.name: ast.dump(node)
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }


def test_the_notebook_shows_the_toy_and_the_program_that_are_checked():
    notebook = nbformat.read(ROOT / "notebooks" / "02_profiling.ipynb", as_version=4)
    shown = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and "%pip" not in cell.source:
            shown |= classes_and_functions(cell.source)
    checked = classes_and_functions(Path(lesson_02.__file__).read_text(encoding="utf-8"))
    assert shown["ToyAllocator"] == checked["ToyAllocator"]
    without_docstring = ast.parse(Path(lesson_02.__file__).read_text(encoding="utf-8"))
    [program] = [n for n in without_docstring.body if getattr(n, "name", "") == "messy"]
    program.body = program.body[1:]
    assert shown["messy"] == ast.dump(program)

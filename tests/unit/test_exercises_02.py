"""Lesson 02's exercises: the stub, the solution, and the mistakes people make."""

import ast
from pathlib import Path

import nbformat
import pytest
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status, lesson_02
from labkit.exercises.lesson_02 import messy, tidy
from labkit.memory import MIB

ROOT = Path(__file__).resolve().parents[2]


test_stub_and_solution = stub_and_solution("02")


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


def rounds(memory, *, early=False, size=4 * MIB, output=24 * MIB, before_output=None):
    """Like `messy`, with one thing done differently."""
    results, scratch = [], []
    for i in range(8):
        results.append(memory.allocate(4 * MIB, f"result {i}"))
        scratch += [memory.allocate(size, f"scratch {i}.{j}") for j in range(4)]
        while early and scratch:
            memory.free(scratch.pop())
    for block in scratch:
        memory.free(block)
    if before_output:
        before_output(memory, results)
    memory.allocate(output, "output")


def variant(**changes):
    return lambda memory: rounds(memory, **changes)


def forgetful(memory):
    results = [memory.allocate(4 * MIB, f"result {i}") for i in range(8)]
    scratch = [memory.allocate(4 * MIB, f"scratch {i}.{j}") for i in range(8) for j in range(4)]
    for block in scratch:
        memory.free(block)
    memory.allocate(24 * MIB, "output")
    memory.free(results[3])


def output_first(memory):
    memory.allocate(24 * MIB, "output")
    for i in range(8):
        memory.allocate(4 * MIB, f"result {i}")
        for j in range(4):
            memory.allocate(4 * MIB, f"scratch {i}.{j}")


def generous(memory):
    memory.budget_bytes = None
    messy(memory)


def allocate(nbytes, name):
    return variant(before_output=lambda memory, _: memory.allocate(nbytes, name))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (messy, "128 MiB are free in 8 pieces, the largest of 16.0 MiB"),
        (variant(before_output=lambda memory, _: memory.empty_cache()), "128 MiB are free"),
        (variant(early=True), "free none before all of them are there"),
        (variant(size=3 * MIB), "Your scratch 0.0 has 3.00 MiB, it needs 4.00 MiB"),
        (variant(size=4), "Your scratch 0.0 has 4 B: bytes. Multiply by `MIB`."),
        (variant(output=12 * MIB), "Your output has 12.0 MiB, it needs 24.0 MiB"),
        (variant(before_output=lambda memory, held: memory.free(held[3])), "result 3 is gone"),
        (forgetful, "result 3 is gone"),
        (output_first, "result 0 is gone"),
        (generous, "changes the budget"),
        (lambda memory: memory.allocate(24 * MIB, "output"), "never allocates result 0"),
        (allocate(4 * MIB, "spare"), "allocates spare"),
        (allocate(4 * MIB, "result 0"), "allocated twice"),
        (allocate(4 * MIB, ""), "the name it has in `messy`"),
        (variant(before_output=lambda memory, _: memory.free(99)), "99 is not live"),
        (variant(size="4"), "whole number"),
    ],
)
def test_tidy_mistakes(answer, says):
    outcome = lab.exercise("02-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def test_results_last_are_also_right():
    def results_last(memory):
        scratch = [memory.allocate(4 * MIB, f"scratch {i}.{j}") for i in range(8) for j in range(4)]
        for i in range(8):
            memory.allocate(4 * MIB, f"result {i}")
        for block in scratch:
            memory.free(block)
        memory.allocate(24 * MIB, "output")

    assert lab.exercise("02-2").check(results_last).status is Status.CORRECT


@pytest.mark.parametrize(("program", "fits"), [(messy, False), (tidy, True)], ids=["messy", "tidy"])
def test_the_programs_need_the_same_bytes_and_differ_in_what_fits(program, fits):
    free = lab.CachingAllocator()
    program(free)
    assert free.peak_allocated_bytes == lesson_02.BUDGET_BYTES
    tight = lab.CachingAllocator(budget_bytes=lesson_02.BUDGET_BYTES)
    if fits:
        program(tight)
    else:
        with pytest.raises(lab.SimulatedOutOfMemory):
            program(tight)
        assert tight.budget_bytes - tight.allocated_bytes == 128 * MIB


def test_what_empty_cache_returns_is_what_the_allocator_returns():
    for survivors in (range(8), range(0, 40, 5), range(0, 20, 3)):
        allocator = lab.CachingAllocator()
        tensors = [allocator.allocate(4 * MIB) for _ in range(40)]
        for i in set(range(40)) - set(survivors):
            allocator.free(tensors[i])
        before, right = allocator.reserved_bytes, lesson_02.returned(allocator.segments())
        allocator.empty_cache()
        assert before - allocator.reserved_bytes == right


def functions(source):
    return {
        node.name: ast.dump(node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }


def test_the_notebook_shows_the_program_that_is_checked():
    notebook = nbformat.read(ROOT / "notebooks" / "02_profiling.ipynb", as_version=4)
    shown = {}
    for cell in notebook.cells:
        if cell.cell_type == "code" and "%pip" not in cell.source:
            shown |= functions(cell.source)
    checked = ast.parse(Path(lesson_02.__file__).read_text(encoding="utf-8"))
    [program] = [n for n in checked.body if getattr(n, "name", "") == "messy"]
    program.body = program.body[1:]  # its docstring
    assert shown["messy"] == ast.dump(program)

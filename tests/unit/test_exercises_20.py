"""Lesson 20's exercises: the stub, the solution, and the mistakes people make."""

import ast
import math
import tracemalloc
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status, lesson_20
from labkit.exercises.lesson_20 import Thrifty, hungry

ROOT = Path(__file__).resolve().parents[2]


test_stub_and_solution = stub_and_solution("20")


def refused(id, answer):
    outcome = lab.exercise(id).check(answer)
    assert outcome.status is Status.NOT_YET
    return outcome.message


def test_stubs_that_are_functions():
    assert lab.exercise("20-1").check(lambda *job: None).status is Status.NOT_ATTEMPTED
    assert lab.exercise("20-2").check(lambda path: None).status is Status.NOT_ATTEMPTED


# --- 1: workers within a budget ------------------------------------------------------------------


def rounded_down(load, step, batch, worker, budget):
    return min(int(load // step) or 1, budget // (worker + 2 * batch))


def rounded(load, step, batch, worker, budget):
    return min(int(load / step + 0.5) or 1, budget // (worker + 2 * batch))


def batches_forgotten(load, step, batch, worker, budget):
    return min(math.ceil(load / step), budget // worker)


def one_batch_each(load, step, batch, worker, budget):
    return min(math.ceil(load / step), budget // (worker + batch))


def all_that_fit(load, step, batch, worker, budget):
    return budget // (worker + 2 * batch)


def budget_forgotten(load, step, batch, worker, budget):
    return math.ceil(load / step)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (rounded_down, "More workers would deliver more"),
        (rounded, "0.40625 s to load, a step 0.125 s"),
        (lambda *job: np.bool_(True), "whole number of workers is asked for"),
        (batches_forgotten, "Count the batches that wait"),
        (one_batch_each, "Count the batches that wait"),
        (all_that_fit, "Fewer deliver as much"),
        (budget_forgotten, "they take 5.86 GiB together"),
        (lambda *job: 40, "you return 40. Fewer deliver as much"),
        (lambda *job: 1, "you return 1. More workers would deliver more"),
        (lambda *job: job[0] / job[1], "you return 3.5. Workers are processes"),
        (lambda *job: -1, "Workers are processes"),
        (lambda *job: "many", "'many'"),
        (lambda *job: math.nan, "whole number of workers is asked for; you return nan"),
        (lambda load, step: 1, "TypeError"),
    ],
)
def test_worker_mistakes(answer, says):
    assert says in refused("20-1", answer)


def test_a_number_of_another_library_will_do():
    for kind in (np.int64, torch.tensor, float):
        answer = lab.exercise("20-1").check(lambda *job, kind=kind: kind(lesson_20.workers(*job)))
        assert answer.status is Status.CORRECT


def test_the_right_number_is_the_least_of_the_fastest_that_fit():
    for load, step, batch, worker, budget in lesson_20.JOBS:
        fits = [n for n in range(200) if n * (worker + 2 * batch) <= budget]
        delivered = {n: min(n / load, 1 / step) for n in fits}
        best = min(n for n in fits if delivered[n] == max(delivered.values()))
        assert lesson_20.workers(load, step, batch, worker, budget) == best


# --- 2: rows that stay on the disk ---------------------------------------------------------------


class Mapped(Thrifty):
    """Opens the file anew for every row."""

    def __getitem__(self, row):
        ids = np.memmap(self.path, np.uint16, "r").reshape(-1, 4096)
        return ids[row].astype(np.int64)


class Kept(Thrifty):
    """Opens the file once and keeps it: light here, heavy on the way to a worker."""

    ids = None

    def __getitem__(self, row):
        if self.ids is None:
            self.ids = np.memmap(self.path, np.uint16, "r").reshape(-1, 4096)
        return self.ids[row].astype(np.int64)


class Whole(Thrifty):
    def __init__(self, path):
        self.path, self.ids = path, np.fromfile(path, np.uint16).reshape(-1, 4096)

    def __getitem__(self, row):
        return self.ids[row].astype(np.int64)


class HiddenInATensor(Whole):
    """A tensor's bytes are not Python's to count; what a worker would be sent shows them."""

    def __init__(self, path):
        self.path = path
        self.ids = torch.from_file(path, size=2 * 1024 * 4096, dtype=torch.uint8)

    def __getitem__(self, row):
        raw = self.ids[8192 * row : 8192 * (row + 1)].numpy()
        return raw.view(np.uint16).astype(np.int64)


class WrongOffset(Thrifty):
    def __getitem__(self, row):
        return np.fromfile(self.path, np.uint16, 4096, offset=4096 * row).astype(np.int64)


class ReadsOn(Thrifty):
    """Gives one row after the other, whichever it is asked for."""

    last = -1

    def __getitem__(self, row):
        self.last += 1
        return super().__getitem__(self.last)


class Floats(Thrifty):
    def __getitem__(self, row):
        return super().__getitem__(row).float()


class TooLong(Thrifty):
    def __len__(self):
        return Path(self.path).stat().st_size // 4096


class Unfinished(Thrifty):
    def __getitem__(self, row): ...


def local(path):
    class Local(Thrifty):
        pass

    return Local(path)


def test_another_right_answer():
    assert lab.exercise("20-2").check(Mapped).status is Status.CORRECT


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (hungry, "held for a file of 8.00 MiB"),
        (Whole, "held for a file of 8.00 MiB"),
        (Kept, "travels as its *contents*"),
        (HiddenInATensor, "8.00 MiB of it"),
        (WrongOffset, "is not the one in the file"),
        (ReadsOn, "is not the one in the file"),
        (Floats, "of torch.float32; `int64` is asked for"),
        (TooLong, "yours has 2048"),
        (local, "cannot be sent to a worker"),
        (lambda path: 3, "yours is 3"),
        (lambda path: open(path + "x"), "FileNotFoundError"),  # noqa: SIM115
    ],
)
def test_dataset_mistakes(answer, says):
    assert says in refused("20-2", answer)


def test_memory_that_is_traced_before_goes_on_being_traced_and_does_not_count():
    tracemalloc.start()
    try:
        held = bytearray(50 << 20)
        assert lab.exercise("20-2").check(Thrifty).status is Status.CORRECT
        del held
        assert tracemalloc.is_tracing()
    finally:
        tracemalloc.stop()
    assert lab.exercise("20-2").check(Thrifty).status is Status.CORRECT
    assert not tracemalloc.is_tracing()


def test_a_dataset_that_is_not_finished():
    assert lab.exercise("20-2").check(Unfinished).status is Status.NOT_ATTEMPTED


def test_nothing_is_left_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for answer in (Thrifty, Kept, hungry):
        lab.exercise("20-2").check(answer)
    assert list(tmp_path.iterdir()) == []


def test_the_notebook_shows_the_dataset_that_is_refused():
    notebook = nbformat.read(ROOT / "notebooks" / "20_data_loading.ipynb", as_version=4)
    [source] = [cell.source for cell in notebook.cells if "def hungry" in cell.source]
    module = ast.parse(Path(lesson_20.__file__).read_text(encoding="utf-8"))
    [checked] = [node for node in module.body if getattr(node, "name", "") == "hungry"]
    [shown] = [node for node in ast.parse(source).body if getattr(node, "name", "") == "hungry"]
    checked.body = checked.body[1:]  # its docstring
    assert ast.dump(shown) == ast.dump(checked)

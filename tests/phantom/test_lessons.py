"""Lessons on a phantom GPU: they pass, judge nothing that needs values or seconds from it, and
leave nothing in its memory."""

import re

import nbformat
import pytest
from conftest import BITSANDBYTES_TABLE

from labkit.course import runner
from labkit.course.outcomes import stored_result
from labkit.lesson.notebooks import find, lesson_at

#: Beside the nightly ones: it chooses attention's kernels.
EACH_TIME = "08"
LESSONS = [
    pytest.param(
        lesson, id=lesson.number, marks=() if lesson.number == EACH_TIME else pytest.mark.nightly
    )
    for lesson in find([])
]
#: A lesson's last cell: forget all names, and see what the allocator still holds.
LAST_CELL = f"""
%reset -f
import bitsandbytes
import torch
import labkit as lab
# transformers' Trainer hands embeddings to this list, which keeps them for good.
bitsandbytes.optim.GlobalOptimManager.get_instance().module_weight_config_triple.clear()
lab.free_memory()
lab.expect(torch.cuda.memory_allocated() in (0, {BITSANDBYTES_TABLE}), "nothing stays allocated")
lab.expect(torch.cuda.memory_reserved() <= 2 << 20, "nothing stays reserved")
"""


@pytest.mark.parametrize("lesson", LESSONS)
def test_lessons_pass_and_nothing_stays(lesson, tmp_path):
    notebook = nbformat.read(lesson.path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(LAST_CELL))
    extended = tmp_path / lesson.path.name
    nbformat.write(notebook, extended)
    course = runner.run([lesson_at(extended)], folder=tmp_path / "out", timeout_seconds=900)
    [outcome] = course.outcomes
    assert outcome.passed, outcome.problems
    result = stored_result(outcome, tmp_path / "out")
    assert result.machine.phantom
    for entry in result.judgements:
        assert "measured on" not in (entry.get("mode") or ""), entry["id"]
    executed = (tmp_path / "out" / outcome.notebook).read_text(encoding="utf-8")
    said = rf"(?:measured|timed|trained|run|computed) on {re.escape(result.machine.name)}"
    assert not re.findall(said, executed)

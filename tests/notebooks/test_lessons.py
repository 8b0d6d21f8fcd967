"""Every lesson of the course, as `make test-lessons` has just executed it with `labkit run`."""

import re
from pathlib import Path

import pytest

from labkit.course import outcomes, report
from labkit.lesson import notebooks, results
from labkit.lesson.claims import Verdict

COURSE = Path(__file__).resolve().parents[2] / "build" / "course"
#: Judged otherwise for a T4, phantom or simulated, than for the GPU that these lessons name: it has
#: neither BF16 nor flash attention, and lesson 22 gives cards below 20 GB texts half as long.
#: Simulated for a T4, lesson 17 gives the phantom's shares to the last digit.
OTHERWISE_ON_T4 = {"bf16-halves", "sdpa-picks-flash", "offload-80", "stack-50-80"}
#: torch.compile writes C++ for a CPU, which saves 0.9 % of the peak with one row, and Triton for a
#: GPU, which adds 0.2 % while its kernels are timed, and saves 16 % afterwards.
ANOTHER_COMPILER = {"compile-shrinks"}


@pytest.mark.lessons
@pytest.mark.parametrize("lesson", notebooks.find(), ids=lambda lesson: lesson.name)
def test_it_passed_with_a_valid_result_and_can_be_reported(lesson):
    [outcome] = (each for each in outcomes.read_outcomes(COURSE) if each.name == lesson.name)
    assert outcome.passed, outcome.problems
    assert outcome.host_peak_bytes
    result = outcomes.stored_result(outcome, COURSE)
    assert result.parameters.keys() >= {"batch_size", "precision", "seed"}
    assert not verdicts_that_differ(result)
    page = report.render(notebooks.read_notebook(COURSE / outcome.notebook))
    assert not re.search(r"""<script|<link|src=["'](?!data:)|@import|url\((?!data:)""", page)


def verdicts_that_differ(result):
    """Those that a phantom GPU recorded otherwise, of the conditions that both could judge."""
    judged = {entry["id"]: entry for entry in result.judgements}
    differing = set()
    for phantom in filter(lambda each: each.phantom, results.results_of(result.lesson)):
        explained = OTHERWISE_ON_T4 if phantom.machine.name == "NVIDIA T4" else set()
        for entry in phantom.judgements:
            if entry["id"] in explained | ANOTHER_COMPILER:
                continue
            ours, theirs = verdicts_of(judged.get(entry["id"], {})), verdicts_of(entry)
            if any(ours[condition] != theirs[condition] for condition in ours.keys() & theirs):
                differing.add((phantom.machine.name, entry["id"]))
    return differing


def verdicts_of(entry):
    verdicts = entry.get("by_condition") or {"": entry.get("verdict", Verdict.NOT_TESTABLE)}
    return {name: each for name, each in verdicts.items() if each != Verdict.NOT_TESTABLE}

"""The capstones: their solutions do the job, and scripts that cheat or slip are told why not."""

from dataclasses import replace

import pytest

from benchmarks import phantom_answers
from gpumem.files import SOURCE
from labkit.exercises import lesson_26, lesson_27
from labkit.exercises.capstone_job import judge
from labkit.exercises.checks import Correct

pytestmark = pytest.mark.nightly
SCRIPT, JOB = lesson_26.script(), lesson_26.JOB
BITS = "dtype=torch.bfloat16,\n    quantization_config=four_bits"


@pytest.mark.parametrize("capstone", [lesson_26, lesson_27], ids=["24 GB", "8 x 80 GB"])
def test_the_solution_does_the_job(capstone):
    done = judge(capstone.script(), capstone.JOB)
    assert isinstance(done, Correct), done
    assert int(done.message.split("with ")[1].split()[0]) > 100


@pytest.mark.parametrize(
    ("before", "after", "changes", "reason"),
    [
        ("lr=2e-3", "lr=0.0", {}, "held-out loss ends at 19"),
        ("to(options.device).split", "to(options.device)[:2].split", {}, "does it train on all"),
        ("torch.load(options.data):", "torch.load(options.data)[:1]:", {}, "made 1 optimizer"),
        (BITS, "dtype=torch.float32", {}, "It does not fit a phantom"),
        ("", "", {"seconds": 0.1}, "the deadline allows 0.10 s"),
    ],
)
def test_a_script_that_does_not_is_told_why(before, after, changes, reason):
    assert before in SCRIPT
    script = SCRIPT.replace(before, after) if before else SCRIPT
    if "lr" not in before:  # whatever it learns
        changes = {"most_loss": 99.0, **changes}
    said = judge(script, replace(JOB, **changes))
    assert isinstance(said, str), said
    assert reason in said


@pytest.mark.parametrize("name", ["26_given_job", "27_given_job"])
def test_the_recorded_answer_is_what_the_phantom_says(name):
    before = (SOURCE / "results" / "phantom" / f"{name}.txt").read_text(encoding="utf-8")
    now = phantom_answers.QUESTIONS[name].answer()
    assert now.splitlines()[1:] == before.splitlines()[1:]  # the first line has the date

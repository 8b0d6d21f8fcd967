"""What the capstones show where no phantom GPU can run is an answer about their own scripts."""

import re

import pytest

from benchmarks.phantom_answers import QUESTIONS
from gpumem.files import SOURCE


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_recorded_answer_is_of_the_lessons_script(name):
    file = SOURCE / "results" / "phantom" / f"{name}.txt"
    made, command, *said = file.read_text(encoding="utf-8").splitlines()
    assert re.match(r"Recorded on \d{4}-\d\d-\d\d on a phantom GPU, not a real one: torch \d", made)
    question = QUESTIONS[name]
    assert command == f"$ labkit {question.words}"
    script = question.text().splitlines()
    for line in re.findall(rf"{question.script}:(\d+)", "\n".join(said)):
        assert re.search(r"model\.to|step\(|backward\(", script[int(line) - 1])

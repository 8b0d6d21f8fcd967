"""Lesson 14's exercises: the stub, the solution, and the mistakes people make.

The real model runs in the second, so few of its mistakes do; hand-made runs stand for others.
"""

import pytest
import torch
from exercise_rules import stub_and_solution
from fake_runs import fake_run

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_14 import adapter_bytes, next_step, roomy
from labkit.memory import Category

test_stub_and_solution = stub_and_solution("14")


def test_the_adapters_of_the_paper_are_those_that_peft_makes():
    from peft import LoraConfig, get_peft_model

    model = lab.model("Llama-3.1-8B", device="meta", layers=2)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    trained, _ = get_peft_model(
        model, LoraConfig(r=16, target_modules=names, task_type="CAUSAL_LM")
    ).get_nb_trainable_parameters()
    assert 16 * trained * 32 // 2 == adapter_bytes()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (13_631_488, "How many bytes does each"),
        (54_525_952, "Those are the adapters themselves"),
        (163_577_856, "The adapters themselves count"),
        (109_051_904, "state alone"),
        (268_435_456, "not 4096"),
        (6_815_744, "There are 32"),
        (218.1, "megabytes"),
        (208, "off by a factor"),
        (3e9, "less"),
        (torch.tensor(13_631_488), "You gave 13,631,488. That is how many numbers"),
        ("208 MiB", "A number"),
        (True, "A number"),
    ],
)
def test_paper_mistakes(answer, says):
    outcome = lab.exercise("14-1").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


def one_of_the_rows(device, batch_size=8, seq_len=512, dtype=torch.bfloat16, steps=2):
    yield from roomy(device, batch_size // 8, seq_len, dtype, steps)


def one_row_by_default(device, batch_size=1, seq_len=512, dtype=torch.bfloat16, steps=2):
    yield from roomy(device, batch_size, seq_len, dtype, steps)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (roomy, "Does every layer have to keep"),
        (one_of_the_rows, "loss at step 1"),
        (one_row_by_default, "Does every layer have to keep"),
    ],
    ids=["roomy", "one of the rows", "one row by default"],
)
def test_target_mistakes(answer, says):
    outcome = lab.exercise("14-2").check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


@pytest.mark.parametrize(
    ("category", "says"),
    [
        (Category.ACTIVATIONS, "Does every layer have to keep"),
        (Category.OPTIMIZER, "Freeze the pretrained weights"),
        (Category.GRADIENTS, "Freeze the pretrained weights"),
        (Category.TEMPORARY, "belongs to the loss"),
    ],
)
def test_the_next_step_is_named_by_what_stands_at_the_peak(category, says):
    run = fake_run(total_bytes=3 << 30, shares={category: 0.8, Category.WEIGHTS: 0.2})
    assert says in next_step(run)

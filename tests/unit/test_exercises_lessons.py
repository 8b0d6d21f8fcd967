"""The exercises of every lesson: stubs, right answers, and the mistakes that people make.

The answers are in ``exercise_answers/lesson_NN.py``. ``RIGHT`` are pairs of an exercise and an
answer, ``MISTAKES`` has a part of the reply, too. What an exercise asks for as a value may be given
as a function without parameters that computes it.
"""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_runs import fake_run

import labkit as lab
from gpumem.allocator.caching import CachingAllocator
from gpumem.trace import Category
from gpumem.units import GIB, MIB
from labkit.exercises import lesson_02
from labkit.exercises.checks import simulated, train
from labkit.exercises.engine import Status, of_lesson
from labkit.exercises.lesson_00 import SEQ_LEN
from labkit.exercises.lesson_05 import smallest_change
from labkit.exercises.lesson_07 import factor
from labkit.exercises.lesson_09 import ALLOWED_GROWTH_BYTES, LINES, leaking
from labkit.exercises.lesson_11 import Block, fewer_gib
from labkit.exercises.lesson_12 import chunks
from labkit.exercises.lesson_15 import adapter_bytes, next_step
from labkit.exercises.lesson_17 import _simulated, large, roomy
from labkit.pipelines import train_first_stage

pytestmark = pytest.mark.slow
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
LESSONS = [f"{number:02}" for number in range(26)]
SLOWEST = ("13-2", "15-2", "19-1", "19-2", "23-1", "25-2")  # up to a minute for each answer
#: Settings as answers, each of which is simulated.
SIMULATED = ("03-2", "22-2", "23-2", "24-1")
IDS = [
    pytest.param(id, marks=pytest.mark.nightly) if id in SLOWEST else id
    for lesson in LESSONS
    for id in of_lesson(lesson)
]


def answers(kind):
    """All answers of a kind, by exercise; programs and settings but each exercise's first are tried
    at night."""
    found = []
    for lesson in LESSONS:
        module = importlib.import_module(f"exercise_answers.lesson_{lesson}")
        given = getattr(module, kind, ())
        for number, answer in enumerate(given):
            runs = callable(answer[1]) or answer[0] in SIMULATED
            again = number > 0 and answer[0] == given[number - 1][0] and runs
            slow = answer[0] in SLOWEST
            marks = pytest.mark.nightly if again or slow else ()
            found.append(pytest.param(*answer, id=f"{answer[0]} {number}", marks=marks))
    return found


def check(id, answer):
    exercise = lab.exercise(id)
    if callable(answer) and not exercise.asks_for_function:
        answer = answer()
    return exercise.check(answer)


@pytest.mark.parametrize("id", IDS)
def test_dots_are_no_attempt_and_the_solution_is_right(id):
    exercise = lab.exercise(id)
    assert exercise.check(...).status is Status.NOT_ATTEMPTED
    if exercise.asks_for_function:
        assert exercise.check(lambda *_, **__: None).status is Status.NOT_ATTEMPTED
    outcome = exercise.check(exercise.right_answer)
    assert outcome.status is Status.CORRECT, outcome.message


@pytest.mark.parametrize(("id", "answer"), answers("RIGHT"))
def test_other_right_answers(id, answer):
    outcome = check(id, answer)
    assert outcome.status is Status.CORRECT, outcome.message


@pytest.mark.parametrize(("id", "answer", "says"), answers("MISTAKES"))
def test_mistakes_are_explained(id, answer, says):
    outcome = check(id, answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message


# --- what the notebooks show is what is checked --------------------------------------------------


def code_of(lesson):
    [path] = NOTEBOOKS.glob(f"{lesson}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {c["id"]: "".join(c["source"]) for c in cells if c["cell_type"] == "code"}


def test_lesson_00_trains_as_its_exercises_do():
    cells = code_of("00")
    shown = {"lab": lab, "model_name": "SmolLM2-135M", "torch": torch}
    exec(f"{cells['00-parameters-1']}\n{cells['00-baseline-2']}", shown)
    shown_run = lab.simulate(shown["train"], gpu="t4", batch_size=4, model_name="SmolLM2-tiny")
    ours = lab.simulate(train, gpu="t4", batch_size=4, seq_len=SEQ_LEN, name="SmolLM2-tiny")
    assert shown_run.by_category == ours.by_category


@pytest.mark.nightly
def test_first_simulation_of_a_process_is_like_the_next():
    # transformers was imported inside the first one, too late to be told to build no mask.
    code = (
        "import labkit as lab; from labkit.exercises.checks import train\n"
        "setting = {'gpu': 't4', 'batch_size': 4, 'name': 'SmolLM2-tiny'}\n"
        "peaks = [lab.simulate(train, **setting).peak_bytes for _ in range(2)]\n"
        "assert peaks[0] == peaks[1], peaks"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=NOTEBOOKS.parent)


# --- the right answers are right -----------------------------------------------------------------


def test_02_what_empty_cache_returns_is_what_the_allocator_returns():
    for survivors in (range(8), range(0, 40, 5), range(0, 20, 3), range(2, 5)):
        allocator = CachingAllocator()
        tensors = [allocator.allocate(4 * MIB) for _ in range(40)]
        for i in set(range(40)) - set(survivors):
            allocator.free(tensors[i])
        before, right = allocator.reserved_bytes, lesson_02.returned(allocator.segments())
        allocator.empty_cache()
        assert before - allocator.reserved_bytes == right


@pytest.mark.parametrize("sign", [-1, 1])
def test_05_the_change_is_where_bfloat16_rounds_to_the_next_number(sign):
    w = torch.tensor(0.75, dtype=torch.bfloat16)
    for part, moves in ((0.99, False), (1.01, True)):
        change = sign * part * smallest_change()
        assert ((w.float() + change).bfloat16() != w) == moves


def test_07_the_factor_corrects_the_mean_of_means():
    tokens = torch.ones(1030, requires_grad=True)
    pieces = tokens.split([1000, 10, 10, 10])
    corrected = sum(factor(len(piece), 1030, 4) * piece.mean() / 4 for piece in pieces)
    [cut] = torch.autograd.grad(corrected, tokens)
    [uncut] = torch.autograd.grad(tokens.mean(), tokens)
    torch.testing.assert_close(cut, uncut)


def test_11_the_compiler_drops_what_the_answer_counts():
    block = Block(256, 896).bfloat16()  # a sixteenth of Llama-3.1-8B's widths
    x = torch.randn(8, 256, dtype=torch.bfloat16, requires_grad=True)

    def kept_bytes(run):
        kept = {}

        def keep(tensor):
            if tensor.shape in ((8, 256), (8, 896)):
                kept[tensor.data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            run(x)
        return sum(tensor.nbytes for tensor in kept.values())

    compiled = torch.compile(block, backend="aot_eager_decomp_partition")
    a_token = 16 * (kept_bytes(block) - kept_bytes(compiled)) // 8
    assert a_token * 2 * 4096 * 32 == fewer_gib() * GIB


def test_12_the_chunks_are_the_fewest_that_fit():
    def logits_bytes(count):
        return math.ceil(4 * 8192 / count) * 128_256 * 4

    assert logits_bytes(chunks()) <= 256 * MIB < logits_bytes(chunks() - 1)


def test_15_the_adapters_are_those_that_peft_makes():
    from peft import LoraConfig, get_peft_model

    model = lab.model("Llama-3.1-8B", device="meta", layers=2)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=16, target_modules=names, task_type="CAUSAL_LM")
    trained, _ = get_peft_model(model, config).get_nb_trainable_parameters()
    assert 16 * trained * 32 // 2 == adapter_bytes()


@pytest.mark.parametrize(
    ("category", "says"),
    [
        (Category.OPTIMIZER, "Freeze the pretrained weights"),
        (Category.GRADIENTS, "Freeze the pretrained weights"),
        (Category.TEMPORARY, "belongs to the loss"),
    ],
)
def test_15_the_next_step_depends_on_the_peak(category, says):
    run = fake_run(total_bytes=3 << 30, shares={category: 0.8, Category.WEIGHTS: 0.2})
    assert says in next_step(run)


def test_17_the_targets_leave_room_and_bite():
    run, watch = _simulated(large, 24)
    few_blocks, _ = _simulated(roomy, 8)
    many, plain = _simulated(roomy, 24)
    assert run.peak_bytes < 0.9 * few_blocks.peak_bytes < 0.5 * many.peak_bytes
    assert plain.crossing_bytes == 0
    # Gradients there and weights back: 8 bytes for each weight.
    assert watch.crossing_bytes == 8 * 24 * (512 * 512 + 512)


@pytest.mark.nightly
def test_20_a_stage_keeps_the_micro_batches_that_are_on_the_way():
    def activations(order):
        run = simulated(train_first_stage, order=order, pieces=16, ranks=4, rank=0)
        return max(run.trace.timeline().bytes_by_category["activations"])

    # Four stages, sixteen micro-batches.
    assert activations("1F1B") / activations("GPipe") == pytest.approx(4 / 16, rel=0.02)


def test_23_small_enough_but_too_slow(monkeypatch):
    monkeypatch.setattr("labkit.exercises.lesson_23.MOST_SECONDS", 0.01)
    exercise = lab.exercise("23-2")
    assert "computes things twice" in exercise.check(exercise.right_answer).message


@pytest.mark.parametrize("letter", LINES)
def test_09_the_lines_leak_as_the_check_says(letter):
    line = compile(LINES[letter], letter, "exec")

    def loop(device):
        model = lab.model("SmolLM2-tiny", device=device, layers=1)
        space = {"torch": torch, "model": model, "kept": [], "total": 0}
        for ids in lab.batches(device=device, batch_size=2, seq_len=16, steps=3):
            out = model(input_ids=ids, labels=ids)
            out.loss.backward()
            model.zero_grad()
            space |= {"ids": ids, "out": out}
            exec(line, space)
            yield out.loss

    trace = lab.simulate(loop, steps=3).trace
    _, second, third = [sum(s.nbytes for s in trace.live_at(end - 1)) for _, end in trace.steps()]
    assert (third - second > ALLOWED_GROWTH_BYTES) == (letter in leaking())

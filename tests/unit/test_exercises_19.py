"""Lesson 19's exercises: the stub, the solution, and the mistakes people make."""

import logging
from pathlib import Path

import nbformat
import pytest
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status, lesson_19
from labkit.exercises.lesson_19 import first_stage, place

ROOT = Path(__file__).resolve().parents[2]

test_stub_and_solution = stub_and_solution("19")


def refused(id, answer):
    outcome = lab.exercise(id).check(answer)
    assert outcome.status is Status.NOT_YET
    return outcome.message


def test_stubs_of_the_notebook():
    def place(model, room): ...

    assert lab.exercise("19-1").check(place).status is Status.NOT_ATTEMPTED
    plan = {"order": ..., "pieces": ...}
    assert lab.exercise("19-2").check(plan).status is Status.NOT_ATTEMPTED


# --- 1: two unequal cards ------------------------------------------------------------------------


def halves(model, room):
    count = len(model.model.layers)
    layers = {f"model.layers.{i}": 2 * i // count for i in range(count)}
    return {"model.embed_tokens": 0, **layers, "model.norm": 1, "lm_head": 1}


def to_the_brim(model, room):
    return place(model, {0: room[0] + 256 * 2**20, 1: room[1]})


def there_and_back(model, room):
    return {**place(model, room), "model.layers.3": 1}


def cut_inside(model, room):
    return {**place(model, room), "model.layers.3.mlp": 1}


def without_the_head(model, room):
    return {name: card for name, card in place(model, room).items() if name != "lm_head"}


def spilled(model, room):
    places = place(model, room)
    return {name: "disk" if name == "lm_head" else card for name, card in places.items()}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (halves, "card 1 comes to 7.69 GiB. Its weights are too many"),
        (lambda model, room: {"": 0}, "card 0 comes to"),
        (lambda model, room: {"": 1}, "card 1 comes to"),
        (to_the_brim, "a pass needs room, too"),
        (there_and_back, "crosses 3 times"),
        (cut_inside, "model.layers.3 is cut in two"),
        (without_the_head, "does not say where lm_head goes"),
        (spilled, "something on 'disk'. All of it fits"),
        (lambda model, room: {"": True}, "something on True"),
        (lambda model, room: {"model.layer": 0}, "no module 'model.layer'"),
        (lambda model, room: {0: "lm_head"}, "no module 0"),
        (lambda model, room: [0, 1], "A map from module names"),
        (lambda model: {}, "TypeError"),
    ],
)
def test_place_mistakes(answer, says):
    assert says in refused("19-1", answer)


def test_what_accelerate_gives_counts_too():
    from accelerate import infer_auto_device_map

    logging.getLogger("accelerate").setLevel(logging.ERROR)

    def auto(model, room):
        return infer_auto_device_map(model, dict(room), model._no_split_modules)

    outcome = lab.exercise("19-1").check(auto)
    assert outcome.status is Status.CORRECT, outcome.message


def test_one_entry_may_stand_for_many_modules():
    def whole(model, room):
        return {"": 1, "model.embed_tokens": 0, **place(model, room)}

    outcome = lab.exercise("19-1").check(whole)
    assert outcome.status is Status.CORRECT, outcome.message


# --- 2: a pipeline within a memory target --------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"order": "GPipe", "pieces": 4}, "waits 43% of the time"),  # what there is
        ({"order": "1F1B", "pieces": 4}, "waits 43% of the time"),  # only the order changed
        ({"order": "GPipe", "pieces": 16}, "waits 16% of the time, little enough. But"),
        ({"order": "1F1B", "pieces": 8}, "waits 27% of the time"),
        ({"order": "1F1B", "pieces": 32}, "1 text in a micro-batch is too few"),
        ({"order": "1F1B", "pieces": 12}, "cannot be cut into 12"),
        ({"order": "1F1B", "pieces": 0}, "cannot be cut into 0"),
        ({"order": "1F1B", "pieces": 16.0}, "cannot be cut into 16.0"),
        ({"order": "1F1B2", "pieces": 16}, "'GPipe' and '1F1B'; you gave '1F1B2'"),
        ({"order": ["1F1B"], "pieces": 16}, "'GPipe' and '1F1B'"),
        ({"order": "1F1B"}, "Give {"),
        (16, "Give {"),
    ],
)
def test_plan_mistakes(answer, says):
    assert says in refused("19-2", answer)


def test_the_right_plan_is_told_what_it_gained():
    message = lab.exercise("19-2").check({"order": "1F1B", "pieces": 16}).message
    assert "a wait of 16% in place of 43%" in message


def test_the_simulated_stage_holds_what_its_order_has_on_the_way():
    def saved(run):
        return max(run.trace.timeline().bytes_by_category["activations"])

    whole, few = saved(first_stage("GPipe", 16)), saved(first_stage("1F1B", 16))
    assert few / whole == pytest.approx(4 / 16, rel=0.02)  # four stages, sixteen micro-batches


def test_the_notebook_asks_what_is_checked():
    [path] = (ROOT / "notebooks").glob("19_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    text = " ".join(c.source for c in cells if "exercise" in c.metadata.tags).replace("\n", " ")
    assert f"count {lesson_19.SPARE_BYTES >> 20} MiB" in text
    assert f"{lesson_19.TEXTS} texts, four stages, GPipe with {lesson_19.NOW}" in text
    assert "no more than half" in text
    assert (lesson_19.STAGES, lesson_19.MOST_PEAK, lesson_19.MOST_IDLE) == (4, 0.5, 0.2)

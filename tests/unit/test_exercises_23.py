"""Lesson 23's exercises: the stub, the solution, and the mistakes people make."""

import pytest
from exercise_rules import stub_and_solution

import labkit as lab
from labkit.exercises import Status
from labkit.exercises.lesson_23 import NAMES, TABLES, alone, needed, order


def stub_needed(parts, table, card): ...


def stub_order(measure, names): ...


test_stub_and_solution = stub_and_solution("23", {"23-1": stub_needed, "23-2": stub_order})


def not_yet(id, answer, says):
    outcome = lab.exercise(id).check(answer)
    assert outcome.status is Status.NOT_YET
    assert says in outcome.message, outcome.message


def smallest_peak(parts, table, card):
    return min(table, key=lambda name: -table[name][1] * parts[table[name][0]])


def by_total(parts, table, card):
    """Takes its share of the whole peak."""
    total = sum(parts.values())
    fitting = [name for name, (_, share, _) in table.items() if total * (1 - share) <= card]
    return min(fitting, key=lambda name: table[name][2]) if fitting else "none"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda parts, table, card: 3, "name, or 'none', is asked for"),
        (lambda parts, table, card: "LoRA", "is asked for; you return 'LoRA'"),
        (lambda parts, table, card: "none", "One of them is enough"),
        (lambda parts, table, card: "checkpointing", "adds fewer seconds"),
        (smallest_peak, "adds fewer seconds"),
        (by_total, "The other parts do not shrink"),
    ],
)
def test_techniques_that_miss(answer, says):
    not_yet("23-1", answer, says)


def without_free(measure, names):
    """Ranks by bytes per second only, free ones last."""
    adopted = []
    while True:
        peak, seconds = measure(adopted)
        worth = {}
        for name in set(names) - set(adopted):
            new_peak, new_seconds = measure([*adopted, name])
            if new_peak < peak:
                worth[name] = (peak - new_peak) / (new_seconds - seconds)
        if not worth:
            return adopted
        adopted.append(max(worth, key=worth.get))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda measure, names: 3, "A list of the names"),
        (lambda measure, names: ["e"], "A list of the names"),
        (lambda measure, names: ["c", "c"], "adopted once"),
        (lambda measure, names: [], "You stop after [], but 'c' still saves"),
        (lambda measure, names: alone(measure), "You measure each by itself"),
        (lambda measure, names: sorted(names), "'c' is free, and 'a' must wait"),
        (without_free, "is free"),
        (lambda measure, names: order(measure, names)[:2], "still saves"),
        (lambda measure, names: [*order(measure, names), *set(names) - set(order(measure, names))],
         "saves nothing"),
    ],
)  # fmt: skip
def test_orders_that_miss(answer, says):
    not_yet("23-2", answer, says)


def test_the_tables_tell_the_mistakes_apart():
    """Figures alone give the right order in one table and a wrong one in another."""
    right = [alone(measure) == order(measure, NAMES) for measure in TABLES.values()]
    assert any(right)
    assert not all(right)


def test_a_part_that_is_not_there_is_not_asked_for():
    table = {"x": ("weights", 0.5, 0.1)}
    assert needed({"weights": 10}, table, 5) == "x"
    assert needed({"weights": 10}, table, 4) == "none"

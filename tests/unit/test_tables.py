"""Tables of runs, and what figures and tables call a run."""

import pytest
from bs4 import BeautifulSoup
from fake_runs import fake_run

from gpumem.figures import tables
from gpumem.units import GIB, format_bytes


def t4(name="step", gib=4.0, **fields):
    return fake_run(name, int(gib * GIB), capacity_bytes=14 * GIB, **fields)


def test_table_is_accessible_html_and_text():
    runs = [
        t4("step", 4, parameters={"batch_size": 4, "precision": "fp32"}, flops=10**12),
        t4("step", 2, parameters={"batch_size": 4, "precision": "bf16"}, step_seconds=(0.5,)),
    ]
    rich = tables.build_table(runs)
    table = BeautifulSoup(rich.html, "html.parser").table
    assert "simulated for NVIDIA T4" in table.caption.text
    cells = [cell.text for cell in table(["th", "td"])]
    for text in ("precision fp32", "precision bf16", "4.00 GiB", "1 TFLOP", "500 ms"):
        assert text in cells
        assert text in rich.text


def test_table_shows_only_parameters_that_differ():
    runs = [t4(n, parameters={"optimizer": n, "seed": 0}) for n in ("sgd", "adam")]
    heading, _, *rows = tables.build_table(runs).text.splitlines()[1:]
    assert heading.split().count("optimizer") == 2  # the parameter, and the category
    assert [row.split()[:2] for row in rows] == [["sgd", "sgd"], ["adam", "adam"]]
    assert format_bytes(runs[0].by_category["optimizer"]) in rows[0]
    assert "seed" not in heading


def test_a_table_that_is_too_wide_leaves_settings_to_the_names():
    more = {"step_seconds": (1.0,), "flops": 10**9}
    runs = [t4(n, parameters={"rows": n, "optimizer": n}, **more) for n in "ab"]
    heading = tables.build_table(runs, against=runs[0]).text.splitlines()[1]
    assert "rows" not in heading
    assert "rows" in tables.build_table(runs).text.splitlines()[1]


def test_equal_runs_can_be_distinguished():
    assert tables.run_labels([t4("a"), t4("a")]) == ["a", "a (2)"]
    runs = [t4("a", parameters={"b": 1}), t4("a", parameters={"b": 2}), t4("c", parameters={})]
    assert tables.run_labels(runs) == ["a, b 1", "a, b 2", "c"]


@pytest.mark.parametrize(
    ("value", "reference", "text"),
    [
        (50, 100, "−50 %"),
        (108, 100, "+8 %"),
        (100, 100, "same"),
        (310, 100, "3.1 times"),
        (5, 0, "from nothing"),
        (10_002, 10_000, "+0.02 %"),
        (10**9 + 1, 10**9, "almost the same"),
    ],
)
def test_change_text(value, reference, text):
    assert tables.change_text(value, reference) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234, "1.23 s"), (0.0456, "45.6 ms"), (7.89e-5, "78.9 µs"), (12345, "12,345 s"), (0, "0 s")],
)
def test_seconds_text(seconds, text):
    assert tables.seconds_text(seconds) == text

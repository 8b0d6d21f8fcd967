"""Widgets without a frontend: values are set, buttons clicked, as a learner would."""

import html
import re

import ipywidgets
import pytest
from drawn import HOSTILE
from fake_runs import fake_run, out_of_memory, traced_run

from gpumem.inputs import InputError
from gpumem.units import GIB, MIB
from labkit.widgets import predictions
from labkit.widgets.knobs import explore
from labkit.widgets.predictions import parse_number, predict


def experiment(device, batch_size=1, precision="fp32"):
    yield None


class Runner:
    """Stands in for ``labkit.run``; ``fail`` maps a value to the exception that it raises.

    ``during`` must be true while it runs.
    """

    def __init__(self):
        self.calls, self.fail, self.during = [], {}, lambda: True

    def __call__(self, experiment, *, gpu, **parameters):
        assert self.during()
        self.calls.append({"gpu": gpu, **parameters})
        for value in parameters.values():
            if value in self.fail:
                raise self.fail[value]
        return traced_run(experiment.__name__, parameters=parameters, capacity_bytes=GIB)


def message(widget):
    return html.unescape(re.sub("<[^>]*>", "", widget.message.value))


@pytest.fixture
def runner():
    return Runner()


@pytest.fixture
def explorer(runner):
    """Two knobs, two settings run, and a third one chosen."""
    explorer = explore(
        experiment, runner=runner, batch_size=[1, 2, 4], precision=["fp32", "bf16"], steps=3
    )
    explorer.controls["batch_size"].value = 4
    return explorer


# --- explore -----------------------------------------------------------------------------------


def test_two_settings_run_at_once_and_are_compared_in_a_static_figure(runner, capsys):
    explorer = explore(
        experiment, runner=runner, gpu=["t4", "l4"], batch_size=[1, 2], precision="bf16"
    )
    first = {"gpu": "t4", "batch_size": 1, "precision": "bf16"}
    assert runner.calls == [first, {**first, "batch_size": 2}]
    assert explorer.controls["batch_size"].value == 2
    printed = capsys.readouterr().out
    assert "batch_size 2: 297 MiB" in printed
    assert "Peak memory and what it is made of; tracked on CPU." in printed
    assert "Highest memory of the tensors in each phase" in printed
    assert explorer.picture.value == ""  # it would stand there twice


def test_a_timeline_that_is_not_wanted_is_left_out(runner, capsys):
    explore(experiment, runner=runner, timeline=False, batch_size=[1, 2])
    printed = capsys.readouterr().out
    assert "Peak memory and what it is made of" in printed
    assert "Highest memory of the tensors in each phase" not in printed


def test_a_click_runs_what_the_controls_show_once(explorer, runner):
    explorer.controls["precision"].value = "bf16"
    explorer.button.click()
    assert runner.calls[-1] == {"gpu": "t4", "batch_size": 4, "precision": "bf16", "steps": 3}
    assert len(explorer.runs) == 3
    picture = explorer.picture.value
    assert picture.count("<img") == 2  # all runs as bars, the latest as a timeline
    assert "batch_size 1, fp32" in picture
    assert "batch_size 4, precision bf16" in picture
    assert "peak 297 MiB, tracked on CPU; it fits in 1.00 GiB" in message(explorer)
    assert not explorer.button.disabled
    explorer.button.click()
    assert len(explorer.runs) == len(runner.calls) == 3
    assert "has run already: bar 3" in message(explorer)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (InputError("batch_size must be 1, not <2>"), "cannot run: batch_size must be 1, not <2>"),
        (MemoryError("no room"), "Out of memory: no room"),
        (ValueError("shapes differ"), "failed with ValueError: shapes differ"),
        (KeyboardInterrupt(), "Interrupted"),
    ],
)
def test_what_goes_wrong_is_said_and_the_button_works_again(explorer, runner, error, says):
    runner.fail = {4: error}
    runner.during = lambda: explorer.button.disabled
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):  # it passes
            explorer.run_once()
    else:
        assert explorer.run_once() is None
    assert says in message(explorer)
    assert "<2>" not in explorer.message.value
    tracebacks = ["Traceback" in output["text"] for output in explorer.errors.outputs]
    assert tracebacks == [True] * (type(error) is ValueError)
    assert not explorer.button.disabled
    runner.fail.clear()
    explorer.button.click()
    assert len(explorer.runs) == 3
    assert explorer.errors.outputs == ()


def test_a_run_that_ran_out_of_memory_is_a_bar(capsys):
    def run(experiment, *, gpu, batch_size):
        oom = out_of_memory(900 * MIB, 400 * MIB, GIB) if batch_size == 2 else None
        return fake_run("step", 900 * MIB, parameters={"batch_size": batch_size}, oom=oom)

    explorer = explore(experiment, runner=run, batch_size=[1, 2])
    assert len(explorer.runs) == 2
    assert "asked for 400 MiB with 900 MiB of 1.00 GiB in use" in message(explorer)
    printed = capsys.readouterr().out
    assert "out of memory at 900 MiB" in printed
    assert "Stacked areas" not in printed  # no trace, no timeline


def test_bad_knobs_and_a_failing_first_setting_raise_but_not_a_failing_second(runner):
    for knob in ([], [1, 2, 1]):
        with pytest.raises(InputError, match="batch_size needs one or more values, each of them"):
            explore(experiment, runner=runner, batch_size=knob)
    assert runner.calls == []
    runner.fail = {1: ValueError("broken")}
    with pytest.raises(ValueError, match="broken"):
        explore(experiment, runner=runner, batch_size=[1, 2])
    explorer = explore(experiment, runner=runner, batch_size=[2, 1])
    assert "failed with ValueError: broken" in message(explorer)
    assert len(explorer.runs) == 1


# --- predict -----------------------------------------------------------------------------------


@pytest.fixture
def prediction(monkeypatch):
    monkeypatch.setattr(predictions, "predictions", {})
    return predict("How much at the peak?", id="06-peak")


def test_a_prediction_is_committed_even_where_the_click_overtakes_what_was_typed(prediction):
    assert prediction.value is None
    prediction.button.click()
    assert message(prediction).startswith("✘")
    prediction.field.value = "3.5"
    assert prediction.value == 3.5
    assert "You predict 3.50 GiB" in message(prediction)
    again = predict("How much at the peak?", id="06-peak")  # the cell runs again
    assert again.value == 3.5
    assert again.field.value == "3.5"
    assert predict("How much?", id="b").value is None


@pytest.mark.parametrize("typed", ["", "  ", "much", "-1", "nan", "3 apples", "1e999", "1.5.0"])
def test_what_is_not_a_number_is_refused_with_a_sentence(prediction, typed):
    prediction.field.value = typed
    prediction.button.click()
    assert prediction.value is None
    assert message(prediction).startswith("✘")


@pytest.mark.parametrize(
    ("typed", "unit", "number"),
    [
        ("3,5", "GiB", 3.5),
        (" 512 MiB ", "GiB", 0.5),
        ("2 gib", "MiB", 2048),
        ("40 %", "%", 40),
        ("−3", "%", -3),
        (".5", "", 0.5),
        ("1e3", "", 1000),
    ],
)
def test_numbers_are_read_as_people_type_them(typed, unit, number):
    assert parse_number(typed, unit) == pytest.approx(number)
    with pytest.raises(InputError, match="two ways"):
        parse_number("1,500", unit)


@pytest.mark.parametrize(
    ("predicted", "actual", "text"),
    [
        (2, 4 * GIB, "2 times larger"),
        (4, 1 * GIB, "4 times smaller"),
        (2, 2 * GIB, "Exactly right"),
        (1.95, 2 * GIB, "Close: off by 2.5 %"),
        (0, GIB, "cannot be compared"),
        (1, fake_run(total_bytes=3 * GIB), "You predicted 1.00 GiB. Simulated for NVIDIA T4: 3.00"),
    ],
)
def test_outcome_says_how_far_off(prediction, predicted, actual, text, capsys):
    prediction.commit(predicted)
    unanswered = predict("How much?", unit="times", id="a").outcome(526_373.4).text
    assert "526,373 times" in unanswered
    assert "no prediction made" in unanswered
    card = prediction.outcome(actual)
    assert text in " ".join(card.text.split())
    assert card.text in capsys.readouterr().out


@pytest.mark.parametrize("bad", [True, "3", None, float("inf")])
def test_what_is_no_number_is_refused(prediction, bad):
    with pytest.raises(InputError, match="a prediction must be a finite number"):
        prediction.commit(bad)
    with pytest.raises(InputError, match="an outcome must be a finite number"):
        prediction.outcome(bad)


def test_hostile_questions_are_escaped():
    prediction = predict(HOSTILE, unit=HOSTILE, id=HOSTILE)
    prediction.commit(1)
    parts = [*prediction.widget.children, *prediction.widget.children[1].children]
    shown = [part.value for part in parts if isinstance(part, ipywidgets.HTML)]
    shown.append(prediction.outcome(2).html)
    assert len(shown) == 4
    assert not any("<script" in text for text in shown)

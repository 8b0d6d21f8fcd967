"""Widgets without a frontend: values are set, buttons clicked, as a learner would."""

import html
import re

import ipywidgets
import pytest
from fake_runs import fake_run, out_of_memory, traced_run

from labkit.memory import GIB, MIB, InputError
from labkit.show import predictions, widgets
from labkit.show.predictions import parse_number, predict
from labkit.show.widgets import explore

HOSTILE = "<script>alert(1)</script>\"' $x"


def experiment(device, batch_size=1, precision="fp32"):
    yield None


class Runner:
    """Stands in for ``labkit.run``; ``fail`` maps a value to what happens with it."""

    def __init__(self, fail=None, inside=None):
        self.calls, self.fail, self.inside = [], fail or {}, inside

    def __call__(self, experiment, *, gpu, **parameters):
        self.calls.append({"gpu": gpu, **parameters})
        if self.inside:
            self.inside()
        for value in parameters.values():
            if isinstance(self.fail.get(value), BaseException):
                raise self.fail[value]
        return traced_run(experiment.__name__, parameters=parameters, capacity_bytes=GIB)


def message(widget):
    return html.unescape(re.sub("<[^>]*>", "", widget.message.value))


@pytest.fixture
def runner():
    return Runner()


@pytest.fixture
def explorer(runner):
    return explore(
        experiment,
        runner=runner,
        batch_size=[1, 2, 4],
        precision=["fp32", "bf16"],
        steps=3,
    )


# --- explore -----------------------------------------------------------------------------------


def test_first_setting_runs_at_once_and_shows_a_still_picture(runner, capsys):
    explorer = explore(experiment, runner=runner, batch_size=[1, 2], precision="bf16")
    assert runner.calls == [{"gpu": "t4", "batch_size": 1, "precision": "bf16"}]
    assert len(explorer.runs) == 1
    printed = capsys.readouterr().out
    assert "Peak memory and what it is made of; tracked on CPU." in printed
    assert "Most bytes live in each phase" in printed
    assert explorer.picture.value == ""  # it would stand there twice


def test_controls_suit_their_values(runner):
    many = [f"model {i}" for i in range(9)]
    explorer = explore(
        experiment, runner=runner, a=[1, 2], b=["x", "y"], c=many, d=[False, True], e=[None, 8]
    )
    kinds = {name: type(control) for name, control in explorer.controls.items()}
    assert kinds == {
        "a": ipywidgets.SelectionSlider,
        "b": ipywidgets.Dropdown,
        "c": ipywidgets.Dropdown,
        "d": ipywidgets.Dropdown,
        "e": ipywidgets.Dropdown,
    }
    assert explorer.controls["d"].options == (("off", False), ("on", True))
    assert all(control.description for control in explorer.controls.values())


def test_a_click_runs_what_the_controls_show(explorer, runner):
    explorer.controls["batch_size"].value = 4
    explorer.controls["precision"].value = "bf16"
    explorer.button.click()
    assert runner.calls[-1] == {"gpu": "t4", "batch_size": 4, "precision": "bf16", "steps": 3}
    assert len(explorer.runs) == 2
    picture = explorer.picture.value
    assert picture.count("<img") == 2  # all runs as bars, the latest as a timeline
    assert "batch_size 1, precision fp32" in picture
    assert "batch_size 4, precision bf16" in picture
    assert "peak 297 MiB, tracked on CPU; it fits in 1.00 GiB" in message(explorer)
    assert not explorer.button.disabled


def test_every_setting_can_be_reached(explorer, runner):
    for batch_size in (1, 2, 4):
        for precision in ("fp32", "bf16"):
            explorer.controls["batch_size"].value = batch_size
            explorer.controls["precision"].value = precision
            explorer.button.click()
    assert len(explorer.runs) == len(runner.calls) == 6


def test_changing_nothing_runs_nothing(explorer, runner):
    explorer.button.click()
    assert len(explorer.runs) == len(runner.calls) == 1
    assert "has run already: bar 1" in message(explorer)


def test_two_quick_clicks_run_once(explorer, runner):
    explorer.controls["batch_size"].value = 2
    explorer.button.click()
    explorer.button.click()
    assert len(explorer.runs) == len(runner.calls) == 2


def test_a_click_during_a_run_is_ignored_and_the_buttons_are_off():
    states = []

    def click_again():
        if built:
            states.append((built[0].button.disabled, built[0].clear_button.disabled))
            assert "Running batch_size 2" in message(built[0])
            built[0].button.click()

    built = []
    runner = Runner(inside=click_again)
    built.append(explore(experiment, runner=runner, batch_size=[1, 2]))
    built[0].controls["batch_size"].value = 2
    built[0].button.click()
    assert states == [(True, True)]
    assert len(runner.calls) == len(built[0].runs) == 2


def test_clear_forgets_all_runs(explorer, runner):
    explorer.controls["batch_size"].value = 2
    explorer.button.click()
    explorer.clear_button.click()
    assert explorer.runs == []
    assert explorer.picture.value == ""
    explorer.button.click()  # the same setting may run again
    assert len(explorer.runs) == 1
    assert len(runner.calls) == 3


def test_bad_input_is_a_sentence():
    runner = Runner(fail={2: InputError("batch_size must be from 1 to 1, not <2>")})
    explorer = explore(experiment, runner=runner, batch_size=[1, 2])
    explorer.controls["batch_size"].value = 2
    assert explorer.run_once() is None
    assert "cannot run: batch_size must be from 1 to 1, not <2>" in message(explorer)
    assert "<2>" not in explorer.message.value
    assert explorer.errors.outputs == ()
    assert len(explorer.runs) == 1
    assert not explorer.button.disabled


def test_a_failure_is_visible_as_an_error_output_and_can_be_retried():
    runner = Runner(fail={2: ValueError("shapes differ")})
    explorer = explore(experiment, runner=runner, batch_size=[1, 2])
    explorer.controls["batch_size"].value = 2
    explorer.button.click()
    assert "failed with ValueError: shapes differ" in message(explorer)
    (output,) = explorer.errors.outputs
    assert output["output_type"] == "error"
    assert output["ename"] == "ValueError"
    assert any("shapes differ" in line for line in output["traceback"])
    runner.fail.clear()
    explorer.button.click()
    assert len(explorer.runs) == 2
    assert explorer.errors.outputs == ()


def test_a_raised_out_of_memory_is_a_sentence_not_a_traceback():
    runner = Runner(fail={2: MemoryError("no room")})
    explorer = explore(experiment, runner=runner, batch_size=[1, 2])
    explorer.controls["batch_size"].value = 2
    explorer.button.click()
    assert "Out of memory: no room" in message(explorer)
    assert explorer.errors.outputs == ()


def test_a_run_that_ran_out_of_memory_is_a_bar():
    def run(experiment, *, gpu, batch_size):
        oom = out_of_memory(900 * MIB, 400 * MIB, GIB) if batch_size == 2 else None
        return fake_run("step", 900 * MIB, parameters={"batch_size": batch_size}, oom=oom)

    explorer = explore(experiment, runner=run, batch_size=[1, 2])
    explorer.controls["batch_size"].value = 2
    explorer.button.click()
    assert len(explorer.runs) == 2
    assert "asked for 400 MiB with 900 MiB of 1.00 GiB in use" in message(explorer)
    assert "out of memory at 900 MiB" in explorer.picture.value
    assert explorer.picture.value.count("<img") == 1  # no trace, no timeline


def test_an_interrupt_passes_and_leaves_the_buttons_on():
    runner = Runner(fail={2: KeyboardInterrupt()})
    explorer = explore(experiment, runner=runner, batch_size=[1, 2])
    explorer.controls["batch_size"].value = 2
    with pytest.raises(KeyboardInterrupt):
        explorer.run_once()
    assert "Interrupted" in message(explorer)
    assert not explorer.button.disabled


def test_a_failing_first_setting_raises():
    with pytest.raises(ValueError, match="broken"):
        explore(experiment, runner=Runner(fail={1: ValueError("broken")}), batch_size=[1, 2])


def test_hostile_values_are_escaped():
    explorer = explore(experiment, runner=Runner(), precision=["fp32", HOSTILE])
    explorer.controls["precision"].value = HOSTILE
    explorer.button.click()
    assert len(explorer.runs) == 2
    assert "<script" not in explorer.picture.value
    assert "<script" not in explorer.message.value
    assert html.escape(HOSTILE) in explorer.picture.value
    assert f"precision {HOSTILE}" in message(explorer)


def test_gpu_may_be_a_knob(runner):
    explorer = explore(experiment, runner=runner, gpu=["t4", "h100"], batch_size=1)
    explorer.controls["gpu"].value = "h100"
    explorer.button.click()
    assert [call["gpu"] for call in runner.calls] == ["t4", "h100"]


@pytest.mark.parametrize(
    ("knobs", "text"),
    [
        ({"batch_size": []}, "batch_size is an empty list"),
        ({"batch_size": [1, 2, 1]}, "holds 1 twice"),
        ({"<b>": [1, 2]}, "name of an argument"),
    ],
)
def test_bad_knobs_are_refused(knobs, text, runner):
    with pytest.raises(InputError, match=text):
        explore(experiment, runner=runner, **knobs)
    assert runner.calls == []


def test_labkits_own_run_is_the_default(monkeypatch):
    worlds = pytest.importorskip("labkit.worlds")
    runner = Runner()
    monkeypatch.setattr(worlds, "run", runner)
    explore(experiment, gpu="l4", batch_size=2)
    assert runner.calls == [{"gpu": "l4", "batch_size": 2}]


# --- predict -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _fresh_predictions(monkeypatch):
    monkeypatch.setattr(predictions, "predictions", {})


def test_a_prediction_is_committed_by_a_click():
    prediction = predict("How much at the peak?", id="06-peak")
    assert prediction.value is None
    prediction.field.value = "3.5"
    assert prediction.value is None
    prediction.button.click()
    assert prediction.value == 3.5
    assert "You predict 3.50 GiB" in message(prediction)


def test_running_the_cell_again_keeps_the_prediction():
    predict("How much?", id="a").commit(2)
    again = predict("How much?", id="a")
    assert again.value == 2
    assert again.field.value == "2"
    assert predict("How much?", id="b").value is None


@pytest.mark.parametrize("typed", ["", "  ", "much", "-1", "nan", "3 apples", "1e999", "1,500"])
def test_what_is_not_a_number_is_refused_with_a_sentence(typed):
    prediction = predict("How much?", id="a")
    prediction.field.value = typed
    prediction.button.click()
    assert prediction.value is None
    assert message(prediction).startswith("✘")


@pytest.mark.parametrize(
    ("typed", "unit", "number"),
    [
        ("3.5", "GiB", 3.5),
        ("3,5", "GiB", 3.5),
        (" 512 MiB ", "GiB", 0.5),
        ("2 gib", "MiB", 2048),
        ("40 %", "%", 40),
        ("40%", "%", 40),
        ("−3", "%", -3),
        (".5", "", 0.5),
        ("1e3", "", 1000),
    ],
)
def test_numbers_are_read_as_people_type_them(typed, unit, number):
    assert parse_number(typed, unit) == pytest.approx(number)


@pytest.mark.parametrize("bad", [True, "3", None, float("inf"), -1])
def test_commit_refuses_what_is_no_number(bad):
    with pytest.raises(InputError, match="a prediction must be a number"):
        predict("How much?", id="a").commit(bad)


@pytest.mark.parametrize(
    ("predicted", "actual", "text"),
    [
        (2, 4 * GIB, "2 times larger"),
        (4, 1 * GIB, "4 times smaller"),
        (2, 2 * GIB, "Exactly right"),
        (1.95, 2 * GIB, "Close: off by 2.5 %"),
        (0, GIB, "cannot be compared"),
    ],
)
def test_outcome_says_how_far_off(predicted, actual, text, capsys):
    prediction = predict("How much?", id="a")
    prediction.commit(predicted)
    assert text in " ".join(prediction.outcome(actual).text.split())


def test_outcome_of_a_run_names_its_source(capsys):
    prediction = predict("How much?", id="a")
    prediction.commit(1)
    text = prediction.outcome(fake_run(total_bytes=3 * GIB)).text
    assert "You predicted 1.00 GiB. Simulated for NVIDIA T4: 3.00 GiB." in text
    assert "simulated" in capsys.readouterr().out.lower()


def test_outcome_in_other_units_takes_the_number_itself(capsys):
    prediction = predict("How many times?", unit="times", id="a")
    prediction.commit(8)
    assert "You predicted 8 times. Found: 10 times." in prediction.outcome(10).text


def test_outcome_without_a_prediction_goes_on(capsys):
    card = predict("How much?", id="a").outcome(GIB)
    assert "no prediction made" in card.text
    assert "1.00 GiB" in card.text


@pytest.mark.parametrize("actual", [None, "3", float("nan"), True])
def test_outcome_refuses_what_is_no_number(actual):
    with pytest.raises(InputError, match="an outcome must be"):
        predict("How much?", id="a").outcome(actual)


def test_hostile_questions_are_escaped(capsys):
    prediction = predict(HOSTILE, unit=HOSTILE, id=HOSTILE)
    prediction.commit(1)
    shown = [w.value for w in prediction.widget.children if isinstance(w, ipywidgets.HTML)]
    row = prediction.widget.children[1]
    shown += [w.value for w in row.children if isinstance(w, ipywidgets.HTML)]
    shown.append(prediction.outcome(2).html)
    assert len(shown) == 4
    assert not any("<script" in text for text in shown)


def test_the_module_offers_both():
    assert widgets.predict is predict

"""Interactive widgets for notebooks: ``explore`` runs an experiment with settings you choose.

Without a frontend a lesson continues: ``explore`` shows a static figure of the first setting. Tests
and scripts set ``.value`` and call ``.click()``, or ``run_once()``.

Limits: one run at a time; a run cannot be stopped halfway except by interrupting the kernel. By
keyboard, Space opens a menu: on a closed one JupyterLab takes the arrows to go to the next cell.
"""

import numbers
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ipywidgets
from IPython.display import display

from labkit.runs import Run
from labkit.show.bars import draw_bars
from labkit.show.cards import BAD, Shown, notice
from labkit.show.controls import LiveFigure, named
from labkit.show.tables import setting_text
from labkit.show.timelines import draw_timeline
from labkit.support.html_table import Rich
from labkit.values import InputError, format_bytes


def explore(
    experiment: Callable[..., Any],
    *,
    gpu: str | list[str] | None = "t4",
    runner: Callable[..., Run] | None = None,
    **knobs: Any,
) -> "Explorer":
    """Show controls that run an experiment again and again, and a figure that compares the runs.

    The first setting runs at once, so that there is a figure where nobody can click.

    Args:
        experiment: what ``labkit.run`` takes.
        gpu: the GPU to simulate where there is none to measure on; a list makes it a knob.
        runner: what runs one setting, called as ``labkit.run`` is; None: ``labkit.run`` itself.
        **knobs: the experiment's arguments. A list of values becomes a control, a slider for
            numbers and a menu for the rest; a single value is passed on as it is.

    Returns:
        The explorer, already shown.

    Raises:
        InputError: a knob is an empty list, or holds the same value twice; and whatever the first
            run raises.
    """
    if runner is None:
        from labkit.dispatch import run as runner  # imports PyTorch, which figures do without
    return Explorer(experiment, runner, {"gpu": gpu, **knobs}).show()


class Explorer(Shown):
    """What ``explore`` shows.

    Attributes:
        controls: one widget per knob that has more than one value, by the knob's name.
        button: runs the setting that the controls show.
        clear_button: forgets all runs.
        runs: the runs so far, oldest first.
        message: an HTML widget that says what is going on or what went wrong.
        picture: an HTML widget with all runs as bars and the latest as a timeline.
        errors: an Output widget that holds the traceback if the experiment itself failed.
    """

    def __init__(
        self, experiment: Callable[..., Any], runner: Callable[..., Run], knobs: Mapping[str, Any]
    ) -> None:
        self._experiment, self._runner = experiment, runner
        self.controls: dict[str, Any] = {}
        self._fixed: dict[str, Any] = {}
        for name, values in knobs.items():
            choices = _choices(name, values)
            if len(choices) > 1:
                self.controls[name] = _control(name, choices)
            else:
                self._fixed[name] = choices[0]
        self.runs: list[Run] = []
        self._settings: list[dict[str, Any]] = []
        self.button = ipywidgets.Button(description="Run", button_style="primary", icon="play")
        self.clear_button = ipywidgets.Button(description="Clear", icon="trash")
        self.button.on_click(lambda _: self.run_once())
        self.clear_button.on_click(lambda _: self.clear())
        self.message = ipywidgets.HTML()
        self._live = LiveFigure()
        self.picture = self._live.widget
        self.errors = ipywidgets.Output()
        buttons = ipywidgets.HBox([self.button, self.clear_button])
        self.widget = ipywidgets.VBox(
            [*self.controls.values(), buttons, self.message, self.errors, self.picture]
        )

    @property
    def setting(self) -> dict[str, Any]:
        """The arguments that the next run gets: what the controls show, and what is fixed."""
        return self._fixed | {name: control.value for name, control in self.controls.items()}

    def show(self) -> "Explorer":
        """Run the first setting, then show the controls and a static figure under them."""
        self._add(self.setting)
        self.message.value = notice(self._summary())
        display(self.widget)
        self._live.show_below(self._figures())
        return self

    def run_once(self) -> Run | None:
        """Run what the controls show, as a click on the button does.

        Raises nothing but an interrupt: what goes wrong is shown. A setting that has run already
        is not run again.

        Returns:
            The new run; None if there is none.
        """
        setting = self.setting
        if self.button.disabled:
            return None
        if setting in self._settings:
            index = self._settings.index(setting)
            text = f"{self._summary(index)} It has run already: bar {index + 1}."
            self.message.value = notice(text)
            return None
        self.button.disabled = self.clear_button.disabled = True
        self.errors.outputs = ()
        self.message.value = notice(f"Running {self._name(setting)} …")
        try:
            run = self._add(setting)
            self._live.replace(self._figures())
            self.message.value = notice(self._summary())
            return run
        except InputError as error:
            self.message.value = notice(f"This setting cannot run: {error}", BAD)
        except Exception as error:
            self._show_error(error)
        except KeyboardInterrupt:
            self.message.value = notice("Interrupted.", BAD)
            raise
        finally:
            self.button.disabled = self.clear_button.disabled = False
        return None

    def clear(self) -> None:
        """Forget all runs."""
        self.runs.clear()
        self._settings.clear()
        self.errors.outputs = ()
        self._live.replace(Rich("", ""))
        self.message.value = notice("Cleared. Choose a setting and run it.")

    def _add(self, setting: dict[str, Any]) -> Run:
        run = self._runner(self._experiment, **setting)
        self.runs.append(run)
        self._settings.append(setting)
        return run

    def _name(self, setting: dict[str, Any]) -> str:
        words = {name: _words(value) for name, value in setting.items()}
        default = getattr(self._experiment, "__name__", "experiment")
        return setting_text(words, self.controls) or default

    def _figures(self) -> Rich:
        """Return all runs as bars, the latest as a timeline."""
        latest = self.runs[-1]
        names = [self._name(setting) for setting in self._settings]
        figures = draw_bars(self.runs, title="Peak memory of each setting", labels=names).rich()
        if latest.trace is not None and latest.trace.timeline().bytes_by_category:
            figures += draw_timeline(latest, title=names[-1]).rich()
        return figures

    def _summary(self, index: int = -1) -> str:
        run, name = self.runs[index], self._name(self._settings[index])
        if run.oom:
            return f"{name}: {run.oom}. Everything was freed, so you can continue."
        words = f"{name}: peak {format_bytes(run.peak_bytes)}, {run.label}"
        if run.capacity_bytes:
            fits = "fits" if run.fits else "does not fit"
            words += f"; it {fits} in {format_bytes(run.capacity_bytes)}"
        return f"{words}."

    def _show_error(self, error: Exception) -> None:
        """Say what failed; a traceback goes where a failed cell would have it."""
        from labkit.hardware.cuda import clear_exception
        from labkit.out_of_memory import is_out_of_memory  # these two import PyTorch

        name = type(error).__name__
        if is_out_of_memory(error):
            text = f"Out of memory: {error}. Everything was freed."
        else:
            text = f"The experiment failed with {name}: {error}"
            trace = traceback.format_exception(error)
            failure = {"ename": name, "evalue": str(error), "traceback": trace}
            self.errors.outputs = ({"output_type": "error", **failure},)
        self.message.value = notice(text, BAD)
        clear_exception(error)  # the frames of its traceback hold the experiment's tensors


def _choices(name: str, values: Any) -> list[Any]:
    """Return a knob's values as a list.

    Raises:
        InputError: there are none, or one comes twice.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return [values]
    choices = list(values)
    if not choices or any(choice in choices[:i] for i, choice in enumerate(choices)):
        raise InputError(f"{name} needs one or more values, each of them once, not {choices}")
    return choices


def _control(name: str, choices: list[Any]) -> Any:
    """Return a slider for numbers, a menu for the rest."""
    options = [(_words(choice), choice) for choice in choices]
    if all(isinstance(c, numbers.Real) and not isinstance(c, bool) for c in choices):
        options.sort(key=lambda option: option[1])
        control = ipywidgets.SelectionSlider(options=options)
    else:
        control = ipywidgets.Dropdown(options=options)
    control.value = choices[0]
    return named(control, name, label_width="140px", width="auto", max_width="640px")


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)

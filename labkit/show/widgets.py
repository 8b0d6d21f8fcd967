"""Things to click: ``explore`` runs an experiment again, ``predict`` commits you to a number.

Only the widgets that ipywidgets 7.7.1 and 8 share are used. Without a frontend a lesson goes
on: ``explore`` shows a still picture of the first setting, ``predict`` stays without a value.
Tests and scripts set ``.value`` and call ``.click()``, or ``run_once()`` and ``commit()``.

Limits: one run at a time; a run cannot be stopped halfway except by interrupting the kernel. By
keyboard, Space opens a menu: on a closed one JupyterLab takes the arrows to go to the next cell.
"""

import html
import itertools
import numbers
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ipywidgets
from IPython.display import display

from labkit.memory import InputError, Run, format_bytes
from labkit.show.plots import draw_bars, draw_timeline
from labkit.show.predictions import Prediction, predict
from labkit.show.rich import Rich
from labkit.show.tables import setting_text

__all__ = ["Explorer", "Prediction", "explore", "predict"]


def explore(
    experiment: Callable[..., Any],
    *,
    gpu: str | list[str] | None = "t4",
    runner: Callable[..., Run] | None = None,
    **knobs: Any,
) -> "Explorer":
    """Show controls that run an experiment again and again, and a figure that compares the runs.

    The first setting runs at once, so that there is a picture where nobody can click.

    Args:
        experiment: what ``labkit.run`` takes.
        gpu: the GPU to simulate where there is none to measure on; a list makes it a knob.
        runner: what runs one setting, called as ``labkit.run`` is; None: ``labkit.run`` itself.
        **knobs: the experiment's arguments. A list of values becomes a control, a slider for
            numbers and a menu for the rest; a single value is passed on as it is.

    Returns:
        The explorer, already shown.

    Raises:
        InputError: a knob is an empty list, holds the same value twice, or is not an argument's
            name; and whatever the first run raises.
    """
    if runner is None:
        from labkit.worlds import run as runner  # brings PyTorch, which figures do without
    return Explorer(experiment, runner, {"gpu": gpu, **knobs}).show()


class Explorer:
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
        self._running = False
        # The picture outside the widgets, until the first click; a page that was opened again
        # meanwhile keeps it, as it does not know its display id.
        self._still: Any = None
        self.button = ipywidgets.Button(description="Run", button_style="primary", icon="play")
        self.clear_button = ipywidgets.Button(description="Clear", icon="trash")
        self.message = ipywidgets.HTML()
        # As a block, or a wide table would keep the figures from shrinking with the window.
        self.picture = ipywidgets.HTML(layout={"display": "block", "overflow": "auto"})
        self.errors = ipywidgets.Output()
        self.button.on_click(lambda _: self.run_once())
        self.clear_button.on_click(lambda _: self.clear())
        self.widget = ipywidgets.VBox(
            [
                *self.controls.values(),
                ipywidgets.HBox([self.button, self.clear_button]),
                self.message,
                self.errors,
                self.picture,
            ]
        )

    @property
    def setting(self) -> dict[str, Any]:
        """The arguments that the next run gets: what the controls show, and what is fixed."""
        return self._fixed | {name: control.value for name, control in self.controls.items()}

    def show(self) -> "Explorer":
        """Run the first setting, then show the controls and a still picture under them."""
        self._add(self.setting)
        self._tell(self._summary())
        display(self.widget)
        self._still = display(self._figures(), display_id=True)
        return self

    def _ipython_display_(self) -> None:
        """Nothing: ``explore`` has shown it."""

    def run_once(self) -> Run | None:
        """Run what the controls show, as a click on the button does.

        Never raises, but for an interrupt: what goes wrong is shown. A setting that has run
        already is not run again.

        Returns:
            The new run; None if there is none.
        """
        setting = self.setting
        if self._running:
            return None
        if setting in self._settings:
            index = self._settings.index(setting)
            self._tell(f"{self._summary(index)} It has run already: bar {index + 1}.")
            return None
        self._running = self.button.disabled = self.clear_button.disabled = True
        self.errors.outputs = ()
        self._tell(f"Running {self._name(setting)} …")
        try:
            run = self._add(setting)
            self._show_live(self._figures())
        except InputError as error:
            self._tell(f"This setting cannot run: {error}", alarm=True)
        except Exception as error:
            self._show_error(error)
        except KeyboardInterrupt:
            self._tell("Interrupted.", alarm=True)
            raise
        else:
            self._tell(self._summary())
            return run
        finally:
            self._running = self.button.disabled = self.clear_button.disabled = False
        return None

    def clear(self) -> None:
        """Forget all runs."""
        self.runs.clear()
        self._settings.clear()
        self.errors.outputs = ()
        self._show_live(Rich("", ""))
        self._tell("Cleared. Choose a setting and run it.")

    def _add(self, setting: dict[str, Any]) -> Run:
        run = self._runner(self._experiment, **setting)
        self.runs.append(run)
        self._settings.append(setting)
        return run

    def _name(self, setting: dict[str, Any]) -> str:
        words = {name: _words(value) for name, value in setting.items()}
        return setting_text(words, self.controls) or getattr(
            self._experiment, "__name__", "experiment"
        )

    def _figures(self) -> Rich:
        """All runs as bars, the latest as a timeline."""
        latest = self.runs[-1]
        names = [self._name(setting) for setting in self._settings]
        figures = draw_bars(self.runs, title="Peak memory of each setting", labels=names).rich()
        if latest.trace is not None and latest.trace.timeline().bytes_by_category:
            figures += draw_timeline(latest, title=names[-1]).rich()
        return figures

    def _show_live(self, figures: Rich) -> None:
        self.picture.value = figures.html
        if self._still is not None:
            self._still.update(Rich("", ""))
            self._still = None

    def _summary(self, index: int = -1) -> str:
        run, name = self.runs[index], self._name(self._settings[index])
        if run.oom:
            return f"{name}: {run.oom}. Everything was freed, so you can go on."
        words = f"{name}: peak {format_bytes(run.peak_bytes)}, {run.label}"
        if run.capacity_bytes:
            fits = "fits" if run.fits else "does not fit"
            words += f"; it {fits} in {format_bytes(run.capacity_bytes)}"
        return f"{words}."

    def _tell(self, text: str, *, alarm: bool = False) -> None:
        colour = "#8f1d10" if alarm else "#1b2430"
        self.message.value = (
            f'<div role="{"alert" if alarm else "status"}" style="background:#f3f5f7;'
            f"color:{colour};padding:4px 10px;border-radius:4px;line-height:1.5;"
            f'white-space:normal">{"✘ " if alarm else ""}{html.escape(text)}</div>'
        )

    def _show_error(self, error: Exception) -> None:
        """Say what failed; a traceback goes where a failed cell would have it."""
        from labkit.hardware import clear_exception
        from labkit.tracker import is_out_of_memory  # these two bring PyTorch

        name = type(error).__name__
        if is_out_of_memory(error):
            self._tell(f"Out of memory: {error}. Everything was freed.", alarm=True)
        else:
            self._tell(f"The experiment failed with {name}: {error}", alarm=True)
            trace = traceback.format_exception(error)
            failure = {"ename": name, "evalue": str(error), "traceback": trace}
            self.errors.outputs = ({"output_type": "error", **failure},)
        clear_exception(error)  # the frames of its traceback hold the experiment's tensors


def _choices(name: str, values: Any) -> list[Any]:
    """A knob's values as a list.

    Raises:
        InputError: there are none, one comes twice, or the knob's name is no argument's.
    """
    if not name.isidentifier():
        raise InputError(f"a knob must have the name of an argument, not {name!r}")
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return [values]
    choices = list(values)
    if not choices:
        raise InputError(f"{name} is an empty list: there is nothing to choose from")
    for first, second in itertools.combinations(choices, 2):
        if first == second:
            raise InputError(f"{name} holds {second!r} twice: a choice needs each value once")
    return choices


def _control(name: str, choices: list[Any]) -> Any:
    """A slider for numbers, a menu for the rest: its label and choice are read out, too."""
    options = [(_words(choice), choice) for choice in choices]
    look = {
        "description": name,
        "style": {"description_width": "140px"},
        "layout": {"width": "auto", "max_width": "640px"},
    }
    if all(isinstance(c, numbers.Real) and not isinstance(c, bool) for c in choices):
        rising = sorted(options, key=lambda option: option[1])
        slider = ipywidgets.SelectionSlider(
            options=rising, value=choices[0], continuous_update=False, **look
        )
        slider.tooltip = name  # without one, ipywidgets 8 shows the word "null"
        return slider
    return ipywidgets.Dropdown(options=options, value=choices[0], **look)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)

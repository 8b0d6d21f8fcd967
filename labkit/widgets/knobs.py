"""Interactive widgets for notebooks: ``explore`` runs an experiment with settings you choose.

Without a frontend a lesson continues: ``explore`` shows a static figure of the first two settings.
Tests and scripts set ``.value`` and call ``.click()``, or ``run_once()``.

Limits: one run at a time; a run cannot be stopped halfway except by interrupting the kernel. By
keyboard, Space opens a menu: on a closed one JupyterLab takes the arrows to go to the next cell.
Only the widgets that ipywidgets 7.7.1 and 8 share are used.
"""

import numbers
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ipywidgets
from IPython.display import display

from gpumem.figures.bars import draw_bars
from gpumem.figures.cards import BAD, Shown, notice
from gpumem.figures.html_pages import Rich
from gpumem.figures.tables import setting_text
from gpumem.figures.timelines import draw_timeline
from gpumem.inputs import InputError
from gpumem.runs import Run
from gpumem.units import format_bytes


def explore(
    experiment: Callable[..., Any],
    *,
    gpu: str | list[str] | None = "t4",
    runner: Callable[..., Run] | None = None,
    timeline: bool = True,
    **knobs: Any,
) -> "Explorer":
    """Show controls that run an experiment again and again, and a figure that compares the runs.

    Two settings run at once, so that there is something to compare before anybody clicks: the first
    value of every knob, then the second value of the first knob that is not the GPU.

    Args:
        experiment: what ``labkit.run`` takes.
        gpu: the GPU to simulate where there is none to measure on; a list makes it a knob.
        runner: what runs one setting, called as ``labkit.run`` is; None: ``labkit.run`` itself.
        timeline: show the latest run's timeline, too.
        **knobs: the experiment's arguments. A list of values becomes a control, a slider for
            numbers and a menu for the rest; a single value is passed on as it is. An `InputError`
            refuses an empty list, and one that holds the same value twice. What the first run
            raises is raised, too.
    """
    if runner is None:
        from gpumem.measure_or_simulate import run as runner  # PyTorch, which figures do without
    return Explorer(experiment, runner, {"gpu": gpu, **knobs}, timeline=timeline).show()


class Explorer(Shown):
    """What ``explore`` shows.

    Attributes:
        controls: one widget per knob that has more than one value, by the knob's name.
        button: runs the setting that the controls show.
        runs: the runs so far by the name of their setting, oldest first.
        message: says what is going on or what went wrong.
        errors: holds the traceback if the experiment itself failed.
        picture: all runs as bars and, unless not wanted, the latest as a timeline. Until these
            change it is empty, and a static figure stands below, which remains where nobody can
            click.
    """

    def __init__(
        self,
        experiment: Callable[..., Any],
        runner: Callable[..., Run],
        knobs: Mapping[str, Any],
        *,
        timeline: bool = True,
    ) -> None:
        self._experiment, self._runner, self._timeline = experiment, runner, timeline
        choices = {name: _choices(name, values) for name, values in knobs.items()}
        self._fixed = {name: values[0] for name, values in choices.items() if len(values) == 1}
        self._varied = {name: values for name, values in choices.items() if len(values) > 1}
        self.controls = {name: control(name, values) for name, values in self._varied.items()}
        self.runs: dict[str, Run] = {}
        self._settings: list[dict[str, Any]] = []  # of these runs
        self.button = ipywidgets.Button(description="Run", button_style="primary", icon="play")
        self.button.on_click(lambda _: self.run_once())
        self.message, self.errors = ipywidgets.HTML(), ipywidgets.Output()
        # As a block, or a wide table would keep the figure from shrinking with the window.
        self.picture = ipywidgets.HTML(layout={"display": "block", "overflow": "auto"})
        self._below: Any = None  # the static figure
        self.widget = ipywidgets.VBox(
            [*self.controls.values(), self.button, self.message, self.errors, self.picture]
        )

    def show(self) -> "Explorer":
        """Run two settings, then show the controls and a static figure under them."""
        self.message.value = notice(_summary(self._name, self._run()))
        compared = [name for name in self.controls if name != "gpu"] or [*self.controls]
        if compared:
            self.controls[compared[0]].value = self._varied[compared[0]][1]
            self._try()
        display(self.widget)
        self._below = display(self._figures(), display_id=True)
        return self

    def run_once(self) -> Run | None:
        """Run what the controls show, as a click on the button does, and return the new run.

        None where there is none: a setting that has run already is not run again, and what goes
        wrong is shown. Raises nothing but an interrupt.
        """
        name = self._name
        if name in self.runs:
            number = [*self.runs].index(name) + 1
            text = f"{_summary(name, self.runs[name])} It has run already: bar {number}."
            self.message.value = notice(text)
            return None
        run = self._try()
        if run is not None:
            self.picture.value = self._figures().html
            if self._below is not None:  # it would stand there twice
                self._below.update(Rich("", ""))
                self._below = None
        return run

    def _try(self) -> Run | None:
        """Run what the controls show; say what went wrong instead of raising it."""
        name = self._name
        self.button.disabled = True
        self.errors.outputs = ()
        self.message.value = notice(f"Running {name} …")
        try:
            run = self._run()
            self.message.value = notice(_summary(name, run))
            return run
        except InputError as error:
            self.message.value = notice(f"This setting cannot run: {error}", BAD)
        except Exception as error:
            self._show_error(error)
        except KeyboardInterrupt:
            self.message.value = notice("Interrupted.", BAD)
            raise
        finally:
            self.button.disabled = False
        return None

    def _run(self) -> Run:
        name = self._name
        chosen = {knob: control.value for knob, control in self.controls.items()}
        self.runs[name] = self._runner(self._experiment, **self._fixed, **chosen)
        self._settings.append(chosen)
        return self.runs[name]

    @property
    def _name(self) -> str:
        """What the controls show, such as ``"batch_size 8, precision bf16"``."""
        chosen = {name: _words(control.value) for name, control in self.controls.items()}
        return setting_text(chosen, chosen) or "experiment"

    def _figures(self) -> Rich:
        """Return all runs as bars, the latest as a timeline."""
        names, runs = [*self.runs], [*self.runs.values()]
        labels = _short_labels(self._settings)
        figures = draw_bars(runs, labels=labels).rich()
        trace = runs[-1].trace if self._timeline else None
        if trace is not None and trace.timeline().bytes_by_category:
            figures += draw_timeline(runs[-1], name=names[-1]).rich()
        return figures

    def _show_error(self, error: Exception) -> None:
        """Say what failed; a traceback goes below the message."""
        from gpumem.hardware.cuda import clear_exception
        from gpumem.out_of_memory import is_out_of_memory  # these two import PyTorch

        text = f"Out of memory: {error}. Everything was freed."
        if not is_out_of_memory(error):
            text = f"The experiment failed with {type(error).__name__}: {error}"
            self.errors.append_stderr("".join(traceback.format_exception(error)))
        self.message.value = notice(text, BAD)
        clear_exception(error)  # the frames of its traceback hold the experiment's tensors


def _short_labels(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name settings by the knobs in which they differ; a text needs no knob's name before it."""
    varied = [knob for knob in settings[0] if any(s[knob] != settings[0][knob] for s in settings)]
    labels = []
    for setting in settings:
        named = {k: f"{k} {_words(v)}" if not isinstance(v, str) else v for k, v in setting.items()}
        labels.append(", ".join(named[knob] for knob in varied or setting) or "experiment")
    return labels


def _summary(name: str, run: Run) -> str:
    if run.oom:
        return f"{name}: {run.oom}. Everything was freed, so you can continue."
    words = f"{name}: peak {format_bytes(run.peak_bytes)}, {run.label}"
    if run.capacity_bytes:
        fits = "fits" if run.fits else "does not fit"
        words += f"; it {fits} in {format_bytes(run.capacity_bytes)}"
    return f"{words}."


def _choices(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return [values]
    choices = list(values)
    if not choices or any(choice in choices[:i] for i, choice in enumerate(choices)):
        raise InputError(f"{name} needs one or more values, each of them once, not {choices}")
    return choices


def control(name: str, choices: list[Any]) -> Any:
    """Return a slider for numbers, a menu for the rest, at the first choice and with its name."""
    options = [(_words(choice), choice) for choice in choices]
    if all(isinstance(c, numbers.Real) and not isinstance(c, bool) for c in choices):
        options.sort(key=lambda option: option[1])
        made = ipywidgets.SelectionSlider(options=options, continuous_update=False)
        made.tooltip = name  # without one, ipywidgets 8 shows the word "null"
    else:
        made = ipywidgets.Dropdown(options=options)
    made.value, made.description = choices[0], name  # the name is read out, too
    made.style.description_width = "140px"
    made.layout.width, made.layout.max_width = "auto", "640px"
    return made


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)

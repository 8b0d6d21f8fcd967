"""The memory calculator: the formula that everybody uses beside the trace, for any model and GPU.

``calculator()`` shows controls for model, GPU and recipe; each change is answered anew: by the
formula at once, by the trace when its step has run on fake tensors. `make app` serves it as a page.

Without a frontend a static figure of the first choice is shown; tests and scripts set
``.controls[name].value`` and call ``update()``.

Limits: those of `formula_estimate` and `estimate`. What is chosen while another choice is being
traced waits, and only the last is computed.
"""

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

from IPython.display import display
from ipywidgets import HTML, Dropdown, HBox, Output, SelectionSlider, Text, VBox
from traitlets import TraitError

from labkit.hardware import catalogue, cuda
from labkit.models.catalogue import MODELS
from labkit.plan.estimate import Estimate, estimate
from labkit.plan.formula import Envelope, formula_estimate
from labkit.plan.recipe import ATTENTIONS, OPTIMIZERS, QUANTIZATIONS, Recipe
from labkit.show.cards import BAD, GOOD, WARM, Look, Shown, notice
from labkit.show.controls import named
from labkit.show.formula_bars import draw_formula_bars, part_table
from labkit.support.html_table import Rich
from labkit.values import GIB, PRECISIONS, InputError, format_bytes

PAUSE_SECONDS = 0.15  # arrow keys pass values that nobody wants to read
MOST_ANSWERS = 64
CLOSE_BYTES = GIB // 2  # the catalogue's capacities vary this much with driver and ECC
OTHER_MODEL = "another …"
FIRST = {"model": "Llama-3.1-8B", "gpu": "a100-80gb", "precision": "bf16", "seq_len": 4096}
NONE = "none"  # a menu whose value is None shows nothing at all


def calculator(**first: Any) -> "Calculator":
    """Show the memory calculator: formula and trace side by side, for what the controls say.

    Args:
        **first: what the controls show at first, by name: ``model``, ``gpu``, or a field of the
            recipe that has a control. A model that is not in the table is a folder with a
            ``config.json`` or, online, a hub id.

    Returns:
        The calculator, already shown.

    Raises:
        InputError: no such control, or a value that it does not offer.
    """
    return Calculator(first).show()


class Calculator(Shown):
    """What ``calculator`` shows.

    Attributes:
        controls: the widgets by name; ``other_model`` is a text, read if ``model`` says so.
        message, said: what was found, or why a choice is refused, as a widget and as text.
        result: an Output widget with the figure and the table.
        pair: the formula and the estimate shown; None where a choice is refused.
    """

    def __init__(self, first: Mapping[str, Any]) -> None:
        self.controls = _controls()
        self.message, self.result = HTML(), Output()
        self.pair: tuple[Envelope, Estimate] | None = None
        self._answer = functools.lru_cache(MOST_ANSWERS)(self._trace)
        self._waiting: asyncio.TimerHandle | None = None
        self._set(first)
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        left = VBox([*self.controls.values()], layout={"width": "364px", "flex": "0 0 auto"})
        layout = {"flex": "1 1 560px", "min_width": "320px"}  # below where the page is narrow
        right = VBox([self.message, self.result], layout=layout)
        self.widget = HBox([left, right], layout={"flex_flow": "row wrap"})

    @property
    def setting(self) -> dict[str, Any]:
        """What the controls say: ``model``, ``gpu`` and fields of a recipe."""
        values = {name: control.value for name, control in self.controls.items()}
        other = values.pop("other_model").strip()
        if values["model"] == OTHER_MODEL:
            values["model"] = other
        return {name: None if value == NONE else value for name, value in values.items()}

    def show(self) -> "Calculator":
        """Compute the first choice and show all, as one output: a frontend shows what it can."""
        self.update()
        static = Rich(self.message.value, self.said) + self._picture()
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        display(
            {"application/vnd.jupyter.widget-view+json": view, **static._repr_mimebundle_()},
            raw=True,
        )
        return self

    def update(self) -> None:
        """Answer what the controls say now; what goes wrong is shown, not raised."""
        other = self.controls["model"].value == OTHER_MODEL
        self.controls["other_model"].layout.display = None if other else "none"
        self.pair, self.result.outputs = None, ()
        try:
            self.pair = self._answer(**self.setting)
        except InputError as error:
            self._say(f"This cannot be trained: {error}", BAD)
        except Exception as error:
            self._say(f"This could not be traced. {type(error).__name__}: {error}", BAD)
            cuda.clear_exception(error)
        else:
            data = self._picture()._repr_mimebundle_()
            output = {"output_type": "display_data", "data": data, "metadata": {}}
            self.result.outputs = (output,)
            self._say(*verdict(*self.pair))

    def _say(self, text: str, look: Look | None = None) -> None:
        self.said, self.message.value = text, notice(text, look)

    def _changed(self, _: Any) -> None:
        """Answer when nothing has changed for a moment; at once where no kernel's loop runs."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.update()
            return
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = loop.call_later(PAUSE_SECONDS, self.update)

    def _trace(self, model: str, gpu: str, **fields: Any) -> tuple[Envelope, Estimate]:
        device = catalogue.gpu(gpu)
        if not model:
            raise InputError("name a folder with a config.json, or a model of the hub")
        recipe = Recipe(**fields)
        recipe.check(device)
        formula = formula_estimate(model, recipe=recipe)
        said = format_bytes(formula.total_bytes)
        self._say(f"The formula says {said}. Tracing a step of {formula.model} …")
        return formula, estimate(model, gpu=device, recipe=recipe)

    def _set(self, chosen: Mapping[str, Any]) -> None:
        first = {**FIRST, **chosen}
        if first["model"] not in MODELS:
            first |= {"model": OTHER_MODEL, "other_model": str(first["model"])}
        gpu = catalogue.gpu(first["gpu"])
        first["gpu"] = gpu.key
        if "precision" not in chosen and not gpu.bf16_native:
            first["precision"] = "amp-fp16"
        for name, value in first.items():
            try:
                self.controls[name].value = NONE if value is None else value
            except (KeyError, TraitError) as error:
                raise InputError(f"the calculator does not offer {name}={value!r}") from error

    def _picture(self) -> Rich:
        if self.pair is None:
            return Rich("", "")
        formula, _ = self.pair
        name = f"{formula.model}: {formula.recipe}"
        picture = draw_formula_bars({name: self.pair}, title=name)
        picture.table = part_table(*self.pair)
        return picture.rich()


def _controls() -> dict[str, Any]:
    """Return the controls by name, each with its label."""
    gpus = [(_gpu_name(gpu), gpu.key) for gpu in catalogue.gpus()]
    lengths = [1 << power for power in range(7, 16)]
    ranks = [(str(rank), rank) for rank in (4, 8, 16, 32, 64, 128)]
    hint = "folder, or owner/name on the hub"
    controls = {
        "model": ("model", Dropdown(options=[*MODELS, OTHER_MODEL])),
        "other_model": ("its config", Text(placeholder=hint, continuous_update=False)),
        "gpu": ("card", Dropdown(options=gpus)),
        "batch_size": ("sequences", SelectionSlider(options=[1 << n for n in range(8)])),
        "seq_len": ("tokens in each", SelectionSlider(options=lengths)),
        "precision": ("precision", Dropdown(options=PRECISIONS)),
        "optimizer": ("optimizer", Dropdown(options=[*OPTIMIZERS])),
        "checkpointing": ("checkpointing", Dropdown(options=[("off", False), ("on", True)])),
        "attention": ("attention", Dropdown(options=[*ATTENTIONS])),
        "lora": ("LoRA rank", Dropdown(options=[(NONE, NONE), *ranks])),
        "quantize": ("quantized to", Dropdown(options=[NONE, *QUANTIZATIONS])),
    }
    return {
        name: named(control, label, label_width="104px", width="340px")
        for name, (label, control) in controls.items()
    }


def _gpu_name(gpu: catalogue.Gpu) -> str:
    """Return ``"GeForce RTX 4090 (24 GB)"``."""
    name = gpu.name.removeprefix("NVIDIA ")
    return name if name.endswith("GB") else f"{name} ({gpu.memory_gb:g} GB)"


def verdict(formula: Envelope, trace: Estimate) -> tuple[str, Look]:
    """Return what was found, a line each, and its look."""
    need_bytes, room_bytes = trace.peak_reserved_bytes, trace.capacity_bytes
    need, room, device = format_bytes(need_bytes), format_bytes(room_bytes), trace.run.device
    if trace.fits:
        look = GOOD
        head = f"It fits. PyTorch takes {need} of the {room} that the {device} leaves it."
    else:
        look = BAD
        head = f"It does not fit. PyTorch would take {need}; the {device} leaves it {room}."
    if abs(room_bytes - need_bytes) < CLOSE_BYTES:
        look = WARM
        head += " Too close to call: GPUs of one name differ by as much."
    said = f"The formula says {format_bytes(formula.total_bytes)}"
    if (formula.total_bytes <= room_bytes) == trace.fits:
        said += ", which comes to the same answer."
    elif trace.fits:
        said += " and would have sent you to a larger card."
    else:
        said += " and would have sent you into an out-of-memory error."
    lines = [head, said]
    missing = {row: row.peak_bytes - (row.formula_bytes or 0) for row in formula.beside(trace.run)}
    most = max(missing, key=missing.get)
    if missing[most] > trace.peak_allocated_bytes // 100:
        lines.append(
            f"What it misses most at the peak is {most.part}: {format_bytes(most.peak_bytes)}, "
            f"where it counts {format_bytes(most.formula_bytes or 0)}."
        )
    lines.append(f"No schedule of this recipe goes below {format_bytes(trace.floor_bytes)}.")
    return "\n".join(lines), look

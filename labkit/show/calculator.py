"""The memory calculator: the formula that everybody uses beside the trace, for any model and card.

``calculator()`` shows controls for model, card and recipe; each change answers anew: the formula at
once, the trace when its step has run on fake tensors. `make app` serves it as a page of its own.

Only the widgets that ipywidgets 7.7.1 and 8 share are used. Without a frontend a still picture of
the first choice is shown; tests and scripts set ``.controls[name].value`` and call ``update()``.

Limits: those of `envelope` and `estimate`. What is chosen while another choice is being traced
waits, and only the last is computed.
"""

import asyncio
import html
import re
from collections.abc import Mapping
from typing import Any

import ipywidgets
from IPython.display import display

from labkit import hardware
from labkit.catalogue import Gpu, gpus
from labkit.estimates import estimate
from labkit.experiment import PRECISIONS
from labkit.formula import envelope
from labkit.memory import GIB, InputError, format_bytes
from labkit.models import MODELS
from labkit.recipes import ATTENTIONS, OPTIMIZERS, QUANTIZATIONS, Recipe
from labkit.show.pairs import Pair, draw_pairs, part_table
from labkit.show.rich import Rich

PAUSE_SECONDS = 0.15  # who drags a slider passes values that nobody wants to read
MOST_ANSWERS = 64
CLOSE_BYTES = GIB // 2  # the catalogue's capacities move so much with driver and ECC
OTHER_MODEL = "another …"
FIRST = {"model": "Llama-3.1-8B", "gpu": "a100-80gb", "precision": "bf16", "seq_len": 4096}

_NONE = ("none", "")  # a menu whose value is None shows nothing at all


def _card_words(card: Gpu) -> str:
    """``"RTX 4090 (24 GB)"``: what fits in a menu."""
    name = card.name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("AMD ")
    size = f"{card.memory_gb:g} GB"
    return name if name.endswith(size) else f"{name} ({size})"


_CHOICES: dict[str, tuple[str, list[Any]]] = {
    "model": ("model", [*MODELS, OTHER_MODEL]),
    "gpu": ("card", [(_card_words(g), g.key) for g in gpus()]),
    "batch_size": ("sequences", [1 << power for power in range(8)]),
    "seq_len": ("tokens in each", [1 << power for power in range(7, 16)]),
    "precision": ("precision", list(PRECISIONS)),
    "optimizer": ("optimizer", list(OPTIMIZERS)),
    "checkpointing": ("checkpointing", [("off", False), ("on", True)]),
    "attention": ("attention", list(ATTENTIONS)),
    "lora": ("LoRA rank", [_NONE, *((str(r), r) for r in (4, 8, 16, 32, 64, 128))]),
    "quantize": ("quantised to", [_NONE, *((q, q) for q in QUANTIZATIONS)]),
}
_SLIDERS = ("batch_size", "seq_len")


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


class Calculator:
    """What ``calculator`` shows.

    Attributes:
        controls: the widgets by name; ``other_model`` is a text, read if ``model`` says so.
        message: an HTML widget that says what was found, or why a choice is refused.
        result: an Output widget with the picture and the table.
        pair: the formula and the estimate shown; None where a choice is refused.
    """

    def __init__(self, first: Mapping[str, Any]) -> None:
        self.controls = {name: _control(name) for name in _CHOICES}
        self.controls["other_model"] = ipywidgets.Text(
            placeholder="folder, or owner/name on the hub",
            continuous_update=False, **_look("its config"),
        )  # fmt: skip
        self.message, self.result = ipywidgets.HTML(), ipywidgets.Output()
        self.pair: Pair | None = None
        self._answers: dict[tuple, Pair] = {}
        self._waiting: asyncio.TimerHandle | None = None
        self._set({**FIRST, **first}, chosen=first)
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self.widget = _arranged(self.controls, self.message, self.result)

    @property
    def setting(self) -> dict[str, Any]:
        """What the controls say: ``model``, ``gpu`` and fields of a recipe."""
        values = {name: control.value for name, control in self.controls.items()}
        other = values.pop("other_model").strip()
        model = other if values.pop("model") == OTHER_MODEL else self.controls["model"].value
        plain = {name: None if value == _NONE[1] else value for name, value in values.items()}
        return {"model": model, **plain}

    def show(self) -> "Calculator":
        """Compute the first choice, then show everything; a still picture for who has no widgets.

        Both are one output, of which a frontend shows what it can.
        """
        self.update()
        still = Rich(self.message.value, _plain(self.message.value)) + self._picture()
        view = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        display(
            {"application/vnd.jupyter.widget-view+json": view, **still._repr_mimebundle_()},
            raw=True,
        )
        return self

    def _ipython_display_(self) -> None:
        """Nothing: ``calculator`` has shown it."""

    def update(self) -> None:
        """Answer what the controls say now.

        Never raises, but for an interrupt: what goes wrong is said.
        """
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        self._show_text_field()
        try:
            self.pair = self._answer(self.setting)
        except InputError as error:
            self._refuse(f"This cannot be trained: {error}")
        except Exception as error:
            self._refuse(f"This could not be traced. {type(error).__name__}: {error}")
            hardware.clear_exception(error)
        else:
            self._show(self._picture())
            self._tell(*verdict(self.pair))

    # --- what happens on a change ---------------------------------------------------------------

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

    def _answer(self, setting: dict[str, Any]) -> Pair:
        key = tuple(setting.items())
        if key not in self._answers:
            model, card = setting.pop("model"), hardware.gpu(setting.pop("gpu"))
            if not model:
                raise InputError("name a folder with a config.json, or a model of the hub")
            recipe = Recipe(**setting)
            recipe.check(card)
            formula = envelope(model, recipe=recipe)
            said = format_bytes(formula.total_bytes)
            self._tell(f"The formula says {said}. Tracing a step of {formula.model} …")
            if len(self._answers) >= MOST_ANSWERS:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = Pair(formula, estimate(model, gpu=card, recipe=recipe))
        return self._answers[key]

    def _set(self, first: dict[str, Any], chosen: Mapping[str, Any]) -> None:
        if first["model"] not in MODELS:
            first = {**first, "model": OTHER_MODEL, "other_model": str(first["model"])}
        card = hardware.gpu(first["gpu"])
        first["gpu"] = card.key
        if "precision" not in chosen and not card.bf16_native:
            first["precision"] = "amp-fp16"
        for name, value in first.items():
            if name not in self.controls:
                raise InputError(f"the calculator has no control {name!r}")
            value = _NONE[1] if value is None else value
            offered = [
                _value(option) for option in getattr(self.controls[name], "options", [value])
            ]
            if value not in offered:
                raise InputError(f"the calculator does not offer {name}={value!r}, only {offered}")
            self.controls[name].value = value

    # --- what is shown --------------------------------------------------------------------------

    def _picture(self) -> Rich:
        if self.pair is None:
            return Rich("", "")
        name = f"{self.pair.formula.model}: {self.pair.formula.recipe}"
        picture = draw_pairs({name: self.pair}, title=name)
        picture.table = part_table(self.pair)
        return picture.rich()

    def _show(self, rich: Rich) -> None:
        data = rich._repr_mimebundle_()
        self.result.outputs = ({"output_type": "display_data", "data": data, "metadata": {}},)

    def _refuse(self, text: str) -> None:
        self.pair = None
        self.result.outputs = ()
        self._tell(text, "#8f1d10", "✘")

    def _tell(self, text: str, colour: str = "#1b2430", symbol: str = "") -> None:
        head, _, rest = text.partition("\n")
        body = f"<b>{symbol} {html.escape(head)}</b>" if symbol else html.escape(head)
        lines = "".join(f"<br>{html.escape(line)}" for line in rest.splitlines())
        self.message.value = (
            f'<div role="status" style="background:#f3f5f7;color:#1b2430;padding:8px 12px;'
            f"border-left:5px solid {colour};border-radius:4px;line-height:1.55;"
            f'white-space:normal"><span style="color:{colour}">{body}</span>{lines}</div>'
        )

    def _show_text_field(self) -> None:
        shown = self.controls["model"].value == OTHER_MODEL
        self.controls["other_model"].layout.display = None if shown else "none"


# --- words ----------------------------------------------------------------------------------------


def verdict(pair: Pair) -> tuple[str, str, str]:
    """What was found, a line each; its colour; its symbol."""
    formula, trace = pair
    need_bytes, room_bytes, card = (
        trace.peak_reserved_bytes, trace.capacity_bytes, trace.run.device,
    )  # fmt: skip
    need, room = format_bytes(need_bytes), format_bytes(room_bytes)
    colour, symbol = "#00694b", "✔"
    head = f"It fits. PyTorch takes {need} of the {room} that the {card} leaves it."
    if not trace.fits:
        colour, symbol = "#a3200d", "✘"
        head = f"It does not fit. PyTorch would take {need}; the {card} leaves it {room}."
    if abs(room_bytes - need_bytes) < CLOSE_BYTES:
        colour, symbol = "#8a5300", "!"
        head += " Too close to call: cards of one name differ by as much."
    lines = [head, _formula_says(formula.total_bytes, trace.fits, room_bytes), *_missed(pair)]
    lines.append(f"No schedule of this recipe goes below {format_bytes(trace.floor_bytes)} (▲).")
    return "\n".join(lines), colour, symbol


def _formula_says(total_bytes: int, fits: bool, room_bytes: int) -> str:
    said, agrees = format_bytes(total_bytes), (total_bytes <= room_bytes) == fits
    if agrees:
        return f"The formula says {said}, which comes to the same answer."
    if fits:
        return f"The formula says {said} and would have sent you to a larger card."
    return f"The formula says {said} and would have sent you into an out-of-memory error."


def _missed(pair: Pair) -> list[str]:
    """The part of the peak that the formula misses most, and the one it counts for nothing."""
    rows, least_bytes = pair.rows, pair.trace.peak_allocated_bytes // 100
    lines = []
    missed = max(rows, key=lambda row: row.peak_bytes - (row.formula_bytes or 0))
    if missed.peak_bytes - (missed.formula_bytes or 0) > least_bytes:
        counted = "nothing"
        if missed.formula_bytes is not None:
            counted = format_bytes(missed.formula_bytes)
        lines.append(
            f"What it misses most at the peak is {missed.part}: "
            f"{format_bytes(missed.peak_bytes)}, where it counts {counted}."
        )
    absent = max(rows, key=lambda row: (row.formula_bytes or 0) - row.peak_bytes)
    if (absent.formula_bytes or 0) - absent.peak_bytes > least_bytes:
        lines.append(
            f"It also counts {format_bytes(absent.formula_bytes)} of {absent.part}, "
            f"of which {format_bytes(absent.peak_bytes)} are there at the peak."
        )
    return lines


def _plain(text: str) -> str:
    return html.unescape(re.sub("<[^>]*>", " ", text)).strip()


# --- widgets --------------------------------------------------------------------------------------


def _look(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "style": {"description_width": "104px"},
        "layout": {"width": "340px"},
    }


def _control(name: str) -> Any:
    description, options = _CHOICES[name]
    if name in _SLIDERS:
        slider = ipywidgets.SelectionSlider(
            options=options, continuous_update=False, **_look(description)
        )
        slider.tooltip = description  # without one, ipywidgets 8 shows the word "null"
        return slider
    return ipywidgets.Dropdown(options=options, value=_value(options[0]), **_look(description))


def _value(option: Any) -> Any:
    return option[1] if isinstance(option, tuple) else option


def _arranged(controls: Mapping[str, Any], message: Any, result: Any) -> Any:
    """Controls beside the answer, or above it where the page is narrow."""
    groups = {
        "What": ("model", "other_model", "gpu"),
        "How much": ("batch_size", "seq_len"),
        "How": ("precision", "optimizer", "checkpointing", "attention", "lora", "quantize"),
    }
    column = []
    for title, names in groups.items():
        column.append(ipywidgets.HTML(f"<b>{title}</b>"))
        column += [controls[name] for name in names]
    left = ipywidgets.VBox(column, layout={"width": "364px", "flex": "0 0 auto"})
    right = ipywidgets.VBox([message, result], layout={"flex": "1 1 560px", "min_width": "320px"})
    return ipywidgets.HBox([left, right], layout={"flex_flow": "row wrap"})

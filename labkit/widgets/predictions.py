"""Predictions: the learner commits to a number before the experiment is run.

Works in any unit. Units of bytes may be mixed ("300 MiB" where GiB are asked for); a decimal
comma is understood.

Limits: predictions live as long as the kernel. Nothing is asked where there is no frontend.
"""

import html
import re

import ipywidgets
from IPython.display import display

from gpumem.figures.cards import BAD, COOL, GOOD, Card, Shown, message_card, notice
from gpumem.figures.tables import finite_number
from gpumem.inputs import InputError
from gpumem.runs import Run
from gpumem.units import GIB, KIB, MIB, format_bytes

BYTE_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": GIB << 10}
NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(.*)", re.IGNORECASE)

predictions: dict[str, "Prediction"] = {}
"""Every prediction of this session by its id, also those without a value."""


def predict(question: str, *, unit: str = "GiB", id: str) -> "Prediction":
    """Ask ``question`` before the experiment is run, and return the prediction, already shown.

    Running the cell again keeps what was committed. Without a frontend nothing is asked and the
    lesson continues.

    Args:
        unit: ``B``, ``KiB``, ``MiB``, ``GiB`` and ``TiB`` are bytes, anything else (``"%"``,
            ``"times"``, ``""``) is a plain number.
        id: the prediction's name in this session, such as ``"06-peak"``.
    """
    prediction = Prediction(question, unit, id)
    earlier = predictions.get(id)
    if earlier and earlier.value is not None and earlier.unit == unit:
        prediction.field.value = f"{earlier.value:g}"
        prediction.commit(earlier.value)
    predictions[id] = prediction
    display(prediction.widget)
    return prediction


class Prediction(Shown):
    """A question and, once committed, the learner's answer.

    Attributes:
        value: the number in ``unit``; None until one is committed.
        field, button: where to type, and what commits it, as leaving the field does.
        message: says what was committed, or what is wrong with it.
    """

    def __init__(self, question: str, unit: str, id: str) -> None:
        self.question, self.unit, self.id = question, unit, id
        self.value: float | None = None
        layout = {"width": "220px"}
        example = f"a number of {unit}" if unit else "a number"
        # Sent as a whole when the field is left or Enter is pressed. It commits by itself, as the
        # click does: ipykernel 7.4 may handle a click before a value that was sent earlier.
        self.field = ipywidgets.Text(placeholder=example, layout=layout, continuous_update=False)
        self.field.tooltip = question  # its name in a screen reader
        self.button = ipywidgets.Button(
            description="Commit my prediction", button_style="primary", layout=layout
        )
        self.field.observe(lambda _: self._commit_typed(), names="value")
        self.button.on_click(lambda _: self._commit_typed())
        self.message = ipywidgets.HTML()
        style = "line-height:1.5;white-space:normal"  # ipywidgets sets texts one line high
        asked = ipywidgets.HTML(f'<div style="{style}"><b>{html.escape(question)}</b></div>')
        row = [self.field, ipywidgets.HTML(f"&nbsp;{html.escape(unit)}&nbsp;"), self.button]
        answer = ipywidgets.HBox(row, layout={"flex_flow": "row wrap"})
        self.widget = ipywidgets.VBox([asked, answer, self.message])

    def commit(self, value: float) -> None:
        """Take ``value``, in ``unit``, as the prediction; a later one replaces it.

        An `InputError` says that it is no finite number, or below zero where bytes are asked for.
        """
        value = finite_number(value, "a prediction")
        if value < 0 and self.unit in BYTE_UNITS:
            raise InputError(f"a prediction in bytes must be at least 0, not {value:g}")
        self.value = value
        text = f"You predict {self._text(value)}. You can still change your mind."
        self.message.value = notice(text, GOOD)

    def _commit_typed(self) -> None:
        try:
            self.commit(parse_number(self.field.value, self.unit))
        except InputError as error:
            self.message.value = notice(str(error), BAD)

    def outcome(self, actual: Run | float, *, source: str = "") -> Card:
        """Show the prediction beside what came out, and return the card.

        ``actual`` is a run (its peak counts), else bytes where ``unit`` is a unit of bytes, else
        the number itself; ``source`` is where a number comes from, that of a run is known.
        """
        ending = ""
        if isinstance(actual, Run):
            source = source or actual.label
            ending = " It ran out of memory there." if actual.oom else ""
            actual = actual.peak_bytes
        found = finite_number(actual, "an outcome") / BYTE_UNITS.get(self.unit, 1)
        source = source or "found"
        result = f"{source[:1].upper()}{source[1:]}: {self._text(found)}.{ending}"
        if self.value is None:
            text = f"{result} You made no prediction."
            return message_card(text, title="no prediction made")
        text = f"You predicted {self._text(self.value)}. {result} {_off_by(self.value, found)}"
        close = abs(self.value - found) <= 0.1 * abs(found)
        return message_card(text, title="your prediction", look=GOOD if close else COOL)

    def _text(self, value: float) -> str:
        if self.unit in BYTE_UNITS:
            return format_bytes(value * BYTE_UNITS[self.unit])
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        return f"{number} {self.unit}".strip()


def parse_number(text: str, unit: str = "") -> float:
    """Read a number as people type it: ``"3.5"``, ``"3,5"``, ``"300 MiB"``, ``"40 %"``.

    A unit of bytes is converted to ``unit`` where that is one; an `InputError` refuses any other.
    """
    if re.search(r",\d{3}(?!\d)", text):
        raise InputError(f"{text[:40]!r} could be read in two ways; write 1500 or 1.5")
    match = NUMBER.fullmatch(text.strip().replace(",", ".").replace("−", "-"))
    if not match:
        raise InputError(f"{text[:40]!r} is not a number; type one, for example 2.5")
    value, given = float(match[1]), match[2].lower()
    sizes = {name.lower(): size for name, size in BYTE_UNITS.items()}
    if given in ("", unit.lower()):
        return value
    if given in sizes and unit.lower() in sizes:
        return value * sizes[given] / sizes[unit.lower()]
    raise InputError(f"{text[:40]!r} is not in {unit or 'plain numbers'}; type one such as 2.5")


def _off_by(predicted: float, found: float) -> str:
    if predicted == found:
        return "Exactly right."
    if not found or not predicted or (found < 0) != (predicted < 0):
        return "The two cannot be compared as a ratio."
    ratio = found / predicted
    if 0.9 <= ratio <= 1.1:
        return f"Close: off by {100 * abs(predicted - found) / abs(found):.2g} %."
    size = ratio if ratio > 1 else 1 / ratio
    return f"The real figure is {size:.3g} times {'larger' if ratio > 1 else 'smaller'}."

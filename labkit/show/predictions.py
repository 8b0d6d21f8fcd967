"""Predictions: the learner commits to a number before the experiment is run.

Works in any unit. Units of bytes may be mixed ("300 MiB" where GiB are asked for); a decimal
comma is understood.

Limits: predictions live as long as the kernel. Nothing is asked where there is no frontend.
"""

import html
import math
import numbers
import re

import ipywidgets
from IPython.display import display

from labkit.memory import GIB, KIB, MIB, InputError, Run, format_bytes
from labkit.show.cards import Card, message_card

BYTE_UNITS = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": GIB << 10}
NUMBER = re.compile(r"[+−-]?(\d+([.,]\d*)?|[.,]\d+)(e[+-]?\d+)?", re.IGNORECASE)
LINES = "line-height:1.5;white-space:normal"  # ipywidgets sets texts one line high

predictions: dict[str, "Prediction"] = {}
"""Every prediction of this session by its id, also those without a value."""


def predict(question: str, *, unit: str = "GiB", id: str) -> "Prediction":
    """Ask for a number before the experiment is run.

    Running the cell again keeps what was committed. Without a frontend nothing is asked and the
    lesson goes on.

    Args:
        question: what to predict.
        unit: in which unit; ``B``, ``KiB``, ``MiB``, ``GiB`` and ``TiB`` are bytes, anything
            else (``"%"``, ``"times"``, ``""``) is a plain number.
        id: the prediction's name in this session, such as ``"06-peak"``.

    Returns:
        The prediction, already shown; its ``value`` is None until one is committed.
    """
    prediction = Prediction(question, unit, id)
    if id in predictions and predictions[id].value is not None and predictions[id].unit == unit:
        prediction.field.value = f"{predictions[id].value:g}"
        prediction.commit(predictions[id].value)
    predictions[id] = prediction
    display(prediction.widget)
    return prediction


class Prediction:
    """A question and, once committed, the learner's answer.

    Attributes:
        value: the number in ``unit``; None until one is committed.
        field: the Text widget to type in.
        button: commits what is typed.
        message: an HTML widget that says what was committed, or what is wrong with it.
    """

    def __init__(self, question: str, unit: str, id: str) -> None:
        self.question, self.unit, self.id = question, unit, id
        self.value: float | None = None
        layout = {"width": "220px"}
        example = f"a number of {unit}" if unit else "a number"
        # Sent as a whole when the field is left: letter by letter, the last ones can arrive after
        # the click on the button.
        self.field = ipywidgets.Text(placeholder=example, layout=layout, continuous_update=False)
        self.field.tooltip = question  # its name for those who hear the page
        self.button = ipywidgets.Button(
            description="Commit my prediction", button_style="primary", layout=layout
        )
        self.message = ipywidgets.HTML()
        self.button.on_click(lambda _: self._commit_typed())
        self.widget = ipywidgets.VBox(
            [
                ipywidgets.HTML(f'<div style="{LINES}"><b>{html.escape(question)}</b></div>'),
                ipywidgets.HBox(
                    [self.field, ipywidgets.HTML(f"&nbsp;{html.escape(unit)}&nbsp;"), self.button],
                    layout={"flex_flow": "row wrap"},
                ),
                self.message,
            ]
        )

    def _ipython_display_(self) -> None:
        """Nothing: ``predict`` has shown it."""

    def commit(self, value: float) -> None:
        """Take ``value``, in ``unit``, as the prediction; a later one replaces it.

        Raises:
            InputError: it is not a finite number, or below zero where bytes are asked for.
        """
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InputError(f"a prediction must be a number, not {value!r}")
        if not math.isfinite(value) or (value < 0 and self.unit in BYTE_UNITS):
            allowed = "of at least 0" if self.unit in BYTE_UNITS else "that is finite"
            raise InputError(f"a prediction must be a number {allowed}, not {value!r}")
        self.value = float(value)
        self._tell(f"✔ You predict {self._text(self.value)}. You can still change your mind.")

    def _commit_typed(self) -> None:
        try:
            self.commit(parse_number(self.field.value, self.unit))
        except InputError as error:
            self._tell(f"✘ {error}")

    def outcome(self, actual: Run | float, *, source: str = "") -> Card:
        """Show the prediction beside what came out.

        Args:
            actual: a run (its peak counts), else bytes where ``unit`` is a unit of bytes, else
                the number itself.
            source: where the number comes from; that of a run is known.

        Returns:
            The card, already shown.

        Raises:
            InputError: ``actual`` is neither a run nor a finite number.
        """
        source = source or (actual.label if isinstance(actual, Run) else "found")
        number = actual.peak_bytes if isinstance(actual, Run) else actual
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            raise InputError(f"an outcome must be a run or a number, not {actual!r}")
        if not math.isfinite(number):
            raise InputError(f"an outcome must be a finite number, not {number!r}")
        found = number / BYTE_UNITS.get(self.unit, 1)
        result = f"{source[:1].upper()}{source[1:]}: {self._text(found)}."
        if isinstance(actual, Run) and actual.oom:
            result += " It ran out of memory there."
        if self.value is None:
            text = f"{result} You made no prediction; try the next one before you run the cell."
            return message_card(text, title="no prediction made")
        text = f"You predicted {self._text(self.value)}. {result} {_off_by(self.value, found)}"
        close = abs(self.value - found) <= 0.1 * abs(found)
        return message_card(text, title="your prediction", tone="good" if close else "note")

    def _text(self, value: float) -> str:
        if self.unit in BYTE_UNITS:
            return format_bytes(value * BYTE_UNITS[self.unit])
        return f"{value:,.4g} {self.unit}".strip()

    def _tell(self, text: str) -> None:
        self.message.value = f'<div role="status" style="{LINES}">{html.escape(text)}</div>'


def parse_number(text: str, unit: str = "") -> float:
    """The number that somebody typed: ``"3.5"``, ``"3,5"``, ``"300 MiB"``, ``"40 %"``.

    A unit of bytes is converted to ``unit`` where that is one, too.

    Raises:
        InputError: nothing typed, not a number, or another unit.
    """
    typed = text.strip()
    if not typed:
        raise InputError(f"type a number first, for example 2.5{f' {unit}' if unit else ''}")
    match = NUMBER.match(typed)
    if match and re.search(r",\d{3}$", match.group()):
        raise InputError(f"{typed[:40]!r} could be read in two ways; write 1500 or 1.5")
    if not match:
        raise InputError(f"{typed[:40]!r} is not a number; type one such as 2.5")
    value = float(match.group().replace(",", ".").replace("−", "-"))
    given = typed[match.end() :].strip()
    known = {name.lower(): size for name, size in BYTE_UNITS.items()}
    if given.lower() == unit.lower() or not given:
        return value
    if given.lower() in known and unit.lower() in known:
        return value * known[given.lower()] / known[unit.lower()]
    raise InputError(f"{typed[:40]!r} is not in {unit or 'plain numbers'}; type one such as 2.5")


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

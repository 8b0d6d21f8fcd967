"""What the interactive figures share: controls with a name, and a figure that they redraw.

Only the widgets that ipywidgets 7.7.1 and 8 share are used.
"""

from typing import Any

import ipywidgets
from IPython.display import display

from labkit.support.html_table import Rich


def named(control: Any, name: str, *, label_width: str, **layout: str) -> Any:
    """Give a control its name, which is read out, too, and its layout."""
    control.description = name
    control.style.description_width = label_width
    if isinstance(control, ipywidgets.SelectionSlider):
        control.continuous_update = False
        control.tooltip = name  # without one, ipywidgets 8 shows the word "null"
    for key, value in layout.items():
        setattr(control.layout, key, value)
    return control


class LiveFigure:
    """A static figure below the widgets that becomes a part of them as soon as it changes.

    Where nobody can click the static one remains. ``widget`` is empty before the first change.
    """

    def __init__(self) -> None:
        # As a block, or a wide table would keep the figure from shrinking with the window.
        self.widget = ipywidgets.HTML(layout={"display": "block", "overflow": "auto"})
        self._below: Any = None

    def show_below(self, figure: Rich) -> None:
        """Show the static figure."""
        self._below = display(figure, display_id=True)

    def replace(self, figure: Rich) -> None:
        """Show another figure, in the widget."""
        self.widget.value = figure.html
        if self._below is not None:
            self._below.update(Rich("", ""))
            self._below = None

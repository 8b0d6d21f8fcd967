"""What the tests of figures look at: the texts as they are drawn."""

import matplotlib as mpl

from gpumem.figures import drawing

HOSTILE = "<script>alert('x')</script> \"quoted\" $unclosed_math & a\nnew line"


def draw(figure):
    with mpl.rc_context(drawing.STYLE):
        figure.canvas.draw()


def ticks(axis):
    """The texts of an axis's ticks that are drawn."""
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def texts(figure):
    """Every visible text of a figure, drawn once so that all of them have a place."""
    draw(figure)
    undrawn = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            undrawn |= {tick.label1 for tick in axis.get_major_ticks()} - set(ticks(axis))
    return [
        text
        for text in figure.findobj(mpl.text.Text)
        if text.get_visible() and text.get_text().strip() and text not in undrawn
    ]


def words(figure):
    return " | ".join(text.get_text() for text in texts(figure))


def assert_fits(figure):
    """No text is cut off, and the legend overlaps neither the axes nor the title."""
    height = figure.get_figheight() * drawing.DPI
    for text in texts(figure):
        box = text.get_window_extent(figure.canvas.get_renderer())
        where = f"{text.get_text()!r} at {box}"
        assert box.x0 >= -0.5, where
        assert box.x1 <= drawing.WIDTH + 0.5, where
        assert box.y0 >= -0.5, where
        assert box.y1 <= height + 0.5, where
    for legend in figure.legends:
        box = legend.get_window_extent(figure.canvas.get_renderer())
        assert box.x1 <= drawing.WIDTH
        assert all(box.y0 >= axes.get_window_extent().y1 for axes in figure.axes)
        assert all(box.y1 <= text.get_window_extent().y0 + 2 for text in figure.texts)

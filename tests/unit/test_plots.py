"""Figures and their tables, drawn from runs made by hand."""

import html.parser
import subprocess
import sys
from dataclasses import replace

import matplotlib as mpl
import pytest
from fake_runs import (
    TraceBuilder,
    fake_run,
    out_of_memory,
    traced_run,
    training_trace,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.memory import GIB, MIB, Category, InputError, Phase, Trace, format_bytes
from labkit.show import picture, plots, tables, windows
from labkit.show.picture import COLOURS, DPI, HATCHES, WIDTH

CAPACITY = 14 * GIB
HOSTILE = "<script>alert('x')</script> \"quoted\" $unclosed_math & a\nnew line"


class Reader(html.parser.HTMLParser):
    """Collects tags with their attributes, and the text of each cell."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self._open = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = tag if tag in ("th", "td", "caption") else None
        if self._open:
            self.cells.append("")

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.cells[-1] += data

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def texts(figure):
    """Every visible text of a figure, drawn once so that all of them have a place."""
    with mpl.rc_context(picture.STYLE):
        figure.canvas.draw()
    undrawn = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            undrawn |= {
                tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high
            }
    return [
        text
        for text in figure.findobj(mpl.text.Text)
        if text.get_visible() and text.get_text().strip() and text not in undrawn
    ]


def words(figure):
    return " | ".join(text.get_text() for text in texts(figure))


def assert_nothing_clipped(figure):
    height = figure.get_figheight() * DPI
    for text in texts(figure):
        box = text.get_window_extent(figure.canvas.get_renderer())
        where = f"{text.get_text()!r} at {box}"
        assert box.x0 >= -0.5, where
        assert box.x1 <= WIDTH + 0.5, where
        assert box.y0 >= -0.5, where
        assert box.y1 <= height + 0.5, where


def assert_legend_free(figure):
    """The legend overlaps neither the axes nor the title."""
    (legend,) = figure.legends
    box = legend.get_window_extent(figure.canvas.get_renderer())
    for axes in figure.axes:
        assert box.y0 >= axes.get_window_extent().y1


def t4(name="step", gib=4.0, **fields):
    return fake_run(name, int(gib * GIB), capacity_bytes=CAPACITY, **fields)


# --- looks -------------------------------------------------------------------------------------


def test_every_category_has_its_own_colour_and_hatch():
    assert set(COLOURS) == set(HATCHES) == set(Category)
    assert len(set(COLOURS.values())) == len(set(HATCHES.values())) == len(Category)


def test_every_phase_has_a_colour():
    from labkit.show.timelines import PHASE_COLOURS

    assert set(PHASE_COLOURS) == set(Phase)


def test_drawing_leaves_the_learners_matplotlib_alone():
    code = (
        "import sys; sys.path.insert(0, 'tests/unit'); import matplotlib as mpl;"
        "state = lambda: {k: mpl.rcParams[k] for k in mpl.rcParams if k != 'backend'};"
        "before = state(); from fake_runs import traced_run;"
        "from labkit.show import plots; plots.draw_timeline(traced_run()).rich();"
        "assert state() == before; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("count", [1, 2, 5, 10])
def test_bars_of_one_to_ten_runs_fit_their_figure(count):
    runs = [t4("sweep", 0.5 * (i + 1), parameters={"batch_size": i + 1}) for i in range(count)]
    figure = plots.draw_bars(runs)
    assert_nothing_clipped(figure)
    assert_legend_free(figure)
    for run in runs:
        assert format_bytes(run.peak_bytes) in words(figure)


@pytest.mark.parametrize(
    "runs",
    [
        [t4("small", 0.0001), t4("huge", 13)],
        [t4("right at the line", 13.5), t4("reserved", 13, reserved_bytes=int(13.9 * GIB))],
        [t4("over", 30)],
        [fake_run("far below", GIB, capacity_bytes=140 * GIB)],
        [fake_run("nothing", 0, shares={Category.WEIGHTS: 0})],
        [t4("all", 9, shares=dict.fromkeys(Category, 1 / 7), reserved_bytes=10 * GIB)],
        [t4("a name that is much too long for the margin " * 5)],
        [t4("oom", 12, oom=out_of_memory(12 * GIB, 900 * GIB, CAPACITY))],
        [fake_run("one byte", 1, capacity_bytes=1 << 60)],
    ],
    ids=lambda runs: runs[0].name[:20],
)
def test_awkward_bars_fit_their_figure(runs):
    figure = plots.draw_bars(runs, title="A title that goes on " * 20)
    assert_nothing_clipped(figure)
    assert_legend_free(figure)


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 1 << 50), min_size=1, max_size=4),
    capacity=st.none() | st.integers(1, 1 << 50),
    name=st.text(st.characters(codec="ascii"), max_size=60),
)
def test_any_bars_fit_their_figure(sizes, capacity, name):
    runs = [fake_run(f"{name}{i}", n, capacity_bytes=capacity) for i, n in enumerate(sizes)]
    assert_nothing_clipped(plots.draw_bars(runs, title=name))


# --- bars --------------------------------------------------------------------------------------


def bar_patches(figure):
    (axes,) = figure.axes
    return [patch for patch in axes.patches if patch.get_width() > 0]


def test_segments_are_the_categories_in_order_and_to_scale():
    run = t4(gib=8)
    patches = bar_patches(plots.draw_bars(run))
    expected = [category for category in Category if run.by_category.get(category)]
    colours = [mpl.colors.to_hex(patch.get_facecolor()).upper() for patch in patches]
    assert colours == [COLOURS[category] for category in expected]
    assert [patch.get_width() for patch in patches] == [run.by_category[c] for c in expected]
    assert sum(patch.get_width() for patch in patches) == run.peak_bytes


def test_total_never_lies_on_the_capacity_line():
    runs = [t4(str(gib), gib) for gib in (3, 10, 11, 12, 13, 13.5, 13.9)]
    figure = plots.draw_bars(runs)
    drawn = texts(figure)
    (axes,) = figure.axes
    line = axes.transData.transform((CAPACITY, 0))[0]
    for run in runs:
        (total,) = [text for text in drawn if text.get_text() == format_bytes(run.peak_bytes)]
        box = total.get_window_extent(figure.canvas.get_renderer())
        assert not box.x0 <= line <= box.x1


def test_capacity_line_only_where_runs_share_one():
    shared, other = t4("a"), fake_run("b", GIB, capacity_bytes=20 * GIB)
    assert "can hold 14.0 GiB" in words(plots.draw_bars([shared, t4("c")]))
    assert "can hold" not in words(plots.draw_bars([shared, other]))
    assert "can hold" not in words(plots.draw_bars(shared, capacity=False))


def test_out_of_memory_shows_what_was_held_and_what_was_asked():
    run = t4("too big", 12, oom=out_of_memory(11 * GIB, 2 * GIB, CAPACITY))
    figure = plots.draw_bars([t4("fits"), run])
    assert "out of memory: 11.0 GiB\nheld, 2.00 GiB asked for" in words(figure)
    dashed = [patch for patch in bar_patches(figure) if patch.get_linestyle() == "--"]
    assert [(patch.get_x(), patch.get_width()) for patch in dashed] == [(11 * GIB, 2 * GIB)]
    assert "out of memory at 11.0 GiB" in figure.table.text
    assert "out of memory" in figure.alt


def test_out_of_memory_that_said_nothing_uses_the_peak():
    run = t4("too big", 12, oom=out_of_memory(0, 0, None))
    figure = plots.draw_bars(run)
    assert "out of memory: 12.0 GiB\nheld, more asked for" in words(figure)


def test_simulated_beside_measured_names_both():
    runs = [t4("step", 8), fake_run("step", 9 * GIB, mode="measured", device="NVIDIA H200")]
    figure = plots.draw_bars(runs, labels=["step", "step"])
    shown = [text.get_text() for text in texts(figure)]
    assert "simulated for NVIDIA T4 · measured on NVIDIA H200" in shown  # under the title
    assert "simulated for NVIDIA T4" in shown  # under the bar's name
    assert "measured on NVIDIA H200" in figure.table.text
    assert_nothing_clipped(figure)


def test_against_names_the_change():
    base, half, most = t4("base", 8), t4("half", 4), t4("most", 24)
    figure = plots.draw_bars([base, half, most], against=base)
    assert "4.00 GiB  (−50 %)" in words(figure)
    assert "24.0 GiB  (3 times)" in words(figure)
    assert "−50 %" in figure.table.text


def test_hostile_names_are_text():
    figure = plots.draw_bars(
        t4(HOSTILE, parameters={HOSTILE: HOSTILE}), title=HOSTILE, labels=[HOSTILE]
    )
    rich = figure.rich()
    reader = Reader(rich.html)
    assert not reader.named("script")
    (image,) = reader.named("img")
    assert HOSTILE in image["alt"]
    assert HOSTILE in reader.cells


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ([], {}, "no runs to show"),
        ([3], {}, "not 3"),
        ([t4()], {"labels": ["a", "b"]}, "labels must be 1 texts"),
        ([t4()], {"labels": "a"}, "labels must be 1 texts"),
    ],
)
def test_bars_refuses_with_a_sentence(runs, options, message):
    with pytest.raises(InputError, match=message):
        plots.draw_bars(runs, **options)


def test_showing_gives_picture_and_table_once(capsys):
    figure = plots.bars(t4())
    printed = capsys.readouterr().out
    assert printed.count("Peak memory and what it is made of; simulated for NVIDIA T4.") == 1
    assert isinstance(figure, mpl.figure.Figure)


def test_the_last_line_of_a_cell_does_not_show_it_again(monkeypatch, capsys):
    class Shell:
        execution_count = 7

    monkeypatch.setattr(picture, "get_ipython", Shell)
    figure = plots.bars(t4())
    capsys.readouterr()
    figure._ipython_display_()
    assert capsys.readouterr().out == ""
    Shell.execution_count = 8
    figure._ipython_display_()
    assert "Peak memory" in capsys.readouterr().out


# --- table -------------------------------------------------------------------------------------


def test_table_is_accessible_html_and_text():
    runs = [
        t4("step", 4, parameters={"batch_size": 4, "precision": "fp32"}, flops=10**12),
        t4("step", 2, parameters={"batch_size": 4, "precision": "bf16"}, step_seconds=(0.5,)),
    ]
    rich = tables.build_table(runs)
    reader = Reader(rich.html)
    assert len(reader.named("caption")) == 1
    scopes = [attrs["scope"] for attrs in reader.named("th")]
    assert scopes.count("row") == 2
    assert scopes.count("col") == scopes.index("row")
    assert all("text-align:right" in attrs["style"] for attrs in reader.named("td"))
    for text in ("precision fp32", "precision bf16", "4.00 GiB", "1 TFLOP", "500 ms"):
        assert text in reader.cells
        assert text in rich.text
    assert "simulated for NVIDIA T4" in reader.cells[0]


def test_table_shows_only_parameters_that_differ():
    runs = [t4(n, parameters={"batch_size": b, "seed": 0}) for n, b in (("a", 1), ("b", 2))]
    text = tables.build_table(runs).text
    assert "batch_size" in text
    assert "seed" not in text


def test_table_takes_columns_and_refuses_unknown_ones():
    rich = tables.build_table(t4(), columns=["activations", "peak", "batch_size"])
    assert rich.text.splitlines()[1].split() == ["run", "activations", "peak", "batch_size"]
    with pytest.raises(InputError, match="Did you mean 'activations'"):
        tables.build_table(t4(), columns=["activation"])


def test_equal_runs_are_told_apart():
    assert tables.run_labels([t4("a"), t4("a")]) == ["a", "a (2)"]
    runs = [t4("a", parameters={"b": 1}), t4("a", parameters={"b": 2}), t4("c", parameters={})]
    assert tables.run_labels(runs) == ["a, b 1", "a, b 2", "c"]


@pytest.mark.parametrize(
    ("value", "reference", "text"),
    [
        (50, 100, "−50 %"),
        (108, 100, "+8 %"),
        (100, 100, "same"),
        (310, 100, "3.1 times"),
        (5, 0, "from nothing"),
        (10_002, 10_000, "+0.02 %"),
        (10**9 + 1, 10**9, "almost the same"),
    ],
)
def test_change_text(value, reference, text):
    assert tables.change_text(value, reference) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234, "1.23 s"), (0.0456, "45.6 ms"), (7.89e-5, "78.9 µs"), (12345, "12,345 s")],
)
def test_seconds_text(seconds, text):
    assert tables.seconds_text(seconds) == text


# --- timeline ----------------------------------------------------------------------------------


def test_timeline_marks_the_peak_and_names_the_phases():
    run = traced_run()
    figure = plots.draw_timeline(run)
    shown = words(figure)
    assert f"peak {format_bytes(run.peak_bytes)}, step 2, backward" in shown
    for name in ("forward", "backward", "optimizer", "step 1", "step 2", "tracked on CPU"):
        assert name in shown
    assert_nothing_clipped(figure)
    assert_legend_free(figure)


def test_peak_text_is_inside_the_axes_and_off_the_data():
    run = traced_run()
    figure = plots.draw_timeline(run)
    (axes,) = figure.axes
    (peak,) = [text for text in texts(figure) if text.get_text().startswith("peak")]
    box, frame = peak.get_window_extent(figure.canvas.get_renderer()), axes.get_window_extent()
    assert frame.x0 <= box.x0
    assert box.x1 <= frame.x1
    assert box.y1 <= frame.y1
    assert box.y0 > axes.transData.transform((0, run.peak_bytes))[1]


def test_phase_table_holds_the_peak_of_each_phase():
    run = traced_run()
    rows = [line.split() for line in plots.draw_timeline(run).table.text.splitlines()]
    (step_2,) = [row for row in rows if row[:2] == ["step", "2"]]
    start, _ = run.trace.steps()[1]
    peak = run.trace.peak(start=start)
    assert format_bytes(peak.total_bytes).split() == step_2[-2:]


def test_steps_cuts_the_timeline():
    run = traced_run()
    figure = plots.draw_timeline(run, steps=1)
    start, stop = run.trace.steps()[0]
    (axes,) = figure.axes
    assert axes.get_xlim() == (start, stop)
    assert "step 2" not in words(figure)
    assert format_bytes(run.trace.peak(start=start, stop=stop).total_bytes) in words(figure)
    assert plots.draw_timeline(run, steps=(1, 2)).axes[0].get_xlim()[1] == len(run.trace.events)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (0, "from 1 to 2"),
        (3, "from 1 to 2"),
        ((2, 1), "in this order"),
        ((1, 2, 3), "first, last"),
        ("x", "whole number"),
    ],
)
def test_timeline_refuses_steps_it_does_not_have(steps, message):
    with pytest.raises(InputError, match=message):
        plots.draw_timeline(traced_run(), steps=steps)


def test_timeline_refuses_runs_without_a_trace_or_without_memory():
    with pytest.raises(InputError, match="no trace"):
        plots.draw_timeline(fake_run())
    with pytest.raises(InputError, match="allocated nothing"):
        plots.draw_timeline(traced_run(trace=Trace("cpu", (), ())))
    with pytest.raises(InputError, match="one run"):
        plots.draw_timeline([traced_run()])


def test_long_traces_are_thinned_without_losing_a_peak():
    log = TraceBuilder()
    log.hold(MIB, Category.WEIGHTS, Phase.SETUP)
    log.mark("step 1")
    for i in range(20_000):  # one spike of a single event among many small ones
        size = 512 * MIB if i == 7777 else 1024
        log.free(log.hold(size, Category.TEMPORARY, Phase.FORWARD), Phase.FORWARD)
    run = traced_run(trace=log.trace())
    _, whole, _ = windows.cut_out(run, None)
    thin = windows.thinned(whole)
    assert len(thin.at) < windows.THIN_ABOVE < len(whole.at)
    assert thin.totals.max() == whole.totals.max() == 513 * MIB
    assert thin.totals.min() == whole.totals.min()
    assert (thin.totals == sum(thin.bytes_by_category.values())).all()
    assert "513 MiB" in words(plots.draw_timeline(run))


def test_timeline_of_many_steps_keeps_its_table_short():
    run = traced_run(trace=training_trace(layers=4, steps=30))
    figure = plots.draw_timeline(run)
    assert_nothing_clipped(figure)
    assert "10 of 31 rows" in figure.table.text
    assert "step 25 " in plots.draw_timeline(run, steps=25).table.text


def test_timeline_shows_where_memory_ran_out():
    trace = training_trace(stop_early=True)
    live = trace.peak_bytes
    run = traced_run(
        trace=trace, capacity_bytes=400 * MIB, oom=out_of_memory(live, 200 * MIB, 400 * MIB)
    )
    figure = plots.draw_timeline(run)
    assert "out of memory here: asked for 200 MiB" in words(figure)
    assert "capacity 400 MiB" in words(figure)
    assert "out of memory" in figure.alt
    assert_nothing_clipped(figure)


def test_timeline_without_annotation_marks_nothing():
    assert "peak" not in words(plots.draw_timeline(traced_run(), annotate=False))


@pytest.mark.parametrize("events", [1, 2])
def test_timeline_of_next_to_nothing(events):
    log = TraceBuilder()
    for _ in range(events):
        log.hold(5, Category.TEMPORARY, Phase.OTHER)
    figure = plots.draw_timeline(traced_run(trace=log.trace()))
    assert_nothing_clipped(figure)
    assert f"peak {5 * events} B" in words(figure)


# --- lines -------------------------------------------------------------------------------------

SERIES = {
    "eager": {128: 200 * MIB, 1024: GIB, 8192: None},
    "SDPA": {128: 190 * MIB, 1024: 300 * MIB, 8192: GIB},
}


@pytest.mark.parametrize("log", [False, True])
def test_lines_fit_and_keep_gaps(log, capsys):
    figure = plots.lines(
        SERIES, "tokens", "peak memory", log=log, source="simulated for NVIDIA T4", limit=2 * GIB
    )
    assert_nothing_clipped(figure)
    assert_legend_free(figure)
    row = next(line for line in figure.table.text.splitlines() if line.strip().startswith("8,192"))
    assert row.split() == ["8,192", "–", "1.00", "GiB"]
    assert "simulated for NVIDIA T4" in words(figure)
    assert "capacity: 2.00 GiB" in words(figure)
    assert "Peak memory against tokens" in capsys.readouterr().out


def limit_of(figure):
    """The name of the limit, where its line stands, and the range of the y axis."""
    [axes] = figure.axes
    [text] = [text for text in axes.texts if "capacity" in text.get_text()]
    return text, axes.get_lines()[-1].get_ydata()[0], axes.get_ylim()


@pytest.mark.parametrize(
    ("limit", "left", "right", "side"),
    [
        (GIB, 1.1 * GIB, GIB / 8, "right"),  # the curve begins at the limit and leaves it
        (GIB, GIB / 8, 1.1 * GIB, "left"),
        (GIB, 1.01 * GIB, 1.01 * GIB, "left"),  # nowhere better than elsewhere
    ],
)
def test_a_limit_is_named_where_no_curve_is(limit, left, right, side, capsys):
    figure = plots.lines({"a": {1: left, 64: right}}, "GPUs", "bytes", log=True, limit=limit)
    assert_nothing_clipped(figure)
    assert limit_of(figure)[0].get_ha() == side


@pytest.mark.parametrize("limit", [2 * MIB, 80 * GIB])
def test_a_far_limit_is_inside_a_logarithmic_figure(limit, capsys):
    curve = {1: GIB / 4, 2: GIB / 2, 4: GIB}
    figure = plots.lines({"a": curve}, "batch", "bytes", log=True, limit=limit)
    _, at, (low, high) = limit_of(figure)
    assert low < at == limit < high
    assert_nothing_clipped(figure)
    assert_legend_free(figure)


def test_a_limit_of_nothing_has_no_place_on_a_logarithmic_axis(capsys):
    figure = plots.lines({"a": {1: 1, 2: 4}}, "x", "y", log=True, limit=0, write=str)
    assert "capacity" not in words(figure)


def test_lines_of_other_quantities(capsys):
    curve = {step: 3 / (step + 1) for step in range(200)}
    figure = plots.lines({"_loss $": curve}, "step", "loss", write=lambda y: f"{y:.3g}")
    assert_nothing_clipped(figure)
    assert "12 of 200 points" in figure.table.text
    assert "_loss $" in words(figure)  # matplotlib hides names that begin with "_"


def test_lines_named_after_categories_have_their_colours(capsys):
    figure = plots.lines({c: {1: 10, 2: 30} for c in Category}, "batch", "bytes")
    colours = [line.get_color() for line in figure.axes[0].get_lines()]
    assert colours == [COLOURS[category] for category in Category]
    assert_nothing_clipped(figure)


@pytest.mark.parametrize(
    ("series", "log", "message"),
    [
        ({}, False, "no points"),
        ({"a": {}}, False, "no points"),
        ({"a": {1: None}}, False, "no points"),
        ({"a": {0: 5}}, True, "log=False"),
    ],
)
def test_lines_refuses_with_a_sentence(series, log, message):
    with pytest.raises(InputError, match=message):
        plots.lines(series, "x", "y", log=log)


def test_an_argument_named_like_a_category_keeps_its_column():
    runs = [
        replace(traced_run(), name="same", parameters={"optimizer": name})
        for name in ("sgd", "adam")
    ]
    text = tables.build_table(runs).text
    assert "sgd" in text
    assert "adam" in text
    assert format_bytes(runs[0].by_category["optimizer"]) in text

"""Every figure: what is drawn is what was given, nothing is cut off, the table has every number."""

import math
import subprocess
import sys
from functools import partial

import matplotlib as mpl
import pytest
from bs4 import BeautifulSoup
from drawn import HOSTILE, assert_fits, draw, texts, ticks, words
from fake_runs import TraceBuilder, fake_run, out_of_memory, traced_run, training_trace

from gpumem.figures.bars import bars, draw_bars, draw_stacked_bars, stacked_bars
from gpumem.figures.drawing import AREAS, COLOURS, RESERVED
from gpumem.figures.timelines import PHASE_COLOURS, draw_timeline
from gpumem.inputs import InputError
from gpumem.trace import Category, Phase, Trace
from gpumem.units import GIB, MIB, format_bytes
from labkit.figures import batch_plans, lines, savings

CAPACITY = 14 * GIB


def t4(name="step", gib=4.0, **fields):
    return fake_run(name, int(gib * GIB), capacity_bytes=CAPACITY, **fields)


def cells(figure, row=0):
    """The cells of a row of the table, the first below the headings being row 0."""
    return [cell.strip() for cell in figure.table.text.splitlines()[3 + row].split("  ") if cell]


def test_every_category_has_its_own_colour_and_hatch_and_every_phase_a_colour():
    colours, hatches = zip(*(AREAS[category] for category in Category), strict=True)
    assert len(set(colours)) == len(set(hatches)) == len(Category)
    assert set(PHASE_COLOURS) == set(Phase)


@pytest.mark.nightly
def test_drawing_leaves_the_learners_matplotlib_alone():
    code = (
        "import sys; sys.path.insert(0, 'tests/unit'); import matplotlib as mpl;"
        "state = lambda: {k: mpl.rcParams[k] for k in mpl.rcParams if k != 'backend'};"
        "before = state(); from fake_runs import traced_run;"
        "from gpumem.figures import timelines; timelines.draw_timeline(traced_run()).rich();"
        "assert state() == before; assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


def test_a_figure_is_shown_once_with_its_table(capsys):
    figure = bars(t4())
    printed = capsys.readouterr().out
    assert printed.count("Peak memory and what it is made of; simulated for NVIDIA T4.") == 1
    figure._ipython_display_()  # as the last line of a cell
    assert capsys.readouterr().out == ""


def test_hostile_names_are_text():
    about = {"title": HOSTILE, "source": HOSTILE}
    figures = [
        draw_bars(t4(HOSTILE, parameters={HOSTILE: HOSTILE}), title=HOSTILE, labels=[HOSTILE]),
        lines({HOSTILE: {1: 2}}, HOSTILE, HOSTILE, **about),
        stacked_bars({HOSTILE: {HOSTILE: 1}}, **about),
    ]
    for figure in figures:
        assert_fits(figure)
        shown = BeautifulSoup(figure.rich().html, "html.parser")
        assert not shown("script")
        assert HOSTILE in shown.img["alt"]


def test_what_a_phantom_gave_has_a_mark_in_every_figure():
    phantom = t4("there is none", mode="phantom")
    traced = traced_run(mode="phantom", device=phantom.device)
    for figure in (draw_bars([phantom]), draw_timeline(traced)):
        assert f"◐ {phantom.label}" in words(figure)
    beside = words(draw_bars([phantom, t4()]))
    assert beside.count("◐") == 2  # where the numbers come from, and beside its bar
    assert "◐" not in words(draw_bars([t4()]))


# --- bars --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runs",
    [
        [t4("sweep", 0.5 * (i + 1), parameters={"batch_size": i + 1}) for i in range(10)],
        [t4("small", 0.0001), t4("huge", 13)],
        [t4("right at the line", 13.5), t4("reserved", 13, reserved_bytes=int(13.9 * GIB))],
        [fake_run("far below", GIB, capacity_bytes=140 * GIB)],
        [fake_run("nothing", 0, shares={Category.WEIGHTS: 0})],
        [t4("all", 9, shares=dict.fromkeys(Category, 1 / 7), reserved_bytes=10 * GIB)],
        [t4("a name that is much too long for the margin " * 5)],
        [t4("oom", 12, oom=out_of_memory(12 * GIB, 900 * GIB, CAPACITY))],
    ],
    ids=lambda runs: runs[0].name[:20],
)
def test_awkward_bars_fit_their_figure(runs):
    figure = draw_bars(runs, title="A title that goes on " * 20)
    assert_fits(figure)
    for run in runs:
        assert run.oom or format_bytes(run.peak_bytes) in words(figure)


def bar_patches(figure):
    [axes] = figure.axes
    return [patch for patch in axes.patches if patch.get_width() > 0]


def test_segments_are_the_categories_in_order_and_to_scale():
    run = t4(gib=8, reserved_bytes=9 * GIB)
    *patches, reserve = bar_patches(draw_bars(run))
    expected = [category for category in Category if run.by_category.get(category)]
    colours = [mpl.colors.to_hex(patch.get_facecolor()).upper() for patch in patches]
    assert colours == [COLOURS[category] for category in expected]
    assert [patch.get_width() for patch in patches] == [run.by_category[c] for c in expected]
    assert (reserve.get_x(), reserve.get_width()) == (run.peak_bytes, GIB)


def test_capacity_line_only_where_runs_share_one():
    shared, other = t4("a"), fake_run("b", GIB, capacity_bytes=20 * GIB)
    assert "can hold 14.0 GiB" in words(draw_bars([shared, t4("c")]))
    assert "can hold" not in words(draw_bars([shared, other]))
    assert "can hold" not in words(draw_bars(shared, capacity=False))


def test_out_of_memory_shows_what_was_held_and_what_was_asked():
    run = t4("too big", 12, oom=out_of_memory(11 * GIB, 2 * GIB, CAPACITY))
    figure = draw_bars([t4("fits"), run])
    assert "out of memory: 11.0 GiB\nheld, 2.00 GiB asked for" in words(figure)
    dashed = [patch for patch in bar_patches(figure) if patch.get_linestyle() == "--"]
    assert [(patch.get_x(), patch.get_width()) for patch in dashed] == [(11 * GIB, 2 * GIB)]
    assert "out of memory at 11.0 GiB" in figure.table.text
    assert "out of memory" in figure.alt
    silent = t4("too big", 12, oom=out_of_memory(0, 0, None))  # said nothing: the peak is shown
    assert "out of memory: 12.0 GiB\nheld, more asked for" in words(draw_bars(silent))


def test_simulated_beside_measured_names_both():
    runs = [t4("step", 8), fake_run("step", 9 * GIB, mode="measured", device="NVIDIA H200")]
    figure = draw_bars(runs, labels=["step", "step"])
    shown = [text.get_text() for text in texts(figure)]
    assert "simulated for NVIDIA T4 and measured on NVIDIA H200" in shown  # under the title
    assert "step\nsimulated for NVIDIA T4" in shown
    assert "measured on NVIDIA H200" in figure.table.text
    assert_fits(figure)


def test_against_names_the_change():
    base, half, most = t4("base", 8), t4("half", 4), t4("most", 24)
    figure = draw_bars([base, half, most], against=base)
    assert "4.00 GiB  (−50 %)" in words(figure)
    assert "24.0 GiB  (3 times)" in words(figure)
    assert "−50 %" in figure.table.text


def test_stacked_bars_are_to_scale_and_the_table_has_every_number():
    places = {"in memory": {"device": 3 << 30}, "on disk": {"device": 1 << 30, "disk": 2 << 30}}
    figure = stacked_bars(places, title="Bytes by place", source="made up")
    assert cells(figure, 0) == ["in memory", "3.00 GiB", "–", "3.00 GiB"]
    assert cells(figure, 1) == ["on disk", "1.00 GiB", "2.00 GiB", "3.00 GiB"]
    assert "Bytes by place; made up." in figure.table.text
    assert "on disk: device 1.00 GiB, disk 2.00 GiB, together 3.00 GiB" in figure.alt
    assert [bar.get_width() for bar in bar_patches(figure)] == [3 << 30, 1 << 30, 2 << 30]
    assert_fits(figure)


def test_what_is_reserved_is_drawn_and_does_not_count_in_the_sum():
    bar = {"weights": 2 * GIB, RESERVED: GIB, "activations": 3 * GIB}
    figure = draw_stacked_bars({"trace": bar}, title="x", limit=("NVIDIA T4", 4 * GIB))
    assert cells(figure) == ["trace", "2.00 GiB", "3.00 GiB", "5.00 GiB", "1.00 GiB"]
    assert "NVIDIA T4 can hold 4.00 GiB" in words(figure)
    assert "5.00 GiB\n6.00 GiB reserved" in words(figure)
    assert_fits(figure)


# --- timeline ----------------------------------------------------------------------------------


def test_timeline_marks_the_peak_and_names_the_phases():
    run = traced_run()
    figure = draw_timeline(run)
    shown = words(figure)
    marked = f"peak {format_bytes(run.peak_bytes)}"
    for name in (marked, "forward", "backward", "optimizer", "step 1", "step 2", "tracked on CPU"):
        assert name in shown
    assert_fits(figure)


def test_a_band_of_the_timeline_is_named():
    run = traced_run()
    named = f"gradients {format_bytes(run.highest_bytes('gradients'))}"
    assert named in words(draw_timeline(run, label="gradients"))
    assert named not in words(draw_timeline(run))


def test_steps_cuts_the_timeline_and_the_table():
    run = traced_run()
    figure = draw_timeline(run, steps=1)
    start, stop = run.trace.steps()[0]
    left, right = figure.axes[0].get_xlim()
    column = figure.axes[0].patches[-1]  # what the peak is made of stands right of the step
    assert (left, right) == (start, pytest.approx(stop + 2 * column.get_width()))
    assert (
        column.get_y() + column.get_height() == run.trace.peak(start=start, stop=stop).total_bytes
    )
    assert "step 2" not in words(figure)
    assert format_bytes(run.trace.peak(start=start, stop=stop).total_bytes) in words(figure)
    assert "step 2" not in figure.table.text  # a lesson asks for it next
    figure = draw_timeline(run)
    for number, (start, stop) in enumerate(run.trace.steps(), start=1):
        row = cells(figure, number)
        assert row[0] == f"step {number}"
        assert row[-1] == format_bytes(run.trace.peak(start=start, stop=stop).total_bytes)


def test_timeline_names_the_tensors_and_the_blocks_that_hold_them():
    of_tensors = traced_run().trace.step_peaks_bytes()
    allocated = tuple(size + 8 * MIB for size in of_tensors)
    run = traced_run(reserved_bytes=GIB, step_peaks_bytes=allocated)
    for step, figure in ((1, draw_timeline(run, steps=1)), (2, draw_timeline(run))):
        tensors, blocks = of_tensors[step - 1], allocated[step - 1]
        marked = f"peak {format_bytes(tensors)} of tensors\n({format_bytes(blocks)} allocated)"
        assert marked in words(figure)
        assert_fits(figure)


def test_two_timelines_have_one_scale():
    small = traced_run()
    log = TraceBuilder()
    log.begin_step()
    log.hold(4 * small.peak_bytes, Category.ACTIVATIONS, Phase.FORWARD)
    large = traced_run(trace=log.trace())
    figures = draw_timeline(large), draw_timeline(small, scale_of=large)
    tops = [figure.axes[0].get_ylim() for figure in figures]
    assert tops[0] == tops[1] != draw_timeline(small).axes[0].get_ylim()


def test_long_traces_are_thinned_without_losing_a_peak():
    log = TraceBuilder()
    log.hold(MIB, Category.WEIGHTS, Phase.SETUP)
    log.begin_step()
    for i in range(20_000):  # one spike of a single event among many small ones
        size = 512 * MIB if i == 7777 else 1024
        log.free(log.hold(size, Category.TEMPORARY, Phase.FORWARD), Phase.FORWARD)
    figure = draw_timeline(traced_run(trace=log.trace()))
    drawn = figure.axes[0].get_lines()[0].get_ydata()
    assert len(drawn) < 4000
    assert (min(drawn), max(drawn)) == (MIB, 513 * MIB)
    assert "peak 513 MiB" in words(figure)


def test_timeline_shows_where_memory_ran_out():
    trace = training_trace(stop_early=True)
    failure = out_of_memory(trace.peak_bytes, 200 * MIB, 400 * MIB)
    figure = draw_timeline(traced_run(trace=trace, capacity_bytes=400 * MIB, oom=failure))
    assert "out of memory here: asked for 200 MiB" in words(figure)
    assert "capacity 400 MiB" in words(figure)
    assert "out of memory" in figure.alt
    assert_fits(figure)
    simulated = traced_run(trace=trace, oom=failure, mode="simulated")  # it continues, and so do we
    assert f"out of memory on the way, in step {failure.step}: asked for 200 MiB" in words(
        draw_timeline(simulated)
    )


# --- lines -------------------------------------------------------------------------------------

SERIES = {
    "eager": {128: 200 * MIB, 1024: GIB, 8192: None},
    "SDPA": {128: 190 * MIB, 1024: 300 * MIB, 8192: GIB},
}


@pytest.mark.parametrize("log", [False, True])
def test_lines_fit_and_keep_gaps(log, capsys):
    figure = lines(
        SERIES, "tokens", "peak memory", log=log, source="simulated for NVIDIA T4", limit=2 * GIB
    )
    assert_fits(figure)
    assert cells(figure, 2) == ["8,192", "–", "1.00 GiB"]
    assert "simulated for NVIDIA T4" in words(figure)
    assert "capacity: 2.00 GiB" in words(figure)
    assert "1,024: eager 1.00 GiB, SDPA 300 MiB" in figure.alt
    assert "Peak memory against tokens" in capsys.readouterr().out
    assert math.isnan(figure.axes[0].get_lines()[0].get_ydata()[2])
    crosses = [at for each in figure.axes[0].collections for at in each.get_offsets().tolist()]
    assert crosses == [[8192, 2 * GIB]]  # where "eager" ran out of memory


def test_a_limit_is_drawn_where_it_has_a_place():
    curve = {1: GIB / 4, 2: GIB / 2, 4: GIB}
    for limit in (2 * MIB, 80 * GIB):  # however far, on a logarithmic axis
        [axes] = lines({"a": curve}, "batch", "bytes", log=True, limit=limit).axes
        low, high = axes.get_ylim()
        assert low < axes.get_lines()[-1].get_ydata()[0] == limit < high
    assert "capacity" not in words(lines({"a": curve}, "batch", "bytes", limit=80 * GIB))
    assert "capacity" not in words(lines({"a": {1: 1}}, "x", "y", log=True, limit=0, write=str))


def test_lines_of_other_quantities():
    curve = {step: 3 / (step + 1) for step in range(200)}
    figure = lines({"_loss $": curve}, "step", "loss", write=lambda y: f"{y:.3g}")
    assert_fits(figure)
    assert "12 of 200 points" in figure.table.text
    assert "_loss $" in words(figure)  # matplotlib hides names that begin with "_"


@pytest.mark.parametrize("spread", [1e-9, 1e-2, 1, 1e3])
def test_ticks_are_never_written_alike(spread):
    figure = lines({"a": {1: 2.0 * GIB, 2: 2.0 * GIB * (1 + spread)}}, "batch", "peak")
    draw(figure)
    shown = [text.get_text() for text in ticks(figure.axes[0].yaxis) if text.get_text()]
    assert len(shown) == len(set(shown)) < 12


# --- what no figure draws ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempt", "says"),
    [
        (partial(draw_bars, []), "no runs to show"),
        (partial(draw_bars, [3]), "not 3"),
        (partial(draw_bars, [t4()], labels=["a", "b"]), "labels must be 1 texts"),
        (partial(draw_timeline, traced_run(), steps=3), "from 1 to 2"),
        (partial(draw_timeline, fake_run()), "no trace"),
        (partial(draw_timeline, traced_run(trace=Trace("cpu", (), ()))), "allocated nothing"),
        (partial(draw_timeline, [traced_run()]), "one run"),
        (partial(lines, {"a": {1: None}}, "x", "y"), "no points"),
        (partial(lines, {"a": {0: 5}}, "x", "y", log=True), "log=False"),
        (partial(stacked_bars, {"a": {}}, title="x"), "nothing to draw"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_a_sentence(attempt, says):
    with pytest.raises(InputError, match=says):
        attempt()


def test_rows_stand_under_the_places_of_the_lines_they_describe():
    figure = lines({"a": {1: 5, 2: 6}}, "step", "bytes", under={"tokens": [704, 512]})
    [axes] = figure.axes
    figure.canvas.draw()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1\n704", "2\n512"]
    [names] = axes.texts
    assert (names.get_text(), axes.get_xlabel()) == ("step\ntokens", "")
    assert_fits(figure)


def test_a_title_that_is_not_given_says_what_came_out():
    small = fake_run("small", 6 * MIB, reserved_bytes=8 * MIB)
    large = fake_run("large", 7 * MIB, reserved_bytes=12 * MIB)
    assert "small: 8.00 MiB reserved, 33 % less than large" in words(draw_bars([large, small]))
    assert "large: 12.0 MiB reserved" in words(draw_bars(large))
    other = fake_run("other", 9 * MIB)  # nobody knows what it reserves: peaks are compared
    assert "large: 7.00 MiB at the peak, 22 % less than other" in words(draw_bars([large, other]))
    near = fake_run("near", 7 * MIB, reserved_bytes=12 * MIB + 1)
    assert "Each: 12.0 MiB reserved" in words(draw_bars([large, near]))
    assert "peak 7.00 MiB\n12.0 MiB reserved" in words(draw_bars(large))
    run = traced_run()
    shown = words(draw_timeline(run, name="it"))
    assert any(f"The peak is in {phase}, " in shown for phase in run.trace.timeline().phases)
    start, stop = run.trace.steps()[0]  # of one step, that step's peak
    line, peak = run.trace.timeline(), run.trace.peak(start=start, stop=stop)
    phase = line.phases[[*line.indices].index(peak.index)]
    assert f"The peak is in {phase}, " in words(draw_timeline(run, steps=1, name="it"))
    long = words(draw_bars(large, title="a title " * 37))
    assert 8 < long.count("a title") < 37
    assert "…" in long


# --- batches of texts --------------------------------------------------------------------------


def test_a_bar_is_a_batch_as_high_as_its_positions():
    plans = {"mixed": [[0, 3], [2, 1]], "limited": [[0, 1, 2], [3]]}
    runs = [t4("mixed", 8, reserved_bytes=9 * GIB), t4("limited", 4)]
    figure = batch_plans(runs, plans, lengths=[10, 20, 30, 100], title="Two plans")
    assert_fits(figure)
    filled, outline = figure.axes[0].patches[1], figure.axes[0].patches[2]
    assert [*filled.get_data().values] == [110, 50]
    assert [*outline.get_data().values] == [200, 60]
    mixed = ["mixed", "2", "38 %", "2 × 100", "2 × 30", "2 × 100", "8.00 GiB", "9.00 GiB"]
    assert cells(figure) == mixed
    # Of the batches, 3 × 30 and 1 × 100, the second is larger.
    assert "peak 4.00 GiB, 1 × 100" in words(figure)


# --- savings in two orders ---------------------------------------------------------------------


def stack(**gib):
    return {name: t4(name, amount) for name, amount in gib.items()}


def test_a_switch_has_a_bar_in_each_order_to_the_left_where_it_costs_memory():
    there = stack(plain=10, a=4, b=5)
    back = stack(plain=10, b=7, a=5)
    figure = savings({"there": there, "back": back})
    assert_fits(figure)
    assert "a saves 6.00 GiB there and only 2.00 GiB back" in words(figure)
    assert [bar.get_width() / GIB for bar in figure.axes[0].patches] == [6, -1, 2, 3]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b"]
    assert cells(figure, 1) == ["b", "costs 1.00 GiB", "saves 3.00 GiB"]


def test_the_title_of_savings_says_which_switch_depends_most_on_its_place():
    free = stack(plain=10, a=10, b=4)
    assert "b saves 6.00 GiB there and costs 1.00 GiB back" in words(
        savings({"there": free, "back": stack(plain=3, b=4, a=4)})
    )
    assert "Each" in words(savings({"there": free, "back": free}, title="Each"))
    failed = free | {"a": t4("a", oom=out_of_memory(5 * GIB, 9 * GIB, CAPACITY))}
    assert cells(savings({"there": failed, "back": free}))[:2] == ["a", "out of memory"]
    with pytest.raises(InputError):
        savings({"there": free})

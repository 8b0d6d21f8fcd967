"""The records: traces counted by hand, runs read back without trust, bytes written for people."""

import dataclasses
import itertools
import json
import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.memory import (
    GIB,
    KIB,
    MIB,
    MODES,
    Category,
    Event,
    InputError,
    Mark,
    OutOfMemory,
    Peak,
    Phase,
    Run,
    Storage,
    Trace,
    Work,
    format_bytes,
    one_of,
    positive_int,
)

C, P = Category, Phase


# --- event logs --------------------------------------------------------------------------------


def storage(nbytes=10, category=C.TEMPORARY, *, device="cpu", module="", name=""):
    return Storage(nbytes, category, device, "mm", module, name, P.OTHER, (nbytes,), "uint8")


@st.composite
def traces(draw):
    """A log as a run would write it: nothing is freed twice or before it is held."""
    events, storages, held = [], [], {}
    for _ in range(draw(st.integers(0, 40))):
        phase = draw(st.sampled_from(P))
        action = draw(st.sampled_from(["hold", "hold", "free", "resize"]))
        if action == "hold" or not held:
            nbytes = draw(st.integers(0, 100))
            path = draw(st.sampled_from(["", "a", "a.b", "a.c.d", "e"]))
            name = draw(st.sampled_from(["", "", "a.weight", "a.b.weight", "bias"]))
            device = draw(st.sampled_from(["cpu", "cpu", "cuda:0"]))
            category = draw(st.sampled_from(C))
            held[len(storages)] = nbytes
            storages.append(storage(nbytes, category, device=device, module=path, name=name))
            events.append(Event(len(storages) - 1, nbytes, phase))
            continue
        number = draw(st.sampled_from(sorted(held)))
        left = 0 if action == "free" else draw(st.integers(0, 100))
        events.append(Event(number, left - held[number], phase))
        held[number] = left
        if action == "free":
            del held[number]
    places = sorted(draw(st.lists(st.integers(0, len(events)), max_size=4)))
    marks = [Mark(at, f"step {number}") for number, at in enumerate(places, start=1)]
    marks += [Mark(at, "a remark") for at in places[:1]]
    return Trace("cpu", tuple(storages), tuple(events), tuple(marks))


def held_after(trace, index, device):
    """Bytes by storage number after event ``index``, from the definition."""
    held = Counter()
    for event in trace.events[: index + 1]:
        if trace.storages[event.storage].device == device:
            held[event.storage] += event.change_bytes
    return {number: nbytes for number, nbytes in held.items() if nbytes}


def totals(trace, device):
    """Live bytes before the first event and after each one."""
    return [sum(held_after(trace, i, device).values()) for i in range(-1, len(trace.events))]


def categories_after(trace, index, device):
    table = Counter()
    for number, nbytes in held_after(trace, index, device).items():
        table[trace.storages[number].category] += nbytes
    return dict(table)


@given(traces(), st.sampled_from(["cpu", "cuda:0", "meta"]))
def test_the_peak_is_the_largest_total_and_its_categories_sum_to_it(trace, device):
    peak = trace.peak(device)
    live = totals(trace, device)
    assert peak.total_bytes == max(live) == sum(peak.by_category.values())
    assert all(nbytes > 0 for nbytes in peak.by_category.values())
    if peak.total_bytes:
        assert live[peak.index + 1] == peak.total_bytes
        assert peak.by_category == categories_after(trace, peak.index, device)
        assert live.index(peak.total_bytes) == peak.index + 1  # the first time it was reached
    else:
        assert peak == Peak(-1, 0, {})


@given(traces(), st.data())
def test_the_peak_of_a_window_counts_what_was_live_before_it(trace, data):
    start = data.draw(st.integers(0, len(trace.events)))
    stop = data.draw(st.one_of(st.none(), st.integers(start, len(trace.events))))
    peak = trace.peak(start=start, stop=stop)
    end = len(trace.events) if stop is None else stop
    live = totals(trace, "cpu")[start : end + 1]  # before the window, then after each event
    assert peak.total_bytes == max(live) == sum(peak.by_category.values())
    if peak.total_bytes:
        assert start - 1 <= peak.index < max(end, 1)
        assert peak.by_category == categories_after(trace, peak.index, "cpu")


@given(traces())
def test_steps_follow_their_marks_and_leave_nothing_out(trace):
    ranges = trace.steps()
    marks = [mark.index for mark in trace.marks if mark.text != "a remark"]
    assert [start for start, _ in ranges] == marks
    if ranges:
        assert ranges[-1][1] == len(trace.events)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        whole = trace.peak(start=ranges[0][0]).total_bytes
        assert max(trace.peak(start=a, stop=b).total_bytes for a, b in ranges) == whole


@given(traces(), st.sampled_from(["cpu", "cuda:0"]), st.data())
def test_live_at_lists_what_is_held_the_largest_first(trace, device, data):
    index = data.draw(st.integers(-1, max(len(trace.events) - 1, 0)))
    alive = trace.live_at(index, device)
    sizes = [s.nbytes for s in alive]
    assert sizes == sorted(sizes, reverse=True)
    assert sorted(sizes) == sorted(held_after(trace, index, device).values())
    assert all(s.device == device for s in alive)


@given(traces(), st.sampled_from([None, 0, 1, 2]))
def test_by_module_adds_up_to_the_peak(trace, depth):
    table = trace.by_module(depth=depth)
    assert sum(table.values()) == trace.peak_bytes
    if depth is not None:
        assert all(len(path.split(".")) <= max(depth, 1) for path in table)
    assert list(table.values()) == sorted(table.values(), reverse=True)


@given(traces(), st.sampled_from(["cpu", "cuda:0"]))
def test_the_timeline_sums_to_the_totals_after_every_event(trace, device):
    line = trace.timeline(device)
    assert len(line.indices) == len(line.phases)
    assert all(len(row) == len(line.indices) for row in line.bytes_by_category.values())
    assert line.phases == tuple(trace.events[i].phase for i in line.indices)
    live = totals(trace, device)
    if line.bytes_by_category:
        assert line.totals() == tuple(live[i + 1] for i in line.indices)
    else:
        assert not any(live)


def test_by_module_uses_the_owner_of_a_named_storage():
    kept = storage(8, C.WEIGHTS, module="elsewhere", name="layers.0.weight")
    scratch = storage(4, module="layers.1.attention")
    events = (Event(0, 8, P.SETUP), Event(1, 4, P.FORWARD))
    trace = Trace("cpu", (kept, scratch), events)
    assert trace.by_module() == {"layers.0": 8, "layers.1.attention": 4}
    assert trace.by_module(depth=1) == {"layers": 12}
    assert trace.by_module(index=0) == {"layers.0": 8}


def test_the_devices_of_a_trace_begin_with_its_own():
    trace = Trace("cuda:0", (storage(device="cpu"), storage(device="cuda:0")), ())
    assert trace.devices == ("cuda:0", "cpu")


def test_a_trace_without_marks_has_no_steps():
    assert Trace("cpu", (storage(),), (Event(0, 10, P.OTHER),)).steps() == []


def test_flops_add_up_over_operators():
    trace = Trace("cpu", (), (), work={"mm": Work(2, 10, 5), "add": Work(1, 3, 4)})
    assert trace.flops == 13


# --- runs ---------------------------------------------------------------------------------------

OOM = OutOfMemory(
    requested_bytes=2 * MIB, live_bytes=3, capacity_bytes=5, by_category={"weights": 3}, step=2,
    phase="forward", module="layers.0", operator="mm",
)  # fmt: skip


def make_run(**changes):
    values = {
        "name": "experiment",
        "parameters": {"batch_size": 8, "precision": "fp32", "flag": True, "rate": 0.5, "x": None},
        "mode": "tracked",
        "device": "a CPU",
        "peak_bytes": 12,
        "by_category": {"weights": 8, "temporary": 4},
        "step_peaks_bytes": (11, 12),
        "reserved_bytes": 20,
        "capacity_bytes": 30,
        "host_bytes": 1,
        "losses": (2.0, 1.5),
        "step_seconds": (0.25,),
        "flops": 99,
        "moved_bytes": 7,
        "oom": OOM,
    }
    return Run(**{**values, **changes})


def record(**changes):
    return {**make_run().to_dict(), **changes}


@pytest.mark.parametrize("changes", [{}, {"oom": None}, {"reserved_bytes": None, "flops": None}])
def test_a_run_survives_json(changes):
    run = make_run(**changes)
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_the_trace_is_not_stored_and_not_compared():
    run = make_run(trace=Trace("cpu", (), ()))
    assert "trace" not in run.to_dict()
    assert Run.from_dict(run.to_dict()) == run
    assert Run.from_dict(run.to_dict()).trace is None


def test_category_keys_are_stored_as_text():
    run = make_run(peak_bytes=5, by_category={C.WEIGHTS: 5})
    assert json.dumps(run.to_dict()["by_category"]) == '{"weights": 5}'


def test_defaults_may_be_left_out():
    short = {
        "name": "x", "parameters": {}, "mode": "simulated", "device": "T4", "peak_bytes": 0,
        "by_category": {},
    }  # fmt: skip
    run = Run.from_dict(short)
    assert run == Run("x", {}, "simulated", "T4", 0, {})
    assert (run.fits, run.seconds_per_step, run.label) == (None, None, "simulated for T4")


BAD = [
    ("not a dict", "a run must be an object, not str"),
    (None, "a run must be an object, not NoneType"),
    ([], "a run must be an object, not list"),
    ({}, "a run needs the field 'by_category'"),
    (record(colour="red"), "a run has no field 'colour'"),
    (record(trace=None), "a run has no field 'trace'"),
    ({k: v for k, v in record().items() if k != "mode"}, "a run needs the field 'mode'"),
    (record(name=5), "name must be a text of at most 200 characters"),
    (record(name="x" * 201), "name must be a text of at most 200 characters"),
    (record(device=None), "device must be a text of at most 200 characters"),
    (record(mode="mesured"), "unknown mode 'mesured'. Did you mean 'measured'?"),
    (record(mode=None), "unknown mode None."),
    (record(parameters=[1]), "parameters must be an object"),
    (record(parameters={"batch_size": [8]}), "parameter 'batch_size' must be a plain value"),
    (record(peak_bytes=-1), "peak_bytes must be a whole number, not negative, not -1"),
    (record(peak_bytes=True), "peak_bytes must be a whole number, not negative, not True"),
    (record(peak_bytes=12.0), "peak_bytes must be a whole number, not negative, not 12.0"),
    (record(peak_bytes=1 << 80), "peak_bytes must be a whole number"),
    (record(host_bytes=None), "host_bytes must be a whole number"),
    (record(reserved_bytes="20"), "reserved_bytes must be a whole number, not negative, not '20'"),
    (record(capacity_bytes=-5), "capacity_bytes must be a whole number"),
    (record(flops=1.5), "flops must be a whole number"),
    (record(moved_bytes=math.nan), "moved_bytes must be a whole number"),
    (record(by_category=[("weights", 12)]), "by_category must be an object"),
    (record(by_category={"wieghts": 12}), "Did you mean 'weights'?"),
    (record(by_category={"weights": -12}), "by_category['weights'] must be a whole number"),
    (record(by_category={"weights": 8}), "the categories sum to 8 bytes, the peak is 12"),
    (record(step_peaks_bytes=5), "step_peaks_bytes must be a list"),
    (record(step_peaks_bytes="12"), "step_peaks_bytes must be a list"),
    (record(step_peaks_bytes=[1.5]), "step_peaks_bytes must hold numbers only"),
    (record(losses=["low"]), "losses must hold numbers only"),
    (record(losses=[True]), "losses must hold numbers only"),
    (record(losses=None), "losses must be a list"),
    (record(step_seconds=[-1.0]), "step_seconds must be finite and not negative"),
    (record(step_seconds=[math.inf]), "step_seconds must be finite and not negative"),
    (record(step_seconds=[10**400]), "step_seconds must be finite and not negative"),
    (record(step_seconds=[math.nan]), "step_seconds must be finite and not negative"),
    (record(oom="yes"), "oom must be an object with the fields by_category, capacity_bytes, live"),
    (record(oom={}), "oom must be an object with the fields"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_a_broken_run_is_refused_with_the_reason(value, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Run.from_dict(value)


BAD_OOM = [
    ({"step": -1}, "oom.step must be a whole number, not negative, not -1"),
    ({"requested_bytes": 0.5}, "oom.requested_bytes must be a whole number"),
    ({"capacity_bytes": "5"}, "oom.capacity_bytes must be a whole number"),
    ({"live_bytes": 4}, "the categories sum to 3 bytes, the peak is 4"),
    ({"by_category": None}, "by_category must be an object"),
    ({"phase": 1}, "oom.phase must be text"),
    ({"module": None}, "oom.module must be text"),
    ({"operator": b"mm"}, "oom.operator must be text"),
    ({"extra": 1}, "oom must be an object with the fields"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_OOM)
def test_a_broken_oom_is_refused_with_the_reason(changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Run.from_dict(record(oom={**dataclasses.asdict(OOM), **changes}))


def test_what_one_of_forgives_is_written_the_one_way_afterwards():
    run = Run.from_dict(record(mode="Tracked", by_category={"Weights": 8, "TEMPORARY": 4}))
    assert run.label == "tracked on a CPU"
    assert run.bytes_of("weights") == 8


NUMBERS = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.integers(-3, 3), st.just(10**400), st.just(12)
)
PLAIN = st.one_of(st.none(), NUMBERS, st.text(max_size=5), st.sampled_from([*C, *MODES]))
KEYS = st.one_of(st.text(max_size=5), st.integers(), st.none(), st.sampled_from(C))
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=6,
)
RUN_FIELDS = [f.name for f in dataclasses.fields(Run)]
OOM_FIELDS = [f.name for f in dataclasses.fields(OutOfMemory)]


def run_or_refusal(value):
    try:
        run = Run.from_dict(value)
    except InputError:
        return
    assert isinstance(run, Run)
    assert run.label
    assert run.fits in (True, False, None)
    assert sum(run.bytes_of(category) for category in C) == run.peak_bytes
    if run.oom is not None:
        assert str(run.oom)
    assert Run.from_dict(run.to_dict()).peak_bytes == run.peak_bytes


@given(ANYTHING)
def test_anything_at_all_is_a_run_or_refused(value):
    run_or_refusal(value)


@given(st.dictionaries(st.sampled_from(RUN_FIELDS), ANYTHING, max_size=3))
def test_a_run_with_any_fields_replaced_is_a_run_or_refused(changes):
    run_or_refusal(record(**changes))


@given(st.dictionaries(st.sampled_from(OOM_FIELDS), ANYTHING, max_size=2))
def test_an_oom_with_any_fields_replaced_is_a_run_or_refused(changes):
    run_or_refusal(record(oom={**dataclasses.asdict(OOM), **changes}))


# --- what a run says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"oom": OOM, "capacity_bytes": 10**9}, False),
        ({"oom": None, "capacity_bytes": None}, None),
        ({"oom": None, "capacity_bytes": 20, "reserved_bytes": 20}, True),
        ({"oom": None, "capacity_bytes": 19, "reserved_bytes": 20}, False),
        ({"oom": None, "capacity_bytes": 12, "reserved_bytes": None}, True),
        ({"oom": None, "capacity_bytes": 11, "reserved_bytes": None}, False),
    ],
)
def test_fits(changes, fits):
    assert make_run(**changes).fits is fits


@pytest.mark.parametrize(
    ("seconds", "median"), [((), None), ((3.0,), 3.0), ((3.0, 1.0, 2.0), 2.0), ((1.0, 4.0), 2.5)]
)
def test_seconds_per_step_is_the_median(seconds, median):
    assert make_run(step_seconds=seconds).seconds_per_step == median


def test_labels_bytes_and_names():
    assert make_run(mode="measured", device="H200").label == "measured on H200"
    assert make_run(mode="simulated", device="T4").label == "simulated for T4"
    run = make_run()
    assert (run.bytes_of("weights"), run.bytes_of("gradients")) == (8, 0)
    assert run.named("other") == dataclasses.replace(run, name="other")
    with pytest.raises(InputError, match=r"unknown category 'weigths'.*'weights'"):
        run.bytes_of("weigths")


def test_an_oom_says_what_was_asked_where_and_when():
    assert str(dataclasses.replace(OOM, live_bytes=3 * MIB, capacity_bytes=4 * MIB)) == (
        "out of memory: asked for 2.00 MiB with 3.00 MiB of 4.00 MiB in use "
        "(step 2, forward in layers.0)"
    )
    early = dataclasses.replace(OOM, step=0, requested_bytes=0, capacity_bytes=None, module="")
    assert (
        str(early) == "out of memory: asked for more memory with 3 B in use (before the first step)"
    )


# --- bytes for people ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (512, "512 B"),
        (KIB - 1, "1023 B"),
        (KIB, "1.00 KiB"),
        (212 * MIB, "212 MiB"),
        (MIB - 1, "1.00 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (80 * GIB, "80.0 GiB"),
        (1 << 41, "2.00 TiB"),
        (-MIB, "-1.00 MiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


@given(st.integers(-(1 << 60), 1 << 60).filter(bool))
def test_something_other_than_zero_always_shows(nbytes):
    text = format_bytes(nbytes)
    number, unit = text.split()
    assert float(number) != 0
    scale = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}[unit]
    assert float(number) * scale == pytest.approx(nbytes, rel=0.006)
    assert len(re.sub(r"\D", "", number)) <= 4 or unit == "TiB"


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["amp-fp16", "AMP-FP16", "amp_fp16", "Amp_Fp16"])
def test_one_of_forgives_capitals_and_underscores(value):
    assert one_of(value, ["fp32", "amp-fp16"], "precision") == "amp-fp16"


def test_one_of_gives_the_choice_as_it_is_known():
    assert one_of("batch-size", ["batch_size"], "argument") == "batch_size"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fp23", "unknown precision 'fp23'. Did you mean 'fp32'? Known: fp32, amp-fp16."),
        ("zzz", "unknown precision 'zzz'. Known: fp32, amp-fp16."),
        (None, "unknown precision None. Known: fp32, amp-fp16."),
        (32, "unknown precision 32."),
    ],
)
def test_one_of_names_the_value_the_nearest_and_all(value, message):
    with pytest.raises(InputError, match=re.escape(message)):
        one_of(value, ["fp32", "amp-fp16"], "precision")


@pytest.mark.parametrize("value", [1, 2**31, np.int64(7)])
def test_positive_int_takes_whole_numbers(value):
    assert positive_int(value, "steps") == value
    assert type(positive_int(value, "steps")) is int


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "steps must be from 1 to 2147483648, not 0"),
        (-1, "steps must be from 1 to 2147483648, not -1"),
        (2**31 + 1, "steps must be from 1 to 2147483648, not 2147483649"),
        ("x", "steps must be a whole number of at least 1, not 'x'"),
        ("8", "steps must be a whole number of at least 1, not '8'"),
        (8.0, "steps must be a whole number of at least 1, not 8.0"),
        (True, "steps must be a whole number of at least 1, not True"),
        (None, "steps must be a whole number of at least 1, not None"),
        (math.nan, "steps must be a whole number of at least 1, not nan"),
    ],
)
def test_positive_int_names_what_it_refuses(value, message):
    with pytest.raises(InputError, match=re.escape(message)):
        positive_int(value, "steps")


def test_positive_int_can_have_another_limit():
    assert positive_int(4, "jobs", most=4) == 4
    with pytest.raises(InputError, match="jobs must be from 1 to 4, not 5"):
        positive_int(5, "jobs", most=4)


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["long", "negative"])
def test_a_number_too_long_to_write_is_refused_in_a_sentence(value):
    for refuse in (lambda: positive_int(value, "steps"), lambda: one_of(value, ["a"], "kind")):
        with pytest.raises(InputError, match="more than thirty digits"):
            refuse()


def test_a_long_value_is_cut_in_the_message():
    for refuse in (lambda v: one_of(v, ["a"], "kind"), lambda v: positive_int(v, "steps")):
        with pytest.raises(InputError) as caught:
            refuse("x" * 100_000)
        assert len(str(caught.value)) < 300

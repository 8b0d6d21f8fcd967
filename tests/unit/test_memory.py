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

from gpumem.inputs import InputError, one_of, positive_int
from gpumem.runs import OutOfMemory, Run
from gpumem.trace import Category, Event, Peak, Phase, Storage, Trace, Work
from gpumem.units import GIB, KIB, MIB, format_bytes

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
    step_starts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=4)))
    return Trace("cpu", tuple(storages), tuple(events), tuple(step_starts))


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


@given(traces(), st.data(), st.sampled_from(["cpu", "cuda:0", "meta"]))
def test_a_peak_is_the_largest_total_and_its_categories_sum_to_it(trace, data, device):
    start = data.draw(st.integers(0, len(trace.events)))
    stop = data.draw(st.one_of(st.none(), st.integers(start, len(trace.events))))
    peak = trace.peak(device, start=start, stop=stop)
    end = len(trace.events) if stop is None else stop
    live = totals(trace, device)[start : end + 1]  # before the window, then after each event
    assert peak.total_bytes == max(live) == sum(peak.by_category.values())
    assert all(nbytes > 0 for nbytes in peak.by_category.values())
    if peak.total_bytes:
        assert start - 1 <= peak.index < max(end, 1)
        assert peak.by_category == categories_after(trace, peak.index, device)
        if start == 0:
            assert live.index(peak.total_bytes) == peak.index + 1  # the first time it was reached
    elif start == 0:
        assert peak == Peak(-1, 0, {})


@given(traces())
def test_steps_leave_nothing_out(trace):
    ranges = trace.steps()
    assert tuple(start for start, _ in ranges) == trace.step_starts
    if ranges:
        assert ranges[-1][1] == len(trace.events)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert max(trace.step_peaks_bytes()) == trace.peak(start=ranges[0][0]).total_bytes
    for index in range(len(trace.events)):
        found = [n for n, (start, stop) in enumerate(ranges, 1) if start <= index < stop]
        assert trace.step_at(index) == (found[0] if found else 0)


@given(traces(), st.sampled_from(["cpu", "cuda:0"]))
def test_what_is_live_after_every_event(trace, device):
    line = trace.timeline(device)
    changed = [i for i, e in enumerate(trace.events) if trace.storages[e.storage].device == device]
    assert line.indices == tuple(changed)
    assert line.phases == tuple(trace.events[i].phase for i in changed)
    for place, index in enumerate(changed):
        held = {category: row[place] for category, row in line.bytes_by_category.items()}
        assert {c: nbytes for c, nbytes in held.items() if nbytes} == categories_after(
            trace, index, device
        )
        alive = trace.live_at(index, device)
        sizes = [s.nbytes for s in alive]
        assert sizes == sorted(held_after(trace, index, device).values(), reverse=True)
        assert all(s.device == device for s in alive)


def test_work_adds_up_and_extrapolates():
    storages = storage(device="cpu"), storage(device="cuda:0")
    trace = Trace("cuda:0", storages, (), work={"mm": Work(2, 10, 5), "add": Work(1, 3, 4)})
    assert (trace.flops, trace.devices) == (13, ("cuda:0", "cpu"))  # its own comes first
    shallow, deeper = Work(2, 10, 5, 1), Work(3, 14, 8, 1)
    assert deeper + (deeper - shallow) * 3 == Work(6, 26, 17, 1)


# --- runs ---------------------------------------------------------------------------------------

OOM = OutOfMemory(
    requested_bytes=2 * MIB,
    live_bytes=3,
    capacity_bytes=5,
    by_category={"weights": 3},
    step=2,
    phase="forward",
    module="layers.0",
    operator="mm",
)
RUN = Run(
    name="experiment",
    parameters={"batch_size": 8, "precision": "fp32", "flag": True, "rate": 0.5, "x": None},
    mode="tracked",
    device="a CPU",
    peak_bytes=12,
    by_category={"weights": 8, "temporary": 4},
    step_peaks_bytes=(11, 12),
    reserved_bytes=20,
    capacity_bytes=30,
    host_bytes=1,
    losses=(2.0, 1.5),
    step_seconds=(0.25,),
    flops=99,
    moved_bytes=7,
    oom=OOM,
)


def make_run(**changes):
    return dataclasses.replace(RUN, **changes)


def record(**changes):
    return {**make_run().to_dict(), **changes}


@pytest.mark.parametrize("changes", [{}, {"oom": None, "reserved_bytes": None, "flops": None}])
def test_a_run_survives_json_without_its_trace(changes):
    run = make_run(**changes)
    stored = json.dumps(dataclasses.replace(run, trace=Trace("cpu", (), ())).to_dict())
    assert Run.from_dict(json.loads(stored)) == run
    assert Run.from_dict(json.loads(stored)).trace is None


BAD = [
    ("not a dict", "run: Expected `object`, got `str`"),
    ({}, "run: Object missing required field `name`"),
    (record(colour="red"), "run has no field 'colour'"),
    (record(trace=None), "run has no field 'trace'"),
    (record(mode="mesured"), "run: Invalid enum value 'mesured' - at `$.mode`"),
    (record(parameters={"batch_size": 10**30}), "at `$.parameters[...]`"),
    (record(peak_bytes=-1), "run: Expected `int` >= 0 - at `$.peak_bytes`"),
    (record(by_category={"weights": 8}), "the categories sum to 8 bytes, not to 12"),
    (record(step_seconds=[math.inf]), "at `$.step_seconds[0]`"),
    (record(oom={**dataclasses.asdict(OOM), "live_bytes": 4}), "sum to 3 bytes, not to 4"),
]


@pytest.mark.parametrize(("value", "message"), BAD)
def test_a_broken_run_is_refused_with_the_reason(value, message):
    with pytest.raises(InputError, match=re.escape(message)):
        Run.from_dict(value)


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


def test_labels_bytes_and_names():
    assert make_run(mode="measured", device="H200").label == "measured on H200"
    assert make_run(mode="simulated", device="T4").label == "simulated for T4"
    run = make_run()
    assert (run.bytes_of("weights"), run.bytes_of("gradients")) == (8, 0)
    assert make_run(step_seconds=(1.0, 4.0, 2.0)).seconds_per_step == 2.0
    assert make_run(step_seconds=()).seconds_per_step is None
    assert run.named("other") == dataclasses.replace(run, name="other")
    with pytest.raises(InputError, match=r"unknown category 'weigths'.*'weights'"):
        run.bytes_of("weigths")


def test_an_oom_says_what_was_asked_where_and_when():
    assert str(dataclasses.replace(OOM, live_bytes=3 * MIB, capacity_bytes=4 * MIB)) == (
        "out of memory: asked for 2.00 MiB with 3.00 MiB of 4.00 MiB in use "
        "(step 2, forward in layers.0)"
    )
    reserved = dataclasses.replace(OOM, capacity_bytes=4 * MIB, reserved_bytes=3 * MIB)
    assert str(reserved) == (
        "out of memory: asked for 2.00 MiB with 3.00 MiB of 4.00 MiB reserved, 3 B of that in use "
        "(step 2, forward in layers.0)"
    )
    early = dataclasses.replace(OOM, step=0, requested_bytes=0, capacity_bytes=None, module="")
    assert (
        str(early) == "out of memory: asked for more memory with 3 B in use (before the first step)"
    )


# --- bytes for people ---------------------------------------------------------------------------


def test_format_bytes():
    assert format_bytes(0) == "0 B"
    assert format_bytes(KIB - 1) == "1023 B"
    assert format_bytes(KIB) == "1.00 KiB"
    assert format_bytes(MIB - 1) == "1.00 MiB"
    assert format_bytes(212 * MIB) == "212 MiB"
    assert format_bytes(80 * GIB) == "80.0 GiB"
    assert format_bytes(1 << 41) == "2.00 TiB"
    assert format_bytes(-MIB) == "-1.00 MiB"


@given(st.integers(-(1 << 60), 1 << 60).filter(bool))
def test_something_other_than_zero_always_shows(nbytes):
    text = format_bytes(nbytes)
    number, unit = text.split()
    assert float(number) != 0
    scale = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}[unit]
    assert float(number) * scale == pytest.approx(nbytes, rel=0.006)
    assert len(re.sub(r"\D", "", number)) <= 4 or unit == "TiB"


# --- bad input ----------------------------------------------------------------------------------


def test_one_of_ignores_case_and_names_the_nearest_and_all():
    known = ["fp32", "amp-fp16"]
    assert one_of("Amp_Fp16", known, "precision") == "amp-fp16"
    for value, message in (
        ("fp23", "unknown precision 'fp23'. Did you mean 'fp32'? Known: fp32, amp-fp16."),
        (None, "unknown precision None. Known: fp32, amp-fp16."),
        (10**5000, "unknown precision a int that cannot be written out."),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            one_of(value, known, "precision")


def test_positive_int_takes_whole_numbers_only():
    for value in (1, 2**31, np.int64(7)):
        assert type(positive_int(value, "steps")) is int
    for value in (0, 2**31 + 1, -(10**5000)):
        with pytest.raises(InputError, match="steps must be from 1 to 2147483648, not"):
            positive_int(value, "steps")
    for value in ("8" * 100_000, 8.0, True, None):
        with pytest.raises(InputError, match="must be a whole number of at least 1") as caught:
            positive_int(value, "steps")
        assert len(str(caught.value)) < 300
    with pytest.raises(InputError, match="jobs must be from 1 to 4, not 5"):
        positive_int(5, "jobs", most=4)

"""Claims: every entry can be judged, verdicts follow the rule, and judging never raises."""

import json
import math
import types
from fractions import Fraction

import pytest
import torch
from bs4 import BeautifulSoup
from hypothesis import given
from hypothesis import strategies as st
from lesson_files import result

from gpumem.hardware import this_machine
from gpumem.inputs import InputError
from labkit.lesson import claims, results, session
from labkit.lesson.claims import Verdict, format_found, format_value

GPU_MODE = "measured on NVIDIA T4"


class Hostile:
    def item(self):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")


# --- the file ------------------------------------------------------------------------------


def test_all_claims_are_there_and_their_texts_read_as_sentences():
    assert len(claims.all_claims()) == 61
    assert len({claim.lesson for claim in claims.all_claims().values()}) == 22
    assert [claim.id for claim in claims.of_lesson("05")] == ["bf16-halves", "bf16-no-scaler"]
    for claim in claims.all_claims().values():
        assert claim.says[0].isupper() or claim.says[0].isdigit(), claim.id
        assert claim.says.endswith("."), claim.id
        assert len(claim.says) < 200, claim.id
        assert not claim.assumptions or claim.assumptions.endswith("."), claim.id
        assert all("“" in title for title in claim.cited), claim.id


def test_every_claim_has_a_rule_to_judge_it_by():
    for claim in claims.all_claims().values():
        below = -math.inf if claim.wrong_below is None else claim.wrong_below
        above = math.inf if claim.wrong_above is None else claim.wrong_above
        if claim.unit == "yes_no":
            assert claim.expected is not None, claim.id
            assert (claim.supported, below, above) == (None, -math.inf, math.inf), claim.id
        else:
            assert claim.expected is None, claim.id
            assert below <= claim.supported[0] <= claim.supported[1] <= above, claim.id
        assert claim.rule.startswith("Supported"), claim.id


def test_an_unknown_claim_names_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'ckpt-40'"):
        claims.judge("ckpt-4", 0.4)


# --- verdicts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "value", "verdict"),
    [
        ("ckpt-40", 0.40, Verdict.SUPPORTED),
        ("ckpt-40", Fraction(36, 100), Verdict.SUPPORTED),
        ("ckpt-40", torch.tensor([0.44]), Verdict.SUPPORTED),
        ("ckpt-40", torch.tensor(0.4).numpy(), Verdict.SUPPORTED),
        ("ckpt-40", 0.35, Verdict.OVERSTATED),
        ("ckpt-40", 0.60, Verdict.UNDERSTATED),
        ("ckpt-40", 0.04, Verdict.WRONG),
        ("accum-constant-memory", 1.2, Verdict.OVERSTATED),  # it promises little
        ("accum-constant-memory", 0.9, Verdict.UNDERSTATED),
        ("sharding-linear", 1.34, Verdict.OVERSTATED),
        ("sharding-linear", 1.0, Verdict.SUPPORTED),
        ("sharding-linear", 2.1, Verdict.WRONG),
        ("adam-8b", 8.0, Verdict.SUPPORTED),
        ("adam-8b", 9.0, Verdict.UNDERSTATED),  # a figure, too small
        ("adam-8b", 20, Verdict.WRONG),
        ("amp-accuracy", 0, Verdict.SUPPORTED),
        ("grads-freed-after-step", torch.tensor(True), Verdict.SUPPORTED),
        ("grads-freed-after-step", False, Verdict.WRONG),
    ],
)
def test_the_rule_decides(id, value, verdict):
    judgement = claims.judge(id, value)
    assert judgement.verdict == verdict
    assert judgement.measured == pytest.approx(float(value))
    assert len(judgement.reasons) == 1


def test_conditions_that_differ_depend():
    judgement = claims.judge("ckpt-40", {"batch 1": 0.01, "batch 8": 0.42, 16: 0.6})
    assert judgement.verdict == Verdict.DEPENDS
    assert list(judgement.by_condition.values()) == ["wrong", "supported", "understated"]
    assert judgement.measured == {"batch 1": 0.01, "batch 8": 0.42, "16": 0.6}
    assert judgement.reasons[1] == "batch 8: 42 % agrees with the claim."
    judgement = claims.judge("ckpt-40", {"batch 1": None, "batch 8": 0.4})
    assert judgement.verdict == Verdict.SUPPORTED
    assert judgement.by_condition["batch 1"] == Verdict.NOT_TESTABLE


def test_conditions_that_all_fall_short_do_not_depend():
    judgement = claims.judge("ckpt-40", {"batch 1": 0.01, "batch 8": 0.3})
    assert judgement.verdict == Verdict.OVERSTATED
    assert list(judgement.by_condition.values()) == ["wrong", "overstated"]
    judgement = claims.judge("sharding-linear", {"4": 1.34, "8": 2.5})
    assert judgement.verdict == Verdict.OVERSTATED
    between = {"batch 1": 0.01, "batch 8": 0.3, "batch 16": 0.6}  # some batch agrees
    assert claims.judge("ckpt-40", between).verdict == Verdict.DEPENDS


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "not measured"),
        (math.nan, "nan is not a finite"),
        (10**400, "OverflowError"),
        ("forty", "'forty' is not a number"),
        (True, "asks for a number"),
        (torch.zeros(3), "is not a number"),
        ({}, "No condition"),
        pytest.param(10**5000, "is not a number", id="long"),
        pytest.param(Hostile(), "is not a number", id="hostile"),
    ],
)
def test_what_cannot_be_judged_is_said(value, reason):
    judgement = claims.judge("ckpt-40", value)
    assert judgement.verdict == Verdict.NOT_TESTABLE
    assert reason in judgement.reasons[0]


@pytest.mark.parametrize("mode", [None, "simulated for NVIDIA T4", "tracked on CPU"])
def test_a_claim_about_gpus_takes_only_measured_values(mode):
    judgement = claims.judge("ckpt-20-30-slower", 0.25, mode)
    assert judgement.verdict == Verdict.NOT_TESTABLE
    assert judgement.measured is None
    assert (mode is None) or mode in judgement.reasons[0]
    assert claims.judge("ckpt-20-30-slower", 0.25, GPU_MODE).verdict == Verdict.SUPPORTED


plain = st.none, st.booleans, st.integers, st.floats, st.text, st.binary, st.complex_numbers
anything = st.one_of(
    *(kind() for kind in plain), st.builds(Hostile), st.lists(st.integers()), st.just(float)
)


@given(
    st.sampled_from(sorted(claims.all_claims())),
    st.one_of(anything, st.dictionaries(st.one_of(st.text(), st.integers()), anything)),
)
def test_judging_never_raises(id, measured):
    judgement = claims.judge(id, measured, GPU_MODE)
    assert judgement.verdict in set(Verdict)
    assert all(len(reason) < 300 for reason in judgement.reasons)
    json.dumps(session.judgement_record(judgement), allow_nan=False)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.129, "share", "12.9 %"),
        (-0.05, "share", "-5 %"),
        (0.00004, "share", "0.004 %"),
        (3.4, "ratio", "3.40 ×"),
        (0.0012, "ratio", "0.0012 ×"),
        (2, "bytes_per_parameter", "2.00 bytes per parameter"),
        (3 << 30, "bytes", "3.00 GiB"),
        (14.02, "GB", "14.0 GB"),
        (1.98, "exponent", "1.98"),
        (1.2e-7, "relative_error", "1.2e-07"),
        (True, "yes_no", "yes"),
        (None, "share", "–"),
    ],
)
def test_values_are_written_with_their_units(value, unit, text):
    assert format_value(value, unit) == text
    assert (
        format_found({"batch 1": value, "batch 2": "nan"}, unit) == f"batch 1: {text}; batch 2: nan"
    )


# --- in a notebook -------------------------------------------------------------------------


@pytest.fixture
def no_records(monkeypatch):
    monkeypatch.setattr(session, "judgements", [])
    monkeypatch.setattr(session, "recorded_lines", lambda claim: [])


def test_claim_shows_a_card_and_remembers_the_latest(no_records, capsys):
    session.claim("ckpt-40", 0.129, "simulated for NVIDIA T4")
    session.claim("amp-halves-memory", 0.1)
    session.claim("ckpt-40", 0.4)
    shown = capsys.readouterr().out
    assert "overstated" in shown
    assert "12.9 %" in shown
    assert "No GPU has recorded this claim yet." in shown
    assert [j.claim.id for j in session.judgements] == ["amp-halves-memory", "ckpt-40"]
    assert session.judgements[-1].verdict == Verdict.SUPPORTED


def test_claims_without_a_card_are_listed_in_one_table(no_records, monkeypatch):
    shown = []
    monkeypatch.setattr(session, "without_card", set())
    monkeypatch.setattr(session, "display", shown.append)
    with pytest.raises(InputError, match="card=False"):
        session.claim_table()
    session.claim("ckpt-40", {"batch <1>": 0.01, "batch 8": 0.4, "batch 9": None}, card=False)
    session.claim("amp-halves-memory", 0.1, "simulated for NVIDIA T4", card=False)
    session.claim("grads-same-as-weights", None, card=False)
    session.claim("adam-8b", 8.0)  # has a card
    session.claim_table()
    [table] = shown
    rows = BeautifulSoup(table.html, "html.parser").table.tbody("tr")
    first, second, third = [[cell.get_text("|") for cell in row(["th", "td"])] for row in rows]
    assert first == [
        "Gradient checkpointing saves about 40 % of memory.",
        "A: about 40 % less",
        "✘ batch <1>: 1 %|✔ batch 8: 40 %|○ batch 9: –",
        "◆\xa0depends",
    ]
    assert second[2:] == ["10 %", "▼\xa0overstated|simulated for NVIDIA T4"]
    assert third[2:] == ["It was not measured here.", "○\xa0not testable here"]
    for text in ("[◆ depends] Gradient", "✘ batch <1>: 1 %; ✔ batch 8: 40 %", "simulated for"):
        assert text in table.text
    assert len(session.judgements) == 4
    session.claim("amp-halves-memory", 0.5)  # judged again, now with a card
    session.claim_table()
    assert "10 %" not in shown[1].text


@pytest.mark.parametrize(
    ("label", "verdict"),
    [
        (GPU_MODE, "supported"),
        ("on a phantom NVIDIA T4", "not testable here"),
        (None, "not testable here"),
    ],
)
def test_without_a_mode_a_gpu_claim_asks_the_machine(
    no_records, monkeypatch, capsys, label, verdict
):
    monkeypatch.setattr(this_machine, "machine", lambda: types.SimpleNamespace(label=label))
    judgement = session.claim("ckpt-20-30-slower", 0.25)
    assert judgement.verdict == verdict
    assert judgement.mode == label
    assert verdict in capsys.readouterr().out


def test_recorded_verdicts_are_those_of_this_claim(monkeypatch):
    def recorded(gpu, *judged):
        entries = [{"id": id, "verdict": verdict, "measured": 0.2} for id, verdict in judged]
        here = {"kind": "cuda", "name": gpu, "versions": {"torch": "2.11"}}
        return result(machine=here, judgements=tuple(entries))

    found = [
        recorded("NVIDIA H200", ("ckpt-40", "overstated"), ("ckpt-20-30-slower", "supported")),
        recorded("NVIDIA H100", ("ckpt-40", "overstated")),
        recorded("NVIDIA L4", ("ckpt-40", "supported")),
        recorded("NVIDIA T4", ("ckpt-40", "not testable here")),
    ]
    monkeypatch.setattr(results, "results_of", lambda lesson: found if lesson == "06" else [])
    assert session.recorded_lines(claims.find("ckpt-40")) == [
        "NVIDIA H200, NVIDIA H100: ▼ overstated, 20 % (torch 2.11; 2026-01-02)",
        "NVIDIA L4: ✔ supported, 20 % (torch 2.11; 2026-01-02)",
    ]


def test_what_was_not_tested_on_the_gpu_itself_is_not_listed(monkeypatch):
    entry = {"id": "opt8-drop-in", "verdict": "supported", "measured": True}
    modes = {"trained on the CPU, 3 seeds": 0, "simulated for NVIDIA H200": 0}
    for mode, listed in (modes | {"on a phantom NVIDIA T4": 1}).items():
        here = {"kind": "cuda", "name": "NVIDIA T4", "phantom": True, "versions": {}}
        found = [result(machine=here, judgements=({**entry, "mode": mode},))]
        monkeypatch.setattr(results, "results_of", lambda lesson, found=found: found)
        assert len(session.recorded_lines(claims.find("opt8-drop-in"))) == listed


def test_expect_ticks_or_raises(capsys):
    assert session.expect(True, "gradients are equal") is None
    assert capsys.readouterr().out == "✓ gradients are equal\n"
    with pytest.raises(session.ExpectationFailed, match=r"^gradients are equal$"):
        session.expect(torch.tensor(False), "gradients are equal")
    assert issubclass(session.ExpectationFailed, AssertionError)

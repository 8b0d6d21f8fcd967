"""Claims: every entry can be judged, verdicts follow the rule, and judging never raises."""

import math
import types
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import claim_rules, claims
from labkit.claim_rules import Verdict, format_value
from labkit.memory import InputError

# The claims of the course by lesson. Dropping one, or moving it, must be a decision.
LESSONS = {
    "01": "weights-fp16-2b grads-same-as-weights adam-8b adam-12b-always training-16-20b "
    "training-7b-100gb activations-grow-linearly inference-int4-1b h100-hbm2e-2tbs "
    "grads-freed-after-step",
    "02": "batch1-baseline empty-cache-frees",
    "04": "amp-halves-memory amp-halves-activations amp-halves-weights-grads amp-20-50-faster "
    "amp-accuracy",
    "05": "bf16-halves bf16-no-scaler",
    "06": "ckpt-40 ckpt-activations-40-70 ckpt-activations-10x ckpt-20-30-slower",
    "07": "accum-constant-memory accum-neutral-speed accum-same-gradient large-vs-accumulated",
    "08": "attention-quadratic flash-linear flash-8k-8gb-05gb flash-2-4x-faster sdpa-picks-flash",
    "09": "inplace-saves",
    "10": "torchscript-efficient",
    "11": "compile-shrinks compile-faster",
    "12": "sgd-two-thirds adam-doubles",
    "13": "opt8-75 opt8-same-speed opt8-drop-in",
    "14": "lora-parameter-efficient",
    "15": "qlora-75 qlora-15-slower qlora-70b-35gb",
    "16": "offload-80 offload-2-5x-slower zero3-70b-4xa100 pcie-16gbs",
    "17": "nvme-infinity",
    "18": "fsdp-10x",
    "19": "sharding-linear sharding-10-20-slower",
    "20": "loading-gpu-memory pinned-faster streaming-avoids-loading",
    "21": "stack-20x stack-50-80 order-of-adoption",
    "22": "7b-on-24gb 70b-on-80gb",
}
GPU_MODE = "measured on NVIDIA T4"


# --- the file ------------------------------------------------------------------------------


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_claim_of_the_course_is_there(lesson):
    assert [claim.id for claim in claims.of_lesson(lesson)] == LESSONS[lesson].split()


def test_there_are_no_other_claims():
    assert len(claims.all_claims()) == sum(len(ids.split()) for ids in LESSONS.values())


def test_texts_read_as_sentences():
    for claim in claims.all_claims().values():
        assert claim.says[0].isupper() or claim.says[0].isdigit(), claim.id
        assert claim.says.endswith("."), claim.id
        assert len(claim.says) < 200, claim.id
        assert not claim.assumptions or claim.assumptions.endswith("."), claim.id
        assert claim.rule.startswith("Supported"), claim.id
        assert all("“" in title for title in claim.cited), claim.id


FIGURE = {
    "lesson": "06",
    "sources": ["A"],
    "says": "It saves.",
    "claimed": "40 %",
    "measure": "share",
    "unit": "share",
    "supported": [0.36, 0.44],
}


def written(tmp_path, **changes):
    entry = {**FIGURE, **changes}
    lines = [f"{key} = {_toml(value)}" for key, value in entry.items() if value is not None]
    path = tmp_path / "claims.toml"
    text = '[sources]\nA = "An article"\n[claims.one]\n' + "\n".join(lines)
    path.write_text(text, encoding="utf-8")
    return path


def _toml(value):
    return str(value).lower() if isinstance(value, bool) else repr(value)


def test_a_file_is_read(tmp_path):
    claim = claim_rules.load(written(tmp_path, wrong_below=0.05))["one"]
    assert claim.supported == (0.36, 0.44)
    assert claim.sources == ("A",)
    assert claim.cited == ("An article",)
    assert claim.rule == "Supported from 36 % to 44 %; wrong below 5 %."


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unit": "shares"}, "Did you mean 'share'"),
        ({"sources": ["Z"]}, "unknown source in claim 'one' 'Z'"),
        ({"needs": "gpus"}, "Did you mean 'gpu'"),
        ({"lesson": "6"}, "two digits"),
        ({"says": None}, "needs the field 'says'"),
        ({"wrong_bellow": 1}, "no field 'wrong_bellow'"),
        ({"supported": [0.5, 0.4]}, "must hold"),
        ({"wrong_below": 0.4}, "must hold"),
        ({"wrong_above": 0.4}, "must hold"),
        ({"supported": None}, "needs supported"),
        ({"expected": True}, "needs supported, not expected"),
        ({"unit": "yes_no", "expected": True}, "no interval"),
        ({"unit": "yes_no", "supported": None}, "needs expected"),
    ],
)
def test_an_entry_that_cannot_be_judged_is_refused(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        claim_rules.load(written(tmp_path, **changes))


def test_an_unknown_claim_names_the_nearest():
    with pytest.raises(InputError, match="Did you mean 'ckpt-40'"):
        claims.judge("ckpt-4", 0.4)


# --- verdicts ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "value", "verdict"),
    [
        ("ckpt-40", 0.40, Verdict.SUPPORTED),
        ("ckpt-40", 0.36, Verdict.SUPPORTED),
        ("ckpt-40", 0.44, Verdict.SUPPORTED),
        ("ckpt-40", 0.35, Verdict.OVERSTATED),
        ("ckpt-40", 0.05, Verdict.OVERSTATED),
        ("ckpt-40", 0.60, Verdict.UNDERSTATED),
        ("ckpt-40", 0.04, Verdict.WRONG),
        ("ckpt-40", -0.2, Verdict.WRONG),
        ("adam-8b", 8.0, Verdict.SUPPORTED),
        ("adam-8b", 20, Verdict.WRONG),
        ("amp-accuracy", 0, Verdict.SUPPORTED),
        ("compile-shrinks", 0.9, Verdict.SUPPORTED),
        ("grads-freed-after-step", True, Verdict.SUPPORTED),
        ("grads-freed-after-step", False, Verdict.WRONG),
    ],
)
def test_the_rule_decides(id, value, verdict):
    judgement = claims.judge(id, value)
    assert judgement.verdict == verdict
    assert judgement.measured == value
    assert len(judgement.reasons) == 1


def test_values_come_in_many_kinds():
    for value in (
        Fraction(2, 5),
        torch.tensor(0.4),
        torch.tensor([0.4]),
        torch.tensor(0.4).numpy(),
    ):
        assert claims.judge("ckpt-40", value).verdict == Verdict.SUPPORTED
    assert claims.judge("nvme-infinity", torch.tensor(True)).verdict == Verdict.SUPPORTED


def test_conditions_that_agree_give_one_verdict():
    judgement = claims.judge("ckpt-40", {"batch 1": 0.38, "batch 8": 0.42})
    assert judgement.verdict == Verdict.SUPPORTED
    assert judgement.by_condition == dict.fromkeys(["batch 1", "batch 8"], Verdict.SUPPORTED)


def test_conditions_that_differ_depend():
    judgement = claims.judge("ckpt-40", {"batch 1": 0.01, "batch 8": 0.42, 16: 0.6})
    assert judgement.verdict == Verdict.DEPENDS
    assert list(judgement.by_condition.values()) == ["wrong", "supported", "understated"]
    assert judgement.measured == {"batch 1": 0.01, "batch 8": 0.42, "16": 0.6}
    assert judgement.reasons[1] == "batch 8: 42 % agrees with the claim."


def test_a_condition_that_was_not_measured_does_not_decide():
    judgement = claims.judge("ckpt-40", {"batch 1": None, "batch 8": 0.4})
    assert judgement.verdict == Verdict.SUPPORTED
    assert judgement.by_condition["batch 1"] == Verdict.NOT_TESTABLE


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "not measured"),
        (math.nan, "nan is not a finite"),
        (-math.inf, "inf is not a finite"),
        (10**400, "OverflowError"),
        ("forty", "'forty' is not a number"),
        (True, "asks for a number"),
        (torch.zeros(3), "is not a number"),
        (torch.tensor(1 + 2j), "is not a finite number"),
        ({}, "No condition"),
        ({"a": None}, "not measured"),
    ],
)
def test_what_cannot_be_judged_is_said(value, reason):
    judgement = claims.judge("ckpt-40", value)
    assert judgement.verdict == Verdict.NOT_TESTABLE
    assert reason in judgement.reasons[0]


def test_yes_or_no_refuses_a_number():
    judgement = claims.judge("nvme-infinity", 1)
    assert judgement.verdict == Verdict.NOT_TESTABLE
    assert "yes or no" in judgement.reasons[0]


@pytest.mark.parametrize("mode", [None, "simulated for NVIDIA T4", "tracked on CPU"])
def test_a_claim_about_gpus_takes_only_measured_values(mode):
    judgement = claims.judge("ckpt-20-30-slower", 0.25, mode)
    assert judgement.verdict == Verdict.NOT_TESTABLE
    assert judgement.measured is None
    assert (mode is None) or mode in judgement.reasons[0]
    assert claims.judge("ckpt-20-30-slower", 0.25, GPU_MODE).verdict == Verdict.SUPPORTED


class Hostile:
    def item(self):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
    st.complex_numbers(), st.builds(Hostile), st.lists(st.integers()), st.just(float),
)  # fmt: skip


@given(
    st.sampled_from(sorted(claims.all_claims())),
    st.one_of(anything, st.dictionaries(st.one_of(st.text(), st.integers()), anything)),
)
def test_judging_never_raises(id, measured):
    judgement = claims.judge(id, measured, GPU_MODE)
    assert judgement.verdict in set(Verdict)
    assert judgement.reasons


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_more_never_turns_understated_into_overstated(one, other):
    order = [Verdict.WRONG, Verdict.OVERSTATED, Verdict.SUPPORTED, Verdict.UNDERSTATED]
    low, high = sorted((one, other))
    first, second = (order.index(claims.judge("ckpt-40", v).verdict) for v in (low, high))
    assert first <= second


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.129, "share", "12.9 %"),
        (0.4, "share", "40 %"),
        (-0.05, "share", "-5 %"),
        (0.00004, "share", "0.004 %"),
        (0, "share", "0 %"),
        (3.4, "ratio", "3.40 ×"),
        (123.4, "ratio", "123 ×"),
        (0.0012, "ratio", "0.0012 ×"),
        (2, "bytes_per_parameter", "2.00 bytes per parameter"),
        (3 << 30, "bytes", "3.00 GiB"),
        (14.02, "GB", "14.0 GB"),
        (16, "GB/s", "16.0 GB/s"),
        (1.98, "exponent", "1.98"),
        (1.2e-7, "relative_error", "1.2e-07"),
        (True, "yes_no", "yes"),
        (None, "share", "–"),
    ],
)
def test_values_for_people(value, unit, text):
    assert format_value(value, unit) == text


# --- in a notebook -------------------------------------------------------------------------


@pytest.fixture
def no_records(monkeypatch):
    monkeypatch.setattr(claims, "session", [])
    monkeypatch.setattr(claims, "recorded", lambda claim: [])


def machine(can_measure):
    return types.SimpleNamespace(name="NVIDIA T4", can_measure=can_measure)


def test_claim_shows_a_card_and_remembers_the_latest(no_records, capsys):
    claims.claim("ckpt-40", 0.129, "simulated for NVIDIA T4")
    claims.claim("amp-halves-memory", 0.1)
    claims.claim("ckpt-40", 0.4)
    shown = capsys.readouterr().out
    assert "overstated" in shown
    assert "12.9 %" in shown
    assert "No GPU has recorded this claim yet." in shown
    assert [j.claim.id for j in claims.session] == ["amp-halves-memory", "ckpt-40"]
    assert claims.session[-1].verdict == Verdict.SUPPORTED


@pytest.mark.parametrize(("can", "verdict"), [(True, "supported"), (False, "not testable here")])
def test_without_a_mode_a_gpu_claim_asks_the_machine(no_records, monkeypatch, capsys, can, verdict):
    monkeypatch.setattr("labkit.hardware.machine", lambda: machine(can))
    judgement = claims.claim("ckpt-20-30-slower", 0.25)
    assert judgement.verdict == verdict
    assert judgement.mode == (GPU_MODE if can else None)
    assert verdict in capsys.readouterr().out


def test_recorded_verdicts_are_those_of_this_claim(monkeypatch):
    entries = [
        {"id": "ckpt-40", "verdict": "overstated", "measured": 0.2},
        {"id": "ckpt-20-30-slower", "verdict": "supported", "measured": 0.25},
    ]
    untested = [{"id": "ckpt-40", "verdict": "not testable here", "measured": None}]
    made = [
        types.SimpleNamespace(
            machine={"name": name, "versions": {"torch": "2.11"}},
            judgements=found,
            date="2026-11-20",
        )
        for name, found in (("NVIDIA H200", entries), ("NVIDIA T4", untested))
    ]
    asked = []
    monkeypatch.setattr("labkit.results.recorded", lambda lesson: asked.append(lesson) or made)
    assert claims.recorded(claims.find("ckpt-40")) == [
        {
            "gpu": "NVIDIA H200",
            "verdict": "overstated",
            "measured": 0.2,
            "versions": {"torch": "2.11"},
            "date": "2026-11-20",
        }
    ]
    assert asked == ["06"]


def test_a_judgement_survives_the_result_record(no_records, capsys):
    from labkit.session import judgement_record

    claims.claim("ckpt-40", {"batch 1": 0.1, "batch 8": 0.4}, "simulated for NVIDIA T4")
    record = judgement_record(claims.session[0])
    assert record["verdict"] == "depends"
    assert record["measured"] == {"batch 1": 0.1, "batch 8": 0.4}
    assert record["sources"] == ["A"]


def test_expect_ticks_or_raises(capsys):
    assert claims.expect(True, "gradients are equal") is None
    assert capsys.readouterr().out == "✓ gradients are equal\n"
    with pytest.raises(claims.ExpectationFailed, match=r"^gradients are equal$"):
        claims.expect(torch.tensor(False), "gradients are equal")
    assert issubclass(claims.ExpectationFailed, AssertionError)

"""Cards: escaped, readable on their own background, never colour alone, and shown once."""

import dataclasses
import re
import sys
import types

import pytest
from bs4 import BeautifulSoup
from fake_runs import fake_run
from IPython.testing.globalipapp import start_ipython
from IPython.utils.capture import capture_output
from lesson_files import MACHINE, result, run

from gpumem.figures import cards
from gpumem.inputs import InputError
from gpumem.units import MIB
from labkit.exercises import engine
from labkit.lesson import claim_cards, claims, session
from labkit.lesson.claims import Verdict

RECORD = "NVIDIA H200: ▼ overstated, 21 % (torch 2.11.0, cuda 13.0; 2026-11-20)"


def judged(id="ckpt-40", measured=0.129, mode="simulated for NVIDIA T4"):
    return claims.judge(id, measured, mode)


def machine(**changes):
    fields = {
        "name": "NVIDIA T4",
        "capacity_bytes": 15 << 30,
        "note": "Memory is measured on this GPU.",
        "versions": {"torch": "2.13.0", "peft": None},
        "bf16_native": False,
        "cores": 4,
        "host_memory_bytes": 12 << 30,
        "can_measure": True,
        "phantom": False,
    }
    return types.SimpleNamespace(**{**fields, **changes})


def outcome(status="not yet", message="Not 5."):
    return types.SimpleNamespace(id="06-1", status=status, message=message)


# --- what they say -------------------------------------------------------------------------


def test_claim_card_says_all_it_knows():
    card = claim_cards.claim_card(judged(), [RECORD])
    flat = " ".join(card.text.split())
    for part in (
        "[▼ overstated] Gradient checkpointing saves about 40 % of memory.",
        "about 40 % less",
        "12.9 % is less than claimed.",
        "simulated for NVIDIA T4",
        "Supported from 36 % to 44 %; wrong below 5 %.",
        "Peak of a full training step",
        "A, LightYear Docs",
        RECORD,
    ):
        assert part in flat
        assert part.removeprefix("[▼ overstated] ") in card.html
    assert claim_cards.NO_RECORD not in flat
    assert claim_cards.NO_RECORD in claim_cards.claim_card(judged()).text


def test_a_claim_about_seconds_shows_what_is_counted_and_the_bound():
    kept = fake_run("kept", flops=6 * 10**12, moved_bytes=96 * 10**9)
    again = fake_run("again", flops=8 * 10**12, moved_bytes=120 * 10**9)
    judgement = session.claim_seconds("ckpt-20-30-slower", again, kept)
    assert (judgement.verdict, judgement.measured) == (Verdict.NOT_TESTABLE, None)
    work, bound = claim_cards.counted_rows(again, kept)
    assert work == ("Counted", "work 1.33 ×, bytes moved 1.25 × (again, over kept)")
    # A T4 moves 320 GB/s, and computes faster than that here.
    says = "at NVIDIA T4's published rates at least 375 ms (bytes) against 300 ms (bytes) a step"
    assert bound == ("Bound", f"{says}; two lower bounds do not decide which is faster")
    full = [dataclasses.replace(each, parameters={"precision": "fp32"}) for each in (again, kept)]
    says = "988 ms (arithmetic) against 741 ms (arithmetic) a step (FP32 without TF32"
    assert says in claim_cards.counted_rows(*full)[1][1]  # 8.1 TFLOPS, not half of FP16's 65
    on_cpu = dataclasses.replace(kept, device="CPU")
    assert claim_cards.counted_rows(again, on_cpu) == [work]
    assert claim_cards.counted_rows(again, dataclasses.replace(kept, flops=None)) == []


def test_a_claim_about_seconds_is_judged_where_a_gpu_timed_both():
    kept = fake_run(mode="measured", capacity_bytes=1 << 34, step_seconds=(1.0, 1.0))
    again = dataclasses.replace(kept, step_seconds=(1.25, 1.25))
    judgement = session.claim_seconds("ckpt-20-30-slower", again, kept)
    assert (judgement.verdict, judgement.measured) == (Verdict.SUPPORTED, 0.25)
    assert session.claim_seconds("ckpt-20-30-slower", again, kept, card=False) == judgement
    assert "ckpt-20-30-slower" in session.without_card
    full = dataclasses.replace(again, capacity_bytes=1 << 20)
    assert session.claim_seconds("ckpt-20-30-slower", full, kept).measured is None
    with pytest.raises(InputError, match="seconds give a ratio"):
        session.claim_seconds("adam-8b", again, kept)


def test_machine_card():
    text = claim_cards.machine_card(machine()).text
    assert "[✔ measured] NVIDIA T4" in text
    assert "15.0 GiB on the device, 12.0 GiB on the host" in text
    assert "torch 2.13.0" in text
    assert "peft" not in text
    plain = machine(can_measure=False, capacity_bytes=None, host_memory_bytes=None, name="A CPU")
    text = claim_cards.machine_card(plain).text
    assert "[i simulated] A CPU" in text
    assert "not known" in text


def test_exercise_and_message_cards(capsys):
    assert "[↻ not yet] Exercise 06-1" in engine.exercise_card(outcome()).text
    card = cards.message_card("One way:\n\nThis.", title="solution", code="if x < 1:\n    pass")
    assert card.text in capsys.readouterr().out  # where there is no notebook it is printed
    assert "[i solution]" in card.text
    assert "        pass" in card.text
    assert "if x &lt; 1:\n    pass" in card.html


# --- how they look -------------------------------------------------------------------------


def all_cards():
    judgements = [judged(measured=value) for value in (0.4, 0.1, 0.9, 0, None, {"a": 0.4, "b": 0})]
    assert {each.verdict for each in judgements} == {*claims.Verdict} == {*claim_cards.VERDICTS}
    yield from (claim_cards.claim_card(judgement, [RECORD]) for judgement in judgements)
    yield claim_cards.machine_card(machine())
    yield from (engine.exercise_card(outcome(status)) for status in engine.Status)
    yield cards.message_card("x", title="note", code="y")


def test_html_is_whole_and_brings_its_own_background():
    for card in all_cards():
        assert card.html.startswith('<div style="background:#ffffff;color:')
        parsed = BeautifulSoup(card.html, "html.parser")
        assert str(parsed).count("</") == card.html.count("</")  # each tag is closed once
        for tag in parsed.find_all(["td", "pre"]):  # notebook themes colour these
            assert re.search(r"background:#\w{6};color:#\w{6}", tag["style"])


# --- where they appear ---------------------------------------------------------------------


def test_in_a_notebook_it_is_displayed_once():
    shell = start_ipython() or sys.modules["IPython"].get_ipython()
    with capture_output() as captured:
        shell.run_cell("from gpumem.figures import cards; cards.message_card('Hello.', title='x')")
    assert len(captured.outputs) == 1
    assert set(captured.outputs[0].data) == {"text/html", "text/plain"}
    assert captured.outputs[0].data["text/plain"] == "[i x]\n  Hello."


def test_the_peaks_that_gpus_recorded():
    names = ("A100", "T4", "H100")  # the last two take the same, and share a column
    a100, t4, h100 = ({"device": name, "mode": "measured"} for name in names)
    a100["peak_bytes"] = 13 * MIB
    found = [
        result(
            machine={**MACHINE, "name": gpu["device"]},
            runs=(
                run(name="plain", step_seconds=(0.5,), **gpu),
                run(parameters={"rows": 1, "file": f"/tmp/{gpu['device']}"}, **gpu),
                run(parameters={"rows": 8, "file": f"/tmp/{gpu['device']}"}, **gpu),
                run(name="large"),
            ),
        )
        for gpu in (a100, t4, h100)
    ]
    heading, _, *rows = claim_cards.recorded_peaks(found).text.splitlines()[1:]
    same = "measured on T4 and measured on H100"
    columns = ["run", "measured on A100", "simulated for T4", same]
    assert re.split("  +", heading) == columns
    assert [re.split("  +", row) for row in rows] == [
        ["plain", "13.0 MiB, 500 ms a step", "–", "12.0 MiB, 500 ms a step"],
        ["baseline, rows 1", "13.0 MiB", "–", "12.0 MiB"],
        ["baseline, rows 8", "13.0 MiB", "–", "12.0 MiB"],
        ["large", "–", "12.0 MiB", "–"],
    ]

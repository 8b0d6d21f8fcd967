"""Cards: escaped, readable on their own background, never colour alone, and shown once."""

import re
import subprocess
import sys
import types
from html.parser import HTMLParser

import pytest
from IPython.testing.globalipapp import start_ipython
from IPython.utils.capture import capture_output

from labkit import claims
from labkit.memory import InputError
from labkit.show import cards

NASTY = "<script>alert('x')</script> & \"quoted\""
RECORD = {
    "gpu": "NVIDIA H200",
    "verdict": "overstated",
    "measured": 0.21,
    "versions": {"torch": "2.11.0", "transformers": "5.17", "cuda": "13.0"},
    "date": "2026-11-20T03:00:00+00:00",
}


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
    }
    return types.SimpleNamespace(**{**fields, **changes})


def outcome(status="not yet", message="Not 5."):
    return types.SimpleNamespace(id="06-1", status=status, message=message)


# --- what they say -------------------------------------------------------------------------


def test_claim_card_says_all_it_knows():
    card = cards.claim_card(judged(), [RECORD])
    flat = " ".join(card.text.split())
    for part in (
        "[▼ overstated] Gradient checkpointing saves about 40 % of memory.",
        "about 40 % less",
        "12.9 % is less than claimed.",
        "simulated for NVIDIA T4",
        "Supported from 36 % to 44 %; wrong below 5 %.",
        "Peak of a full training step",
        "LightYear Docs",
        "NVIDIA H200: ▼ overstated, 21 % (torch 2.11.0, cuda 13.0; 2026-11-20)",
    ):
        assert part in flat
        assert part.removeprefix("[▼ overstated] ") in card.html
    assert cards.NO_RECORD not in flat


def test_claim_card_without_records_says_so():
    assert cards.NO_RECORD in cards.claim_card(judged()).text


def test_claim_card_lists_each_condition_with_its_symbol():
    card = cards.claim_card(judged(measured={"batch 1": 0.01, "batch 8": 0.4}))
    assert "◆ depends" in card.text
    assert "✘ batch 1: 1 % is below 5 %" in card.text
    assert "✔ batch 8: 40 % agrees" in card.text


def test_recorded_objects_and_broken_records_are_shown_as_they_are():
    made = types.SimpleNamespace(
        gpu=NASTY, verdict="splendid", measured={"batch 1": "nan"}, versions="torch 2", date=None
    )
    card = cards.claim_card(judged(), [made, {}])
    assert "? splendid, batch 1: nan (torch 2)" in " ".join(card.text.split())
    assert "<script>" not in card.html


def test_machine_card():
    text = cards.machine_card(machine()).text
    assert "[✔ measured] NVIDIA T4" in text
    assert "15.0 GiB on the device, 12.0 GiB on the host" in text
    assert "torch 2.13.0" in text
    assert "peft" not in text


def test_machine_card_without_a_gpu():
    plain = machine(can_measure=False, capacity_bytes=None, host_memory_bytes=None, name="A CPU")
    text = cards.machine_card(plain, simulated_for="NVIDIA T4").text
    assert "[i simulated for NVIDIA T4] A CPU" in text
    assert "not known" in text


def test_machine_card_takes_the_real_record():
    from labkit import hardware

    here = hardware.machine()
    assert here.name in cards.machine_card(here).text


def test_exercise_and_message_cards():
    assert "[↻ not yet] Exercise 06-1" in cards.exercise_card(outcome()).text
    card = cards.message_card("One way:\n\nThis.", title="solution", code="if x < 1:\n    pass")
    assert "[i solution]" in card.text
    assert "        pass" in card.text
    assert "if x &lt; 1:\n    pass" in card.html
    with pytest.raises(InputError, match="Did you mean 'warning'"):
        cards.message_card("x", tone="warnin")


def test_everything_is_escaped():
    judgement = claims.judge("ckpt-40", {NASTY: 0.4, "b": 0.1}, NASTY)
    made = [
        cards.claim_card(judgement, [{**RECORD, "gpu": NASTY, "date": NASTY}]),
        cards.machine_card(machine(name=NASTY, note=NASTY, versions={NASTY: NASTY})),
        cards.exercise_card(outcome(message=NASTY)),
        cards.message_card(NASTY, title=NASTY, code=NASTY),
    ]
    for card in made:
        assert "<script" not in card.html
        assert "&lt;script&gt;" in card.html
        assert NASTY.split()[0] in card.text


# --- how they look -------------------------------------------------------------------------


class Balance(HTMLParser):
    """Fails on a tag closed out of order, and collects the style of each."""

    def __init__(self):
        super().__init__()
        self.open, self.styles = [], []

    def handle_starttag(self, tag, attributes):
        self.styles.append((tag, dict(attributes).get("style", "")))
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def all_cards():
    judgements = [judged(measured=value) for value in (0.4, 0.1, 0.9, 0, None, {"a": 0.4, "b": 0})]
    yield from (cards.claim_card(judgement, [RECORD]) for judgement in judgements)
    yield cards.machine_card(machine())
    yield from (cards.exercise_card(outcome(status)) for status in cards.OUTCOMES)
    yield from (cards.message_card("x", tone=tone, code="y") for tone in cards.TONES)


def test_html_is_whole_and_brings_its_own_background():
    for card in all_cards():
        parser = Balance()
        parser.feed(card.html)
        assert parser.open == []
        assert card.html.startswith('<div style="background:#ffffff;color:')
        assert "{" not in card.html  # a style's placeholder left unfilled
        for tag, style in parser.styles:
            if tag in ("td", "pre"):  # notebook themes colour these
                assert re.search(r"background:#\w{6};color:#\w{6}", style)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


LOOKS = {**cards.VERDICTS, **cards.OUTCOMES, **cards.TONES}


@pytest.mark.parametrize("colour", sorted({k.colour for k in LOOKS.values()} | {cards.SOFT}))
def test_white_text_is_readable_on_each_colour(colour):
    assert 1.05 / (luminance(colour) + 0.05) >= 4.5


@pytest.mark.parametrize("looks", [cards.VERDICTS, cards.OUTCOMES, cards.TONES])
def test_symbols_differ_so_that_colour_is_never_alone(looks):
    assert len({look.symbol for look in looks.values()}) == len(looks)


def test_every_verdict_has_a_look():
    from labkit.exercises import Status

    assert set(cards.VERDICTS) == set(claims.Verdict)
    assert set(cards.OUTCOMES) == set(Status)


# --- where they appear ---------------------------------------------------------------------


def test_without_a_notebook_the_text_is_printed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    card = cards.message_card("Hello.")
    assert capsys.readouterr().out == f"{card.text}\n"


def test_in_a_notebook_it_is_displayed_once():
    shell = start_ipython() or sys.modules["IPython"].get_ipython()
    with capture_output() as captured:
        shell.run_cell("from labkit.show import cards; cards.message_card('Hello.')")
    assert len(captured.outputs) == 1
    assert set(captured.outputs[0].data) == {"text/html", "text/plain"}
    assert captured.outputs[0].data["text/plain"] == "[i note]\n  Hello."


def test_importing_cards_loads_nothing_heavy():
    heavy = ("IPython", "matplotlib", "ipywidgets", "transformers")
    code = f"import sys, labkit.show.cards; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []

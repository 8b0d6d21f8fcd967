"""The claims on trial: what is read of the records, one verdict over all, and the tables."""

import re
from pathlib import Path

from lesson_files import result

from labkit.lesson import results
from labkit.lesson.claims import Verdict, all_claims
from labkit.trial import RecordedVerdict, Table, Trial, claim_lists, gather, verdict_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "CHEAT_SHEET.md"
EVIL = "<script>alert('|')</script>"


# --- what it reads --------------------------------------------------------------------------------


MODE = "trained on a CPU"
JUDGED = {"id": "amp-accuracy", "verdict": "supported", "measured": 0.001, "mode": MODE}
H200 = {"kind": "cuda", "name": "NVIDIA H200", "versions": {"torch": "2.11.0"}}


def test_recorded_verdicts_name_the_gpu_and_leave_out_what_it_could_not_judge(
    tmp_path, monkeypatch
):
    not_judged = {"id": "accum-neutral-speed", "verdict": "not testable here", "measured": None}
    found = result(lesson="04", machine=H200, judgements=(JUDGED, not_judged))
    results.save(found, tmp_path / "nvidia-h200/04.json")
    monkeypatch.setattr(results, "result_folders", lambda: [tmp_path])
    trial = gather()
    (finding,) = trial.findings["amp-accuracy"]
    assert (finding.verdict, finding.found) == ("supported", "0.1 %")
    assert trial.machines == [finding.machine] == ["NVIDIA H200"]
    assert trial.findings["accum-neutral-speed"] == ()


# --- what it says ---------------------------------------------------------------------------------


def test_nothing_is_filled_in():
    table = verdict_table(trial_of())
    assert "nothing yet" in table.note
    assert table.rows[-1] == ("all, each once", *"00000", str(len(all_claims())))


def trial_of(**verdicts):
    """A trial in which each claim was judged so on machines 0, 1 and so on."""
    found = dict.fromkeys(all_claims(), ())
    for id, judged in verdicts.items():
        id = id.replace("_", "-")
        found[id] = tuple(
            RecordedVerdict(Verdict(verdict), "found", f"GPU {number}")
            for number, verdict in enumerate(judged.split())
        )
    return Trial(found)


def test_a_claim_counts_once_and_depends_where_machines_disagree():
    trial = trial_of(
        amp_accuracy="supported supported",
        ckpt_40="wrong overstated",
        bf16_no_scaler="wrong",
    )
    assert trial.verdict("amp-accuracy") is Verdict.SUPPORTED
    assert trial.verdict("ckpt-40") is Verdict.DEPENDS
    assert trial.verdict("amp-20-50-faster") is Verdict.NOT_TESTABLE
    assert trial.machines == ["GPU 0", "GPU 1"]
    counts = trial.by_article()
    assert list(counts) == [*"ABCD"]
    assert [counts[letter][Verdict.WRONG] for letter in counts] == [0, 1, 1, 1]  # of all three
    assert counts["A"][Verdict.SUPPORTED] == counts["A"][Verdict.DEPENDS] == 1
    rows = verdict_table(trial).rows
    assert [row[0].split()[0] for row in rows] == ["A", "B", "C", "D", "all,"]
    column = verdict_table(trial).columns.index("wrong")
    assert [row[column] for row in rows] == [*"01111"]
    assert "Judged on: GPU 0; GPU 1." in verdict_table(trial).note
    for letter, verdicts in counts.items():
        made = [claim for claim in all_claims().values() if letter in claim.sources]
        assert verdicts.total() == len(made)


def test_a_finding_says_under_which_conditions_a_claim_agrees():
    found = next(each for each in gather().findings["opt8-75"])
    assert found.agrees.startswith("optimizer state: ")
    assert found.differs.startswith("peak: ")


def test_a_section_is_escaped_as_html_and_as_markdown():
    section = Table("Heading", EVIL, ("a", "b"), ((EVIL, "1"), ("c", "2")))
    assert EVIL not in section._repr_html_()
    lines = str(section).splitlines()
    assert lines[0] == "## Heading"
    tables = [line for line in lines if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in tables] == [3] * 4


def test_the_page_counts_the_verdicts_of_all_records():
    assert str(verdict_table(gather())) in PAGE.read_text(encoding="utf-8")


def test_the_lists_hold_every_claim_once():
    text = claim_lists(gather()).text
    assert text.count("\n| ") - 2 * text.count("## ") == len(all_claims())

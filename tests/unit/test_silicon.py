"""The page of published measurements shows what was recorded, and each row can be run."""

import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import sources
from benchmarks.silicon import PAGE, beyond, error, held, page, read

README = Path(__file__).parents[2] / "README.md"


def test_the_page_shows_what_was_recorded():
    assert page(read()) in PAGE.read_text(encoding="utf-8")


def test_every_row_has_an_answer_or_says_why_it_has_none():
    rows = read()
    assert Counter(row["source"] for row in rows) == {
        "Liger-Kernel": 642,
        "fitcheck-llm": 2 * 57,
        "peft MetaMathQA": 76,
        "litgpt": 37,
        "FakeGPU": 21,
        "nanoVLM": 10,
        "torchtune": 4,
        "torchtitan": 2,
        "ao docs": 1,
        "optimum-benchmark": 20,
    }
    for row in rows:
        assert row["bytes"] or row["reason"] or row["remark"], row


@pytest.mark.parametrize("source", sources.SOURCES.values(), ids=sources.SOURCES)
def test_each_row_of_a_source_is_answered_by_one_process(source, monkeypatch):
    monkeypatch.setattr(sources, "checkout", lambda *asked: Path("code"))
    monkeypatch.setattr(sources, "package", lambda *asked: Path("code"))
    rows = [row for row in read() if row["source"] == source.name]
    jobs = list(source.jobs(read(), None))
    assert sorted(map(str, rows)) == sorted(str(row) for job in jobs for row in job.rows)
    assert {sources.what(row) for row in rows} == set(source.bounds)
    for job in jobs:
        assert set(job.releases) <= set(sources.RELEASES)
        assert job.printed or len(job.cases) == len(job.rows)


def test_a_figure_is_found_in_what_nanovlm_prints(monkeypatch):
    monkeypatch.setattr(sources, "checkout", lambda *asked: Path("code"))
    (job,) = sources.SOURCES["nanovlm"].jobs(read(), None)
    printed = "Batch Size 1: 4448.58 MB\nBatch Size 512: OOM (Peak before OOM: 80247.67 MB)\n"
    found = {row["case"]: re.search(job.printed(row), printed, re.M) for row in job.rows}
    assert {case: match[1] for case, match in found.items() if match} == {
        "batch 1": "4448.58",
        "batch 512 (OOM, peak before)": "80247.67",
    }


def test_what_is_run_at_night_is_within_its_bounds():
    at_night = [row for row in read() if held(row)]
    assert {row["source"] for row in at_night} == set(sources.OF)
    assert len([row for row in at_night if error(row) is not None]) >= 60
    assert not [row["case"] for row in at_night if beyond(row)]


def test_the_readme_says_what_was_recorded():
    ran = [
        row for row in read() if row["torch"] and not row["reason"] and row["kind"] == "allocated"
    ]
    liger = [row for row in ran if row["source"] == "Liger-Kernel"]
    equal = sum(row["bytes"] == row["published_bytes"] for row in liger)
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert f"Of {len(liger)} figures of Liger-Kernel that were compared, {equal} are equal" in text
    fp16 = [r for r in ran if r["source"] == "fitcheck-llm" and " none " in r["case"]]
    assert all(row["bytes"] == row["published_bytes"] for row in fp16)
    assert f"a T4 allocated in {len(fp16)} runs in FP16" in text
    others = [error(row) for row in ran if row["source"] in ("FakeGPU", "litgpt", "nanoVLM")]
    assert max(map(abs, others)) < 0.002
    assert "What FakeGPU, litgpt and nanoVLM allocated agrees within 0.2 %" in text

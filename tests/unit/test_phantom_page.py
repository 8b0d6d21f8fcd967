"""The page about a program on phantom GPUs, and the record that it draws, without a GPU."""

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest
from bs4 import BeautifulSoup
from fake_runs import TraceBuilder, phantom_verdict

from gpumem.figures.html_pages import POLICY
from gpumem.inputs import read_record
from gpumem.trace import Category, Phase
from gpumem.units import GIB, MIB, format_bytes
from labkit.course.html_parts import problems
from phantom_gpu.allocator_history import History, Tag
from phantom_gpu.report_page import page
from phantom_gpu.report_records import ProcessReport

HOSTILE = '<script src="https://elsewhere.example/x.js">hit()</script><img src=x onerror=hit()>'


def shown(verdict):
    return BeautifulSoup(page(verdict, command=["labkit", "phantom", HOSTILE]), "html.parser")


@pytest.mark.parametrize("ended", ["finished", "out of memory", "failed"])
def test_a_page_is_complete_safe_and_for_all_readers(ended):
    error = "" if ended == "finished" else HOSTILE
    verdict = phantom_verdict(ranks=2, text=HOSTILE, ended=ended, error=error)
    html = page(verdict, command=["labkit", "phantom", HOSTILE])
    soup = BeautifulSoup(html, "html.parser")
    [answer, _], text = verdict.answers, soup.get_text()
    for nbytes in (GIB, answer.gpus[0].peak_allocated_bytes, *answer.gpus[0].made_of.values()):
        assert format_bytes(nbytes) in text
    for words in ("rank 1, GPU 0", "not measured on a GPU", "labkit phantom", "stream 1"):
        assert words in text
    assert (ended == "failed") == (soup.find("h2", string="The error") is not None)
    assert len(soup.find_all("img", alt=True)) == 3
    assert problems(html) == []
    assert not soup.find("script")
    assert POLICY in html
    addresses = [e.get("src") or e.get("href") for e in soup.find_all(["img", "a", "link"])]
    assert all(address.startswith(("data:image/png", "#")) for address in addresses)
    assert len(html) < 1_000_000


def test_out_of_memory_is_in_the_figure_and_names_the_request():
    soup = shown(phantom_verdict(ended="out of memory"))
    timeline = soup.find_all("img")[1]["alt"]
    assert "out of memory: asked for 2.00 GiB" in timeline
    assert "in step 2, backward, in train.py, it asked for 2.00 GiB" in soup.get_text()


def test_a_program_that_was_killed_or_used_no_gpu_has_a_page():
    verdict = phantom_verdict(ended="")
    [answer] = verdict.answers
    killed = replace(answer, gpus=[replace(answer.gpus[0], record=None)])
    assert (
        "There is none: the process was ended"
        in shown(replace(verdict, answers=[killed], returncode=-9)).get_text()
    )
    nothing = shown(replace(verdict, answers=[], returncode=3)).get_text()
    assert "it used no GPU, and ended with exit code 3" in nothing


def test_a_record_survives_json():
    [answer] = phantom_verdict().answers
    record = json.loads(json.dumps(asdict(answer)))
    assert read_record(ProcessReport, record, "an answer") == answer


def entry(action, address, nbytes, step, phase="forward"):
    told = Tag(step, Phase(phase)).written()
    return {"action": action, "addr": address, "size": nbytes, "stream": 0, "user_metadata": told}


def test_a_timeline_has_what_was_made_in_steps_that_it_leaves_out():
    history = History()
    for step, nbytes in enumerate((9, 9, 9, 1, 1, 1, 20), start=1):
        kept = [entry("alloc", 100 * step, 3, step)]
        made = [
            entry("alloc", 1, nbytes * MIB, step),
            entry("free_completed", 1, nbytes * MIB, step),
        ]
        history.read(made + kept, step)
        history.end_step()
    line = history.timeline()
    assert max(line.totals_bytes()) == history.peak.nbytes == 20 * MIB + 6 * 3
    assert line.totals_bytes()[-1] == history.held_bytes == 7 * 3
    assert [stop > start for start, stop in line.steps()] == [True] * 3 + [False] * 3 + [True]


def test_a_timeline_ends_with_the_request_that_failed():
    history = History()
    log = [entry("alloc", 1, MIB, 1), entry("oom", 0, GIB, 1), entry("free_completed", 1, MIB, 1)]
    history.read(log, 1)
    assert history.timeline(history.failures[-1].event).totals_bytes() == [MIB]


def test_a_thinned_timeline_keeps_the_peak_of_each_phase_of_each_step():
    log, sizes = TraceBuilder(), [(7 * i) % 1009 for i in range(3000)]
    for step in range(4):
        log.begin_step()
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for size in sizes:
                log.free(log.hold(size + step, Category.TEMPORARY, phase), phase)
    whole = log.trace().timeline()
    thin = whole.thinned()
    assert len(thin.indices) < len(whole.indices) / 5
    assert highest(thin) == highest(whole)


def highest(line):
    """The most bytes in each phase of each step."""
    found = Counter()
    rows = zip(line.indices, line.phases, line.totals_bytes(), strict=True)
    for index, phase, nbytes in rows:
        where = sum(start <= index for start in line.step_starts), phase
        found[where] = max(found[where], nbytes)
    return found

"""launch(): several processes as one experiment, and none of them left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import rank_jobs
import torch

import labkit as lab
from labkit.memory import InputError
from labkit.ranks import MOST_RANKS

HERE = Path(__file__).parent


def ranks_alive(folder):
    """Processes of `launch`, torchrun's own among them, that run with a scratch in ``folder``."""
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if "labkit.rank" in line and str(folder) in line:
            found |= {process.pid} if process.info["status"] != psutil.STATUS_ZOMBIE else set()
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    yield
    assert ranks_alive(tmp_path) == set()
    assert list((tmp_path / "scratch").iterdir()) == []  # no order, log or result either


@pytest.fixture
def ids(tmp_path):
    """A folder for the process ids of ranks."""
    (tmp_path / "ids").mkdir()
    return tmp_path / "ids"


# --- what it gives -------------------------------------------------------------------------------


def test_each_rank_gives_its_own_run():
    runs = lab.launch(rank_jobs.shared, ranks=2, steps=3, rows=6)
    assert [run.name for run in runs] == ["shared, rank 0", "shared, rank 1"]
    assert [dict(run.parameters) for run in runs] == [
        {"rows": 6, "ranks": 2, "rank": rank} for rank in (0, 1)
    ]
    assert runs[0].losses == runs[1].losses
    assert runs[0].losses[0] == 12.0  # 8 ones: 8 on the first rank, 16 on the second
    assert runs[0].losses[1] < runs[0].losses[0]
    for run in runs:
        assert sum(run.by_category.values()) == run.peak_bytes == run.trace.peak_bytes
        assert len(run.trace.steps()) == 2  # tracked; the third is timed
        assert len(run.step_seconds) == 1
        # A ring's all-reduce sends 2 (N - 1)/N: the gradient of 8 numbers, and the loss.
        assert run.sent_bytes == 8 * 4 + 4
    assert runs[0].trace == runs[1].trace


def test_one_rank_is_named_as_any_run():
    (run,) = lab.launch(rank_jobs.shared, ranks=1, steps=1)
    assert run.name == "shared"
    assert run.sent_bytes == 0


def test_a_trace_survives_the_journey():
    (run,) = lab.launch(rank_jobs.shared, ranks=1, steps=2)
    assert run.trace.peak().by_category
    assert run.trace.work["mv"].calls == 4  # forward and backward, two steps
    assert {type(storage.category) for storage in run.trace.storages} == {lab.Category}
    assert all(isinstance(storage.shape, tuple) for storage in run.trace.storages)


def test_nobody_but_this_machine_can_connect():
    for run in lab.launch(rank_jobs.listeners, ranks=2, steps=1):
        assert run.losses == (0.0,)


def test_an_experiment_may_ask_how_many_steps():
    (run,) = lab.launch(rank_jobs.counting, ranks=1, steps=3)
    assert run.losses == (3.0,) * 3


# --- what goes wrong -----------------------------------------------------------------------------


def test_the_failing_rank_is_named_with_its_error():
    with pytest.raises(lab.RankError, match=r"rank 1 of 2 failed") as caught:
        lab.launch(rank_jobs.failing, ranks=2)
    assert "ValueError: this rank has had enough" in str(caught.value)


def test_a_killed_rank_is_named():
    with pytest.raises(lab.RankError, match=r"rank 1 of 2 was killed by signal 9"):
        lab.launch(rank_jobs.failing, ranks=2, how="killed")


def test_one_rank_out_of_memory_is_named():
    words = "rank 1 of 2 failed:\nout of memory: asked for 4.00 MiB"
    with lab.pretend(budget_bytes=1 << 20), pytest.raises(lab.RankError, match=words):
        lab.launch(rank_jobs.failing, ranks=2, how="hungry")


def test_all_ranks_out_of_memory_are_runs_as_elsewhere():
    with lab.pretend(budget_bytes=1 << 20):
        runs = lab.launch(rank_jobs.hungry, ranks=2)
    assert [run.oom.requested_bytes for run in runs] == [4 << 20] * 2


def test_too_slow_ranks_are_stopped():
    with pytest.raises(lab.RankError, match="did not end within 12 seconds"):
        lab.launch(rank_jobs.failing, ranks=2, how="endless", who=5, timeout_seconds=12)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_interrupting_stops_the_ranks(ids):
    def interrupt(*_):
        raise KeyboardInterrupt

    def when_they_run():
        while len(list(ids.iterdir())) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    threading.Thread(target=when_they_run, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lab.launch(rank_jobs.endless, ranks=2, folder=str(ids))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_ranks_end_with_a_launcher_that_is_killed(ids, tmp_path):
    code = (
        "import sys, labkit as lab; sys.path.insert(0, sys.argv[1]); import rank_jobs; "
        "lab.launch(rank_jobs.endless, ranks=2, folder=sys.argv[2])"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(HERE), str(ids)],
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
    )
    while len(started := list(ids.iterdir())) < 2:
        assert launcher.poll() is None
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    assert ranks_alive(tmp_path) >= {int(path.name) for path in started}
    deadline = time.monotonic() + 60
    while ranks_alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    while any((tmp_path / "scratch").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)


# --- what is refused before anything starts ------------------------------------------------------


def outer():
    def inner(device):
        yield torch.zeros(())

    return inner


@pytest.mark.parametrize("experiment", [outer(), lambda device: (yield torch.zeros(()))])
def test_what_no_other_process_can_import_is_refused(experiment):
    with pytest.raises(InputError, match=r"imports .* from a file"):
        lab.launch(experiment)


def test_an_experiment_typed_in_is_refused():
    space = {"__name__": "__main__"}
    exec("def typed(device):\n    yield 0.0\n", space)
    with pytest.raises(InputError, match="%%writefile"):
        lab.launch(space["typed"])


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, "2", MOST_RANKS + 1])
def test_bad_numbers_of_ranks(ranks):
    with pytest.raises(InputError, match="ranks must be"):
        lab.launch(rank_jobs.shared, ranks=ranks)


def test_values_that_cannot_travel_are_refused():
    with pytest.raises(InputError, match="rows travels to another process"):
        lab.launch(rank_jobs.shared, rows=torch.ones(2))


def test_unknown_arguments_are_refused():
    with pytest.raises(InputError, match="unknown argument of shared 'row'"):
        lab.launch(rank_jobs.shared, row=2)

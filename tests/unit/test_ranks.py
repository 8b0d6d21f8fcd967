"""launch(): several processes as one experiment, and none of them left behind."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import rank_jobs
import torch

import labkit as lab
from gpumem.inputs import InputError
from gpumem.ranks.launch import MOST_RANKS, RankError

HERE = Path(__file__).parent


def ranks_alive(folder):
    """Return the running processes of `launch`, torchrun among them, that work in ``folder``."""
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        ours = "gpumem.ranks.rank" in line and str(folder) in line
        if ours and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.add(process.pid)
    return found


def running(ids):
    """Return the ids in the folder whose processes have not ended."""
    found = set()
    for path in ids.iterdir():
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(int(path.name)).status() != psutil.STATUS_ZOMBIE:
                found.add(int(path.name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    yield
    assert ranks_alive(tmp_path) == set()


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
    # Only what is allocated: gloo's thread drops a gradient whenever it gets to it.
    allocated = [[event for event in run.trace.events if event.change_bytes > 0] for run in runs]
    assert allocated[0] == allocated[1]


@pytest.mark.nightly
def test_nobody_but_this_machine_can_connect():
    for run in lab.launch(rank_jobs.listeners, ranks=2, steps=1):
        assert run.losses == (0.0,)


@pytest.mark.nightly
def test_a_pretended_gpu_travels_to_the_ranks():
    gpu = replace(lab.gpu("h100"), usable_bytes=3 << 30)  # none of the catalogue
    with lab.pretend(gpu):
        (run,) = lab.launch(rank_jobs.capacity, ranks=1, steps=1)
    assert run.losses == (float(3 << 30),)


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_killed_rank_is_named():
    with pytest.raises(RankError, match=r"rank 1 of 2 was killed by signal 9"):
        lab.launch(rank_jobs.failing, ranks=2, how="killed")


@pytest.mark.nightly
def test_a_rank_that_fails_runs_out_of_memory_ends_silently_or_never_is_named():
    with pytest.raises(RankError, match=r"rank 1 of 2 failed:\n.*") as caught:
        lab.launch(rank_jobs.failing, ranks=2)
    assert "ValueError: this rank has had enough" in str(caught.value)
    words = "rank 1 of 2 failed:\nout of memory: asked for 4.00 MiB"
    with lab.pretend(budget_bytes=1 << 20), pytest.raises(RankError, match=words):
        lab.launch(rank_jobs.failing, ranks=2, how="hungry")
    with pytest.raises(RankError, match=r"within 12 seconds.* No rank says why"):
        lab.launch(rank_jobs.silent, ranks=1, timeout_seconds=12)
    with pytest.raises(RankError, match="did not end within 12 seconds"):
        lab.launch(rank_jobs.failing, ranks=2, how="endless", who=5, timeout_seconds=12)


@pytest.mark.nightly
def test_all_ranks_out_of_memory_are_runs_as_elsewhere():
    with lab.pretend(budget_bytes=1 << 20):
        runs = lab.launch(rank_jobs.hungry, ranks=2, late_seconds=1.5)
    assert [run.oom.requested_bytes for run in runs] == [4 << 20] * 2


@pytest.mark.nightly
def test_interrupting_stops_the_ranks(ids):
    def interrupt(*_):
        raise KeyboardInterrupt

    def when_they_run():
        while len(list(ids.iterdir())) < 4:  # two ranks, and what each of them started
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    threading.Thread(target=when_they_run, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lab.launch(rank_jobs.endless, ranks=2, folder=str(ids))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not running(ids)


def test_ranks_end_with_a_launcher_that_is_killed(ids, tmp_path):
    code = (
        "import sys, labkit as lab; sys.path.insert(0, sys.argv[1]); import rank_jobs; "
        "lab.launch(rank_jobs.endless, ranks=2, folder=sys.argv[2])"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(HERE), str(ids)],
        env={**os.environ, "TMPDIR": str(tmp_path / "scratch")},
    )
    while len(list(ids.iterdir())) < 4:
        assert launcher.poll() is None
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    assert len(running(ids)) == 4
    assert ranks_alive(tmp_path) & running(ids)
    deadline = time.monotonic() + 60
    while (ranks_alive(tmp_path) or running(ids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = running(ids)
    for number in left:  # after a failure, too
        os.kill(number, signal.SIGKILL)
    assert not left


# --- what is refused before anything starts ------------------------------------------------------


def test_what_no_other_process_can_import_is_refused(tmp_path):
    typed_in = {"__name__": "__main__"}
    exec("def typed(device):\n    yield 0.0\n", typed_in)
    for experiment in (typed_in["typed"], lambda device: (yield torch.zeros(()))):
        with pytest.raises(InputError, match=r"imports .* from a file: .*%%writefile"):
            lab.launch(experiment)
    (tmp_path / "profile.py").write_text("def typed(device):\n    yield 0.0\n")
    spec = importlib.util.spec_from_file_location("profile", tmp_path / "profile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(InputError, match="Python itself has a module 'profile'"):
        lab.launch(module.typed)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"timeout_seconds": 0}, "timeout_seconds must be"),
        ({"ranks": MOST_RANKS + 1}, "ranks must be"),
        ({"rows": torch.ones(2)}, "rows travels to another process"),
        ({"row": 2}, "unknown argument of shared 'row'"),
    ],
)
def test_bad_arguments_are_refused(arguments, says):
    with pytest.raises(InputError, match=says):
        lab.launch(rank_jobs.shared, **arguments)

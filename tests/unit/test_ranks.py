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


def running(ids):
    """Of the processes named in the folder, those that have not ended."""
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


def test_a_pretended_gpu_travels_with_all_that_it_is():
    card = replace(lab.gpu("h100"), usable_bytes=3 << 30)  # none of the catalogue
    with lab.pretend(card):
        (run,) = lab.launch(rank_jobs.capacity, ranks=1, steps=1)
    assert run.losses == (float(3 << 30),)


IN_A_PACKAGE = """
from .numbers_of import one

def experiment(device):
    import cProfile, torch
    yield torch.tensor(float(one + hasattr(cProfile, "Profile")))
"""


def test_an_experiment_of_a_package_and_beside_files_called_as_libraries(tmp_path, monkeypatch):
    package = tmp_path / "packed_jobs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "numbers_of.py").write_text("one = 1\n")
    (package / "steps.py").write_text(IN_A_PACKAGE)
    (tmp_path / "profile.py").write_text("raise ImportError('not the library')\n")
    monkeypatch.syspath_prepend(tmp_path)
    steps = importlib.import_module("packed_jobs.steps")
    (run,) = lab.launch(steps.experiment, ranks=1, steps=1)
    assert run.losses == (2.0,)


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
        runs = lab.launch(rank_jobs.hungry, ranks=2, late_seconds=1.5)
    assert [run.oom.requested_bytes for run in runs] == [4 << 20] * 2


def test_a_rank_that_ends_without_a_word_is_an_error():
    with pytest.raises(lab.RankError, match=r"No rank says why\. The end of their log:"):
        lab.launch(rank_jobs.silent, ranks=1)


def test_too_slow_ranks_are_stopped():
    with pytest.raises(lab.RankError, match="did not end within 12 seconds"):
        lab.launch(rank_jobs.failing, ranks=2, how="endless", who=5, timeout_seconds=12)


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
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


def test_a_file_called_as_a_module_of_python_is_refused(tmp_path):
    (tmp_path / "profile.py").write_text("def typed(device):\n    yield 0.0\n")
    spec = importlib.util.spec_from_file_location("profile", tmp_path / "profile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(InputError, match="Python has a module 'profile' of its own"):
        lab.launch(module.typed)


@pytest.mark.parametrize("limit", [0, -1, "60", None, True, float("nan"), float("inf")])
def test_bad_time_limits(limit):
    with pytest.raises(InputError, match="timeout_seconds must be a number above 0"):
        lab.launch(rank_jobs.shared, timeout_seconds=limit)


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

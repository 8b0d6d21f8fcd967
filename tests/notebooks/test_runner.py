"""`labkit run` on tiny notebooks: several at a time, Ctrl-C, full disks."""

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import zmq
from lesson_files import write_lesson

from gpumem.hardware.this_machine import machine
from labkit.cli import main
from labkit.course import outcomes, papermill_worker, runner
from labkit.lesson import claims
from labkit.lesson.notebooks import lesson_at

pytestmark = pytest.mark.slow


def run(folder, *paths, **options):
    lessons = [lesson_at(path) for path in paths]
    return runner.run(lessons, folder=folder / "out", **options)


def test_a_killed_worker_fails_its_lesson_alone_and_no_process_is_left(tmp_path):
    bad = write_lesson(
        tmp_path, "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", name="06_bad"
    )
    note = tmp_path / "pid"
    leaving = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(note)!r}, 'w').write(str(child.pid))"
    )
    good = write_lesson(tmp_path, leaving, "print('one cell more')", name="06_good")
    course = run(tmp_path, bad, good, jobs=2)
    found = [(each.name, each.status) for each in course.outcomes]
    assert found == [("06_bad", "failed"), ("06_good", "passed")]
    assert not course.passed
    problem = course.outcomes[0].problems[0]
    assert problem == "its process ended with code -9 before it was finished"
    assert gone(int(note.read_text()))


def gone(pid, *, within_seconds=10):
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.nightly
def test_a_kernel_that_ignores_its_time_limit_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0)
    source = "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(600)"
    [outcome] = run(tmp_path, write_lesson(tmp_path, source), timeout_seconds=4).outcomes
    assert outcome.problems[0] == "stopped after 4 seconds: its kernel did not react"


def test_a_send_does_not_make_the_client_sleep_through_a_reply():
    """The send of an output widget consumes ZeroMQ's notice of the reply; see the worker."""
    client = papermill_worker.attentive_kernel_manager()().client()
    ours, theirs = client.context.socket(zmq.DEALER), zmq.Context().socket(zmq.DEALER)
    channel = client.shell_channel_class(ours, client.session)

    async def wait_for_reply():
        ours.connect(f"tcp://127.0.0.1:{theirs.bind_to_random_port('tcp://127.0.0.1')}")
        asked = asyncio.ensure_future(channel.get_msg())
        await asyncio.sleep(0.5)  # it waits
        client.session.send(theirs, "execute_reply")
        time.sleep(0.2)  # the reply arrives, and the event loop has no turn to see it
        for _ in range(50):  # until a send has taken the notice away
            channel.send(client.session.msg("comm_msg"))
            time.sleep(0.05)
            if not select.select([ours.FD], [], [], 0)[0]:
                break
        return await asyncio.wait_for(asked, timeout=5)

    try:
        assert asyncio.run(wait_for_reply())["msg_type"] == "execute_reply"
    finally:
        for socket in (ours, theirs):
            socket.close(linger=0)


def test_ctrl_c_keeps_finished_lessons(tmp_path):
    pid = tmp_path / "pid"
    first = write_lesson(tmp_path, name="06_first")
    second = write_lesson(
        tmp_path,
        f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)",
        name="06_second",
    )
    third = write_lesson(tmp_path, name="06_third")
    command = [sys.executable, "-m", "labkit", "run", first, second, third]
    command += ["--out", tmp_path / "out"]
    environment = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parent.parent)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 180
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert gone(int(pid.read_text()))
    rows = [re.split(r"\s{2,}", line)[:2] for line in output.splitlines()]
    for name, status in (("first", "passed"), ("second", "interrupted"), ("third", "not started")):
        assert [f"06_{name}", status] in rows
    assert "Finished lessons are kept." in output
    stored = outcomes.read_outcomes(tmp_path / "out")
    assert [outcome.name for outcome in stored] == ["06_first"]
    assert (tmp_path / "out" / "report.html").exists()


def test_a_disk_that_fills_up_loses_nothing_that_was_finished(tmp_path, monkeypatch, capsys):
    first = write_lesson(tmp_path, name="06_first")
    second = write_lesson(tmp_path, name="06_second")
    assert run(tmp_path, first).passed

    def full(*arguments):
        raise OSError(28, "No space left on device")

    kept = (tmp_path / "out" / "06_first.json").read_text()
    monkeypatch.setattr(outcomes, "write_atomic", full)
    [outcome] = run(tmp_path, second).outcomes
    assert outcome.status == "failed"
    assert "could not be stored" in outcome.problems[0]
    assert "No space left on device" in outcome.problems[0]
    assert (tmp_path / "out" / "06_first.json").read_text() == kept
    monkeypatch.setattr("labkit.course.report.write_atomic", full)
    assert main.main(["report", str(tmp_path / "out")]) == 2
    assert "labkit: No space left on device" in capsys.readouterr().err


MIB = 1 << 20
HELD = 300 * MIB
HOLD = f"import time; data = b'x' * {HELD}; time.sleep(3); del data"
IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"


def test_the_peak_is_seen_in_a_child_of_the_kernel(tmp_path):
    """On top come a kernel and its child, 30 to 90 MiB; the worker with papermill does not."""
    [outcome] = run(tmp_path, write_lesson(tmp_path, IN_A_CHILD)).outcomes
    assert HELD + 20 * MIB < outcome.host_peak_bytes < HELD + 130 * MIB
    [stored] = outcomes.read_outcomes(tmp_path / "out")
    assert stored.host_peak_bytes == outcome.host_peak_bytes


def test_the_command_runs_a_lesson_with_its_parameters_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    claim = next(c for c in claims.all_claims().values() if c.unit == "share" and c.needs == "any")
    path = write_lesson(
        tmp_path / "a {b} c",
        'import labkit as lab\nlab.start("06")',
        "import os, sys\nprint(sys.executable, batch_size, os.environ['OMP_NUM_THREADS'])",
        f"lab.claim({claim.id!r}, 0.123)",
        "from gpumem.runs import Run\n"
        'run = Run("baseline", {"batch_size": batch_size}, "simulated", "T4", 5, {"weights": 5})\n'
        "lab.result([run], batch_size=batch_size, precision=precision)",
        result_cell=False,
    )
    out, jobs = tmp_path / "out", str(machine().cores)
    command = ["run", str(path), "--out", str(out), "-p", "batch_size", "4", "--jobs", jobs]
    code = main.main(command)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert f"{sys.executable} 4 1" in (out / "06_saving.ipynb").read_text()
    [stored] = outcomes.read_outcomes(out)
    result = outcomes.stored_result(stored, out)
    assert (result.lesson, result.parameters["batch_size"]) == ("06", 4)
    assert result.runs[0].peak_bytes == 5
    assert result.judgements[0]["id"] == claim.id
    assert "12.3 %" in printed
    assert re.search(r"^06_saving\s+passed\s+\d+\.\d\s+[\d.]+ MiB *$", printed, re.MULTILINE)
    assert f"Report: {(out / 'report.html').resolve()}" in printed
    (out / "report.html").unlink()
    assert main.main(["report", str(out)]) == 0
    assert "12.3 %" in (out / "report.html").read_text()

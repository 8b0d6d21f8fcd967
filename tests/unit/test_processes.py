"""Ending a process with everything that it started."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from gpumem.processes import descendants, end_group, ends_in_order

SLEEP = "import time; time.sleep(600)"

# Starts a child in its own group and one in a session of its own, prints both ids, and waits.
PARENT = f"""
import subprocess, sys
command = [sys.executable, "-c", {SLEEP!r}]
children = [subprocess.Popen(command, start_new_session=new) for new in (False, True)]
print(*[child.pid for child in children], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        process.kill()


def children_of(parent):
    return [psutil.Process(int(number)) for number in parent.stdout.readline().split()]


def has_ended(pid):
    """A process that nobody reaps stays a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_all_descendants_end_and_a_second_call_does_no_harm(parent):
    children = children_of(parent)
    assert descendants(parent) == set(children)
    for _ in range(2):
        end_group(parent)
    assert parent.returncode == -9
    assert all(has_ended(child.pid) for child in children)


def test_children_that_outlive_their_parent_end_too(parent):
    in_group, in_own_session = children_of(parent)
    known = descendants(parent)
    parent.kill()
    parent.wait()
    end_group(parent)
    psutil.wait_procs([in_group], timeout=30)
    assert has_ended(in_group.pid)
    assert in_own_session.is_running()
    end_group(parent, known)
    assert has_ended(in_own_session.pid)


def test_sigterm_is_raised_and_signals_that_are_ignored_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with ends_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(SystemExit, match="143"):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)

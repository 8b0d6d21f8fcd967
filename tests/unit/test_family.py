"""A process and what it started end together."""

import contextlib
import subprocess
import sys
import time

import psutil
import pytest

from labkit.family import Family

# Starts a process for each line that it reads, and says its id.
PARENT = """
import subprocess, sys
for line in sys.stdin:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
"""


@pytest.fixture
def head():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def start_child(head):
    head.stdin.write("another\n")
    head.stdin.flush()
    return psutil.Process(int(head.stdout.readline()))


def has_ended(process):
    """A killed one ends soon; nobody may have asked what became of it."""
    deadline = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
    return True


def test_all_are_killed_and_twice_is_no_harm(head):
    family, child = Family(head), start_child(head)
    for _ in range(2):
        family.kill()
        head.wait()
    assert has_ended(child)


def test_a_child_outlives_its_parent_and_not_the_family(head):
    family, child = Family(head), start_child(head)
    family.look()
    head.kill()
    head.wait()
    assert child.is_running()
    family.kill()
    assert has_ended(child)


def test_who_is_started_after_the_last_look_does_not_escape(head, monkeypatch):
    family, late = Family(head), []

    def look():
        Family.look(family)
        late.append(start_child(head))

    monkeypatch.setattr(family, "look", look)
    family.kill()
    head.wait()
    try:
        assert has_ended(late[0])
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            late[0].kill()

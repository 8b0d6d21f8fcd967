"""A process and what it started: their memory, and that they end together."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labkit.family import Family

MIB = 1 << 20
HELD = 200 * MIB

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


def test_one_that_refuses_saves_no_other(head, monkeypatch):
    family, children = Family(head), [start_child(head) for _ in range(2)]
    kill = psutil.Process.kill

    def refuse(process):
        if process.pid == children[0].pid:
            raise psutil.AccessDenied(process.pid)
        kill(process)

    with monkeypatch.context() as patched:
        patched.setattr(psutil.Process, "kill", refuse)
        family.kill()
    head.wait()
    try:
        assert has_ended(children[1])
    finally:
        children[0].kill()


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


# Its child holds memory, and a child of the child the same pages; says so, and waits.
SHARING = f"""
import os, sys, time
data = b"x" * {HELD}
os.fork()
print("held", flush=True)
time.sleep(600)
"""


def test_memory_is_that_of_the_descendants_alone(head):
    family = Family(head)
    assert family.descendants_bytes() == 0  # the head's own is not asked for
    child = start_child(head)
    deadline = time.monotonic() + 30
    while not (held := family.descendants_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)  # until there is something of it
    assert 0 < held < 50 * MIB
    child.kill()
    assert has_ended(child)
    assert family.descendants_bytes() == 0


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells which pages are shared"
)
def test_pages_that_descendants_share_count_once():
    starter = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHARING!r}])"
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as process:
        family = Family(process)
        try:
            for _ in range(2):
                process.stdout.readline()
            assert HELD < family.descendants_bytes() < HELD + 50 * MIB
        finally:
            family.kill()

"""The stub libraries: built once, by one of two at once, and never half."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from gpumem.inputs import InputError
from phantom_gpu import build_stubs
from phantom_gpu.__main__ import main

BUILD = f"from {build_stubs.__name__} import *; print(stub_libraries(find_wheel())[0].parent)"


def start(cache):
    return subprocess.Popen(
        [sys.executable, "-c", BUILD],
        env=os.environ | {"LABKIT_CACHE": str(cache), "LD_PRELOAD": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_killed_build_leaves_nothing_and_two_at_once_make_one(tmp_path):
    killed = start(tmp_path)
    while not list(tmp_path.glob("phantom/building-*")):
        assert killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, 9)
    killed.communicate()
    assert not [
        path
        for path in (tmp_path / "phantom").iterdir()
        if path.suffix != ".lock" and not path.name.startswith("building-")
    ]
    both = [start(tmp_path), start(tmp_path)]
    answers = [process.communicate()[0] for process in both]
    assert answers[0] == answers[1]
    (folder,) = (
        path
        for path in (tmp_path / "phantom").iterdir()
        if path.name[0].isdigit() and path.is_dir()
    )
    assert answers[0].strip() == str(folder)


@pytest.fixture
def copied_sources(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(build_stubs.NATIVE, tmp_path / "native")
    monkeypatch.setattr(build_stubs, "NATIVE", tmp_path / "native")
    return tmp_path / "native"


def test_other_sources_or_another_torch_are_another_build(copied_sources, monkeypatch):
    wheel = build_stubs.find_wheel()
    key = build_stubs._key(wheel)
    with open(copied_sources / "nccl.c", "a") as source:
        source.write("\n")
    changed = build_stubs._key(wheel)
    assert changed != key
    monkeypatch.setattr(build_stubs.Wheel, "libraries", [copied_sources / "nccl.c"])
    assert build_stubs._key(wheel) != changed


def test_what_is_missing_is_one_sentence(copied_sources, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LABKIT_CACHE", "/proc/nowhere")
    with pytest.raises(InputError, match=r"cannot be written to .*set LABKIT_CACHE"):
        build_stubs.stub_libraries(build_stubs.find_wheel())
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    with open(copied_sources / "nccl.c", "a") as source:
        source.write("no C at all\n")
    with pytest.raises(InputError, match=r"g\+\+ failed: .*nccl\.c"):
        build_stubs.stub_libraries(build_stubs.find_wheel())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["t4", "-c", "1"]) == 2
    assert "is built with g++, which is missing" in capsys.readouterr().err
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="needs Linux on x86-64"):
        build_stubs.find_wheel()


def test_a_full_disk_is_one_sentence(copied_sources, monkeypatch, tmp_path):
    limited = ["prlimit", "--fsize=100000", sys.executable, "-c", BUILD]
    if shutil.which("prlimit") is None:
        pytest.skip("no prlimit here")
    variables = os.environ | {"LABKIT_CACHE": str(tmp_path / "cache"), "LD_PRELOAD": ""}
    done = subprocess.run(limited, env=variables, capture_output=True, text=True)
    assert done.returncode
    assert "InputError" in done.stderr
    assert not [path for path in (tmp_path / "cache/phantom").iterdir() if path.suffix != ".lock"]

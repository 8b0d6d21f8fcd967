"""The folder for what a lesson writes."""

import subprocess
import sys
import time
from pathlib import Path

CODE = """
import sys
import labkit as lab
folder = lab.folder()
assert folder == lab.folder()
(folder / "made_here.py").write_text("answer = 42")
import made_here
print(folder, made_here.answer, flush=True)
sys.stdin.read()
"""


def test_modules_in_it_are_found_and_it_goes_with_the_process():
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    folder, answer = process.stdout.readline().split()
    assert answer == "42"
    assert Path(folder).is_dir()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(folder).exists()

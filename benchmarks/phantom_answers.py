"""What the phantom GPU answers about lesson 26's given script, for machines that cannot run one.

    python benchmarks/phantom_answers.py           # both answers: 40 minutes
    python benchmarks/phantom_answers.py --plain   # without --fix: a minute

Writes ``results/phantom/26_given_job.txt`` and, of the same command with ``--fix``,
``26_given_job_fix.txt``. The script is the one in the lesson's notebook. Each file says first
when, with which versions and by which command it was made. Needs what the phantom GPU needs, or
``.venv-phantom`` (docs/PHANTOM.md).

Limits: nothing was measured on a GPU. Other versions allocate otherwise.
"""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpumem.files import SOURCE, TemporaryFolder, write_atomic
from phantom_gpu.command_line import phantom_python

GPU, SCRIPT = "rtx-4090", "given_job.py"
OPTIONS = f"--gpu {GPU} --steps 2"
ARGUMENTS = f"{SCRIPT} --model meta-llama/Llama-3.1-8B --data data.pt --device cuda"
#: Under the CUDA build, which cannot be imported without the phantom's libraries.
PREPARE = """\
import torch, transformers
torch.save(torch.ones(2, 8, 1024, dtype=torch.int64), "data.pt")
print(f"torch {torch.__version__}, transformers {transformers.__version__}")"""


def main() -> None:
    for fix in [False] if "--plain" in sys.argv[1:] else [False, True]:
        name = f"26_given_job{'_fix' if fix else ''}.txt"
        write_atomic(SOURCE / "results" / "phantom" / name, answer(fix))


def answer(fix: bool) -> str:
    """Return what `labkit phantom` prints about the given script, below two lines of its origin."""
    words = f"phantom {OPTIONS} {'--fix ' if fix else ''}{ARGUMENTS}"
    with TemporaryFolder() as folder:
        (folder / SCRIPT).write_text(given_script(), encoding="utf-8")
        versions = output(["phantom_gpu", GPU, "-c", PREPARE], folder)
        said = output(["labkit", *words.split()], folder)
    made = f"Recorded on {datetime.now(UTC):%Y-%m-%d} on a phantom GPU, not a real one: {versions}"
    return f"{made}\n$ labkit {words}\n\n{said}\n"


def output(words: list[str], folder: Path) -> str:
    """Return what a module of ours prints in ``folder``; what it reports is shown."""
    command = [phantom_python(), "-m", *words]
    paths = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=folder, env=paths, stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        sys.exit("It has no answer. The lines above say why.")
    return done.stdout.strip()


def given_script() -> str:
    """Return the file that the lesson writes."""
    notebook = SOURCE / "notebooks" / "26_capstone_24gb.ipynb"
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = ("".join(cell["source"]) for cell in cells)
    [text] = (text for text in texts if text.startswith("%%writefile"))
    return text.partition("\n")[2] + "\n"


if __name__ == "__main__":
    main()

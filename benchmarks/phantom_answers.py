"""What the phantom GPU answers about the capstones' scripts, for machines that cannot run one.

    python benchmarks/phantom_answers.py 26_given_job   # one of QUESTIONS: some minutes
    python benchmarks/phantom_answers.py                # all: an hour, 40 minutes of it for --fix

Writes ``results/phantom/<question>.txt``. A script is the one in its lesson's notebook, with the
lines changed that its question says. Each file says first when, with which versions and by which
command it was made. Needs what the phantom GPU needs, or ``.venv-phantom`` (docs/PHANTOM.md).

Limits: nothing was measured on a GPU. Other versions allocate otherwise.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpumem.files import SOURCE, TemporaryFolder, write_atomic
from phantom_gpu.command_line import phantom_python

#: Under the CUDA build, which cannot be imported without the phantom's libraries.
PREPARE = """\
import torch, transformers
torch.save(torch.ones({shape}, dtype=torch.int64), "data.pt")
print(f"torch {{torch.__version__}}, transformers {{transformers.__version__}}")"""


@dataclass(frozen=True)
class Question:
    """One command about a script.

    ``shape`` is that of its data. ``launcher`` starts ``script``, which is the given script of the
    notebook with ``changes`` of its text.
    """

    notebook: str
    model: str
    shape: tuple[int, int, int]
    gpu: str
    options: str = "--steps 2"
    launcher: str = ""
    script: str = "given_job.py"
    changes: tuple[tuple[str, str], ...] = ()

    @property
    def words(self) -> str:
        arguments = f"{self.script} --model {self.model} --data data.pt --device cuda"
        return f"phantom --gpu {self.gpu} {self.options} {self.launcher}{arguments}"

    def text(self) -> str:
        """Return the file that the lesson writes, changed."""
        notebook = SOURCE / "notebooks" / f"{self.notebook}.ipynb"
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        texts = ("".join(cell["source"]) for cell in cells)
        parts = [text.partition("\n")[2] for text in texts if text.startswith("%%writefile")]
        script = "".join(f"{part}\n" for part in parts)
        for before, after in self.changes:
            if script.count(before) != 1:
                sys.exit(f"{self.notebook} has not one {before!r}: its lines have changed.")
            script = script.replace(before, after)
        return script

    def answer(self) -> str:
        """Return what `labkit phantom` prints about the script, below two lines of its origin."""
        with TemporaryFolder() as folder:
            (folder / self.script).write_text(self.text(), encoding="utf-8")
            prepare = PREPARE.format(shape=self.shape)
            versions = output(["phantom_gpu", self.gpu, "-c", prepare], folder)
            said = output(["labkit", *self.words.split()], folder)
        date = f"{datetime.now(UTC):%Y-%m-%d}"
        made = f"Recorded on {date} on a phantom GPU, not a real one: {versions}"
        return f"{made}\n$ labkit {self.words}\n\n{said}\n"


CAPSTONE_26 = Question(
    "26_capstone_24gb", "meta-llama/Llama-3.1-8B", shape=(2, 8, 1024), gpu="rtx-4090"
)
CAPSTONE_27 = Question(
    "27_capstone_8x80gb",
    "Llama-2-70B",
    shape=(2, 16, 4096),
    gpu="h100",
    options="--gpus 8 --steps 2",
    launcher="-- torchrun --standalone --nproc-per-node 8 ",
)
FUSED = ("lr=1e-3)", "lr=1e-3, fused=True)")
SEGMENTS = 'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"'
EXPANDABLE = ("import sys\n", f"import sys\n\n{SEGMENTS}\n")
QUESTIONS = {
    "26_given_job": CAPSTONE_26,
    "26_given_job_fix": replace(CAPSTONE_26, options="--steps 2 --fix"),
    "27_given_job": CAPSTONE_27,
    "27_one_line": replace(CAPSTONE_27, script="one_line.py", changes=(FUSED,)),
    "27_one_line_76gib": replace(
        CAPSTONE_27,
        options="--gpus 8 --budget 76GiB --steps 2",
        script="one_line.py",
        changes=(FUSED,),
    ),
    "27_two_lines": replace(CAPSTONE_27, script="two_lines.py", changes=(FUSED, EXPANDABLE)),
}


def main() -> None:
    for name in sys.argv[1:] or QUESTIONS:
        write_atomic(SOURCE / "results" / "phantom" / f"{name}.txt", QUESTIONS[name].answer())


def output(words: list[str], folder: Path) -> str:
    """Return what a module of ours prints in ``folder``; what it reports is shown."""
    command = [phantom_python(), "-m", *words]
    paths = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=folder, env=paths, stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        sys.exit("It has no answer. The lines above say why.")
    return done.stdout.strip()


if __name__ == "__main__":
    main()

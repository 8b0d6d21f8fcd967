"""Judge a training script by a job: does it fit the GPU, in time, and does the model learn?

The script is started as below, or with torchrun, where the job has several GPUs:

    python SCRIPT --model MODEL --data FILE --out FOLDER --device cuda

``FILE`` holds a tensor of token ids, (steps, rows of all GPUs, length), as `torch.save` writes it.
The script makes one optimizer step of each entry, and writes the model, or its adapter, into
``FOLDER`` with ``save_pretrained``. It runs on the CPU with a small model, for the loss, and at
full size on phantom GPUs, for bytes and counted work.

Limits: time is the bound of the counted work, without what ranks wait for. The small model has the
first layers of SmolLM2-135M, so that its loss says whether a script trains, not how well 8 billion
weights would.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gpumem.files import TemporaryFolder
from gpumem.hardware import catalogue
from gpumem.inputs import InputError, read_record
from gpumem.models.catalogue import model_info, pretrained
from gpumem.models.text import batches
from gpumem.units import format_bytes
from labkit.exercises.checks import Correct, NotAttempted
from labkit.loss_comparison import held_out_loss
from phantom_gpu.command_line import phantom_python
from phantom_gpu.report import FitReport
from phantom_gpu.report_records import ProcessReport

#: Of the small model and its data, whose tokens are bytes.
LAYERS, TOKENS, SMALL_STEPS, SMALL_ROWS, SMALL_LENGTH = 6, 256, 12, 4, 64
STEPS = 2  # at full size


@dataclass(frozen=True)
class Job:
    """What is to be done, and within what.

    ``rows`` and ``length`` are those of one optimizer step on each GPU, ``seconds`` the most that
    its bound may be, ``most_loss`` the most for the small model's held-out loss, in nats per token.
    """

    model: str
    gpu: str
    rows: int
    length: int
    seconds: float
    most_loss: float
    gpus: int = 1

    @property
    def least_flops(self) -> float:
        """What a step of each GPU computes at least: for adapters on a checkpointed model 4
        operations a weight and token, less a little where the inputs' gradient ends."""
        info = model_info(self.model)
        weights = info.parameters - info.config["vocab_size"] * info.config["hidden_size"]
        return 3.8 * weights * self.rows * self.length


def judge(answer: Any, job: Job) -> str | Correct:
    """Return why the script, a path or its text, does not do the job, or its score."""
    with TemporaryFolder() as folder:
        script = _script(answer, folder)
        loss = _loss(script, job, folder)
        if loss > job.most_loss:
            return (
                f"The small model's held-out loss ends at {loss:.2f} nats, and at most "
                f"{job.most_loss:.2f} are asked for. Does every piece count, and is the learning "
                "rate that of your optimizer?"
            )
        verdict = _phantom(script, job, folder)
    return _of_a_step(verdict, job) or _score(verdict, job, loss)


def _script(answer: Any, folder: Path) -> Path:
    if not isinstance(answer, str | Path):
        raise InputError("give the path of your script, such as 'job.py'")
    if "\n" in str(answer):
        script = folder / "job.py"
        script.write_text(str(answer), encoding="utf-8")
        return script
    script = Path(answer).resolve()
    if not script.is_file():
        raise NotAttempted(f"There is no file {answer} in {Path.cwd()}.")
    return script


def _loss(script: Path, job: Job, folder: Path) -> float:
    """Run the script on the CPU and return the held-out loss of what it saved."""
    from transformers import AutoModelForCausalLM

    small, out, data = folder / "small", folder / "out", folder / "small.pt"
    _small_model().save_pretrained(small)
    ranks = min(job.gpus, 2)
    text = {"batch_size": SMALL_ROWS * ranks, "seq_len": SMALL_LENGTH, "steps": SMALL_STEPS}
    torch.save(torch.stack(list(batches(device="cpu", **text))), data)
    options = ["--model", str(small), "--data", str(data), "--out", str(out), "--device", "cpu"]
    command = [sys.executable, *_launch(ranks), str(script), *options]
    done = _run(command, folder)
    if done.returncode:
        raise InputError(f"on the CPU, with a small model, it ended with {_last_line(done.stderr)}")
    if not out.is_dir():
        raise InputError("it saved nothing in the folder that --out names: use save_pretrained")
    trained = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    return held_out_loss(trained, rows=8, seq_len=SMALL_LENGTH)


@cache
def _small_model() -> Any:
    model, _ = pretrained("SmolLM2-135M")
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    model.resize_token_embeddings(TOKENS)
    model.config.tie_word_embeddings = False  # as in large models, and simpler to shard
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def _launch(ranks: int) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return torchrun if ranks > 1 else []


def _phantom(script: Path, job: Job, folder: Path) -> FitReport:
    data = folder / "data.pt"
    torch.save(torch.ones(STEPS, job.gpus * job.rows, job.length, dtype=torch.int64), data)
    options = ["--model", job.model, "--data", str(data), "--out", str(folder / "full")]
    labkit = [phantom_python(), "-m", "labkit", "phantom", "--json", "--steps", str(STEPS)]
    labkit += ["--gpu", job.gpu, "--gpus", str(job.gpus)]
    done = _run([*labkit, *_launch(job.gpus), str(script), *options, "--device", "cuda"], folder)
    if not done.stdout.strip():
        raise InputError(_last_line(done.stderr))
    found = json.loads(done.stdout)
    return FitReport(
        gpu=catalogue.gpu(job.gpu),
        gpus=job.gpus,
        budget_bytes=found["budget_bytes"],
        answers=[read_record(ProcessReport, each, "its answer") for each in found["processes"]],
        folder=str(folder),
        returncode=found["returncode"],
        hung=found["hung"],
    )


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")


def _last_line(text: str) -> str:
    return (text.strip() or "no word").splitlines()[-1].strip()


def _of_a_step(verdict: FitReport, job: Job) -> str | None:
    if not verdict.fits:
        remedies = max((len(answer.remedies) for answer in verdict.answers), default=0)
        hint = f" labkit phantom --fix tries {remedies} remedies on it." if remedies else ""
        return verdict.headline() + hint
    for answer in verdict.answers:
        if answer.steps != STEPS:
            return f"It made {answer.steps} optimizer steps of {STEPS} entries: one for each."
        if verdict.least_seconds(answer) is None:
            return "Its work was not counted: each process may use one GPU only."
    least = job.least_flops
    done = min(sum(answer.work.flops.values()) for answer in verdict.answers)
    if done < least:
        return (
            f"A step computes {done / 1e12:.0f} TFLOP. {job.rows} rows of {job.length} tokens take "
            f"at least {least / 1e12:.0f}: does it train on all of them?"
        )
    seconds = max(map(verdict.least_seconds, verdict.answers))  # the slowest rank's
    if seconds > job.seconds:
        return (
            f"It fits, and a step takes at least {seconds:.2f} s; the deadline allows "
            f"{job.seconds:.2f} s. {verdict.a_step().partition(':')[0].capitalize()}."
        )
    return None


def _score(verdict: FitReport, job: Job, loss: float) -> Correct:
    reserved = format_bytes(verdict.peak_reserved_bytes)
    seconds = max(map(verdict.least_seconds, verdict.answers))
    points = 100 * job.seconds / seconds * job.most_loss / loss
    return Correct(
        f"It does the job, with {points:.0f} points: {reserved} of "
        f"{format_bytes(verdict.budget_bytes)} reserved, at least {seconds:.2f} of "
        f"{job.seconds:.2f} s a step, and a loss of {loss:.2f} where {job.most_loss:.2f} is "
        "allowed. Memory that stays empty earns nothing; less time or a lower loss does."
    )

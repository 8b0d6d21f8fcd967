"""How far simulating and tracking are from what the allocator says, set-up by set-up.

    python benchmarks/accuracy.py                      # on the CPU: small set-ups
    python benchmarks/accuracy.py --gpu --out results  # on a CUDA machine: real sizes
    python benchmarks/accuracy.py --only LoRA          # set-ups whose name contains the text

The truth on the CPU is the allocator's own record (the profiler's memory events); on CUDA it is
``max_memory_allocated`` above what was allocated before. Errors are signed, in per cent of the
truth: negative means that the estimate is too low. The last line sums up their sizes. ``--out``
stores the table as JSON in ``<out>/<device>/accuracy.json``, with versions and date.

The columns for reserved memory stay empty until the allocator itself is replayed in simulation.

Limits: on CUDA the truth holds kernels' workspaces, which are no tensors (cuBLAS keeps tens of
MiB) and the allocator's rounding to 512 bytes; both are part of the error. Set-ups that do not fit
the card are listed and not counted.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import labkit as lab
from benchmarks.setups import SETUPS
from labkit import hardware
from labkit.cli import gpu_key
from labkit.memory import InputError, Run, format_bytes
from labkit.results import write_atomic

Experiment = Callable[..., Iterator[torch.Tensor]]
FILE = "accuracy.json"
SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One set-up. Bytes; None where it does not fit or nothing replays it yet."""

    setup: str
    truth_bytes: int | None
    tracked_bytes: int | None
    simulated_bytes: int
    reserved_bytes: int | None = None
    simulated_reserved_bytes: int | None = None

    def error(self, estimate_bytes: int | None) -> float | None:
        """Per cent of the truth by which ``estimate_bytes`` is too high."""
        if estimate_bytes is None or not self.truth_bytes:
            return None
        return 100 * (estimate_bytes - self.truth_bytes) / self.truth_bytes

    @property
    def reserved_error(self) -> float | None:
        if self.simulated_reserved_bytes is None or not self.reserved_bytes:
            return None
        excess_bytes = self.simulated_reserved_bytes - self.reserved_bytes
        return 100 * excess_bytes / self.reserved_bytes


# --- on the CPU, small -------------------------------------------------------------------------


def on_cpu(name: str, experiment: Experiment) -> Row:
    """The allocator's record, the tracker and the simulation of one small set-up."""
    truth, tracked = lab.measure(experiment, steps=3, track=False), lab.measure(experiment, steps=3)
    simulated = lab.simulate(experiment)
    return Row(name, truth.peak_bytes, tracked.peak_bytes, simulated.peak_bytes)


# --- on CUDA, at real size ---------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One training set-up of a model of the table."""

    model: str
    precision: str
    checkpointing: bool
    attention: str
    optimizer: str
    batch_size: int
    seq_len: int

    def __str__(self) -> str:
        checkpointed = ", checkpointing" if self.checkpointing else ""
        return (
            f"{self.model}, {self.precision}{checkpointed}, {self.attention}, {self.optimizer}, "
            f"{self.batch_size} × {self.seq_len}"
        )


def settings() -> Iterator[Setting]:
    """A full grid of a small model, and a large model's diagonal."""
    for precision, checkpointing, attention, optimizer in itertools.product(
        ("fp32", "amp-bf16", "bf16"), (False, True), ("sdpa", "eager"), ("AdamW", "SGD")
    ):
        yield Setting("SmolLM2-135M", precision, checkpointing, attention, optimizer, 8, 1024)
    yield Setting("Llama-3.2-1B", "fp32", False, "sdpa", "AdamW", 2, 1024)
    yield Setting("Llama-3.2-1B", "amp-bf16", False, "sdpa", "AdamW", 4, 2048)
    yield Setting("Llama-3.2-1B", "amp-bf16", True, "eager", "AdamW", 2, 1024)
    yield Setting("Llama-3.2-1B", "bf16", False, "sdpa", "AdamW", 4, 2048)
    yield Setting("Llama-3.2-1B", "bf16", True, "sdpa", "SGD", 8, 2048)
    yield Setting("Qwen2.5-0.5B", "amp-fp16", False, "sdpa", "AdamW", 4, 1024)
    yield Setting("GPT-2", "amp-bf16", False, "eager", "AdamW", 8, 1024)


def training(setting: Setting) -> Experiment:
    """The set-up as an experiment. Half precision trains without a scaler: bytes are the same."""

    def experiment(device: torch.device) -> Iterator[torch.Tensor]:
        dtype = lab.dtype_of(setting.precision)
        model = lab.model(setting.model, device=device, dtype=dtype, attention=setting.attention)
        lab.checkpointing(model, setting.checkpointing)
        optimizer = getattr(torch.optim, setting.optimizer)(model.parameters(), lr=1e-5)
        for tokens in lab.batches(
            device=device, batch_size=setting.batch_size, seq_len=setting.seq_len
        ):
            with lab.autocast(device, setting.precision):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    return experiment


def on_gpu(name: str, experiment: Experiment) -> Row:
    """What CUDA's allocator, the tracker and the simulation say of one set-up at real size."""
    simulated = lab.simulate(experiment, gpu=_card(), steps=2)
    run = lab.measure(experiment, steps=2)
    if run.oom is not None:
        return Row(name, None, None, simulated.peak_bytes)
    return Row(
        name, max(run.step_peaks_bytes), _tracked(run), simulated.peak_bytes, run.reserved_bytes
    )


def _tracked(run: Run) -> int | None:
    return run.trace.peak_bytes if run.trace is not None else None


def _card() -> str:
    """This GPU's name in the catalogue. Bytes do not depend on it, so any card does."""
    try:
        return hardware.gpu(hardware.machine().name).key
    except InputError:
        return next(iter(hardware.GPUS))


# --- tables and files --------------------------------------------------------------------------

COLUMNS = ("truth", "simulated", "tracked", "reserved", "simulated")


def table(rows: list[Row]) -> str:
    """The set-ups one per line, then median, 95th percentile and maximum of the errors' sizes."""
    width = max(len(row.setup) for row in rows) + 2
    lines = [
        f"{'':{width}}{'allocated':>12}{'error of':>12}{'error of':>12}{'reserved':>12}"
        f"{'error of':>12}",
        f"{'set-up':{width}}" + "".join(f"{column:>12}" for column in COLUMNS),
    ]
    for row in rows:
        truth = "no fit" if row.truth_bytes is None else format_bytes(row.truth_bytes)
        reserved = "–" if row.reserved_bytes is None else format_bytes(row.reserved_bytes)
        lines.append(
            f"{row.setup:{width}}{truth:>12}{_per_cent(row.error(row.simulated_bytes)):>12}"
            f"{_per_cent(row.error(row.tracked_bytes)):>12}{reserved:>12}"
            f"{_per_cent(row.reserved_error):>12}"
        )
    for label, figures in summary(rows).items():
        cells = [_per_cent(figures[key], sign="") for key in ("simulated", "tracked", "reserved")]
        lines.append(f"{label:{width}}{'':12}{cells[0]:>12}{cells[1]:>12}{'':12}{cells[2]:>12}")
    lines.append("Reserved memory is not simulated yet; it comes with the replay of the allocator.")
    return "\n".join(lines)


def summary(rows: list[Row]) -> dict[str, dict[str, float | None]]:
    """Size of the errors, in per cent, for each estimate; None where there is none."""
    errors = {
        "simulated": [row.error(row.simulated_bytes) for row in rows],
        "tracked": [row.error(row.tracked_bytes) for row in rows],
        "reserved": [row.reserved_error for row in rows],
    }
    sizes = {key: sorted(abs(e) for e in values if e is not None) for key, values in errors.items()}

    def each(figure: Callable[[list[float]], float]) -> dict[str, float | None]:
        return {key: figure(values) if values else None for key, values in sizes.items()}

    return {
        "median": each(statistics.median),
        "95th percentile": each(lambda values: values[math.ceil(0.95 * len(values)) - 1]),
        "maximum": each(max),
    }


def _per_cent(value: float | None, sign: str = "+") -> str:
    return "–" if value is None else f"{value:{sign}.3f} %"


def store(rows: list[Row], folder: Path) -> Path:
    """Write the rows with the machine's versions; the file is whole or not there."""
    here = hardware.machine()
    path = folder / (gpu_key(here.name) if here.can_measure else "cpu") / FILE
    record = {
        "schema": SCHEMA,
        "machine": {"kind": here.kind, "name": here.name, "versions": here.versions},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": [asdict(row) for row in rows],
        "error_sizes_per_cent": summary(rows),
    }
    write_atomic(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="real sizes, on this CUDA machine")
    parser.add_argument("--only", default="", metavar="TEXT", help="set-ups named like this")
    parser.add_argument("--out", type=Path, metavar="DIR", help="store the table as JSON too")
    options = parser.parse_args(arguments)
    here = hardware.machine()
    if options.gpu and not here.can_measure:
        print(f"--gpu needs a CUDA machine. {here.note}", file=sys.stderr)
        return 2
    if options.gpu:
        chosen = {str(setting): training(setting) for setting in settings()}
        judge = on_gpu
    else:
        chosen, judge = dict(SETUPS), on_cpu
    chosen = {name: e for name, e in chosen.items() if options.only.lower() in name.lower()}
    if not chosen:
        print(f"no set-up is named like {options.only!r}", file=sys.stderr)
        return 2
    print(f"{here.name}, torch {here.versions['torch']}, "
          f"transformers {here.versions['transformers']}")  # fmt: skip
    rows = []
    for name, experiment in tqdm(chosen.items(), leave=False, disable=None):
        gc.collect()
        rows.append(judge(name, experiment))
    print(table(rows))
    if options.out is not None:
        print(f"stored in {store(rows, options.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

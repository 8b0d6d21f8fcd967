"""The headline runs: what they train, and within whose memory.

``HEADLINES`` is the table. `labkit.headline_runs` runs one of them, `labkit record` stores it as
``results/<gpu>/headline-<name>.json``, `recorded` reads the files back.

How the recipes were chosen: simulated with an H200's kernels under the pretended card's budget, the
largest power of two as batch that leaves a tenth of it free. The 8B is trained by a way that keeps
everything on the card (`lab.advise("Llama-3.1-8B", "rtx-4090", only="full")` ranks what there is;
its own first choices lean on host memory).

Limits: a pretended budget caps PyTorch's allocator; the kernels are this GPU's own, and so are
their workspaces and speed.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.catalogue import CUDA_CONTEXT_BYTES, GPUS
from labkit.headline_records import PREFIX, Headline, Job
from labkit.memory import InputError, one_of
from labkit.recipes import Recipe
from labkit.results import read_file, read_folders

#: 48 × 10⁹ bytes less the CUDA context: cards sold as 48 GB report 44 to 47.5 GiB, this is 44.2.
BUDGET_48_GB = 48 * 10**9 - CUDA_CONTEXT_BYTES

_QLORA = Recipe(precision="bf16", lora=16, quantize="nf4-double", optimizer="adamw8bit",
                checkpointing=True, chunked_loss=True)  # fmt: skip
_PLAIN = Recipe(seq_len=1024, attention="eager")
_SPARING = Recipe(seq_len=1024, accumulate=16, precision="amp-bf16", checkpointing=True,
                  chunked_loss=True)  # fmt: skip


def _steps(start: Recipe, *steps: tuple[str, dict[str, Any]]) -> tuple[tuple[str, Recipe], ...]:
    """Recipes of which each has what the one before has, and one change more."""
    ladder = []
    for label, change in steps:
        start = replace(start, **change)
        ladder.append((label, start))
    return tuple(ladder)


_ALL = (
    Job(
        name="8b-full-24gb",
        shows="Whether all weights of an 8B can be trained on a card of 24 GB.",
        model="Llama-3.1-8B",
        within=GPUS["rtx-4090"].name,
        budget_bytes=GPUS["rtx-4090"].budget_bytes,
        recipes=(("bf16, Adafactor in backward",
                  Recipe(batch_size=2, seq_len=1024, precision="bf16", optimizer="adafactor",
                         optimizer_in_backward=True, checkpointing=True, chunked_loss=True)),),
    ),
    Job(
        name="70b-qlora-80gb",
        shows="Whether a 70B in 4 bits can be adapted on a card of 80 GB.",
        model="Llama-2-70B",
        within=GPUS["h100"].name,
        budget_bytes=GPUS["h100"].budget_bytes,
        recipes=(("QLoRA", _QLORA.but(batch_size=4, seq_len=2048)),),
    ),
    Job(
        name="70b-qlora-48gb",
        shows="Whether it can be on a card of 48 GB.",
        model="Llama-2-70B",
        within="a card of 48 GB",
        budget_bytes=BUDGET_48_GB,
        recipes=(("QLoRA", _QLORA.but(batch_size=1, seq_len=1024)),),
    ),
    Job(
        name="stack",
        shows="What one small job takes, 16 sequences a step: plain, with all that trains the "
        "same, and with what trains otherwise.",
        model="SmolLM2-135M",
        recipes=(
            ("plain", _PLAIN.but(batch_size=16)),
            ("the same training", _SPARING),
            ("changed training",
             _SPARING.but(precision="bf16", lora=16, quantize="nf4-double", optimizer="adamw8bit")),
        ),
    ),
    Job(
        name="t4-batches",
        shows="Which batch is the largest that fits 16 GB, technique by technique.",
        model="Qwen2.5-0.5B",
        within=GPUS["t4"].name,
        budget_bytes=GPUS["t4"].budget_bytes,
        largest_batch=True,
        recipes=_steps(
            Recipe(seq_len=512, attention="eager"),
            ("plain", {}),
            ("+ AMP", {"precision": "amp-fp16"}),
            ("+ SDPA", {"attention": "sdpa"}),
            ("+ checkpointing", {"checkpointing": True}),
            ("+ chunked loss", {"chunked_loss": True}),
            ("+ 8-bit optimizer", {"optimizer": "adamw8bit"}),
        ),
    ),
)  # fmt: skip
#: Every headline by name.
HEADLINES: Mapping[str, Job] = {job.name: job for job in _ALL}


# --- files ----------------------------------------------------------------------------------------


def load(path: Path | str) -> Headline:
    """The headline stored at ``path``.

    Raises:
        InputError: there is no such file, it is too large, not JSON, not a headline of the table,
            or that of another name.
    """
    path = Path(path)
    found = read_file(path, _known, "a headline")
    if path.name != found.job.file:
        raise InputError(f"{path} holds the headline {found.name!r}")
    return found


def _known(record: Any) -> Headline:
    found = Headline.from_dict(record)
    one_of(found.name, HEADLINES, "headline")
    return found


def recorded(folder: Path | str | None = None) -> dict[str, list[Headline]]:
    """What each GPU gave, by the name of its folder, in the order of the table.

    Args:
        folder: holds ``<gpu>/headline-<name>.json``; the course's own recordings if None.

    A file that cannot be read is named in a warning and left out.
    """
    found = list(read_folders(folder, f"{PREFIX}*.json", load).items())
    order = list(HEADLINES)
    return {
        gpu: sorted((each for (name, _), each in found if name == gpu),
                    key=lambda headline: order.index(headline.name))
        for (gpu, _), _ in found
    }  # fmt: skip

"""advise_serving(): whether a model answers so many users on a GPU, and else what makes it.

    print(lab.advise_serving("Llama-3.1-8B", gpu="rtx-4090", users=64))

What was asked for is estimated, then one change after another, the mildest first: another cache,
fewer users at a time, more or larger GPUs, which change no answer; numbers that are rounded; and
shorter prompts. What changes nothing is tried again with what rounds where neither is enough. An
option is an estimate that was run, never a subtraction.

Limits: those of `gpumem.estimation.serving`. Several GPUs hold a copy each and share the users: one
model over several GPUs is not estimated, nor prompts read in pieces by ``generate``.
"""

import time
from dataclasses import dataclass
from typing import Any

from gpumem.estimation.advice import Advised, common_fields
from gpumem.estimation.generation import Serving
from gpumem.estimation.paged import UTILIZATION
from gpumem.estimation.serving_search import NOTHING, Answering, Search
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import MARGIN, MOST_GPUS, Gpu, room_bytes
from gpumem.inputs import positive_int
from gpumem.models.config import find_generator
from gpumem.torch_release import following
from gpumem.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class ServingAdvice(Advised):
    """What `advise_serving` found; ``options`` are the changes with which it fits, the mildest
    first, empty where it fits as it is.

    Attributes:
        serving: what was asked.
        asked: the same, as it was estimated.
        most_users: how many users' conversations of this length fit, all GPUs together.
        longest_tokens: the longest conversation with which as many users fit, prompt and answer.
        tried: how many estimates were run.
    """

    serving: Serving
    asked: Answering
    most_users: int
    longest_tokens: int
    tried: int

    @property
    def fits(self) -> bool:
        """Whether what was asked for fits with the margin, unchanged."""
        return self.asked.fits

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return {
            **super().to_dict(),
            "fits": self.fits,
            "serving": self.serving.to_dict(),
            "asked": self.asked.to_dict(),
        }

    def __str__(self) -> str:
        """Write the verdict first, then what fits, or what makes it fit."""
        verdict = "fits" if self.fits else "does not fit"
        lines = [
            f"{self._where()}: {verdict}",
            f"  {self.serving}",
            f"  It may take {format_bytes(self.room_bytes)}: the "
            f"{format_bytes(self.capacity_bytes)} that PyTorch gets, less {self.margin:.0%}.",
            f"  As asked it takes {format_bytes(self.asked.needed_bytes)}{_bound(self.asked)}.",
            "",
            f"Most users with conversations of this length: {self.most_users:,}.",
            f"Longest conversation of {self.serving.who}: {self.longest_tokens:,} tokens.",
        ]
        if not self.fits and not self.options:
            lines += ["", "No change that was tried makes it fit."]
        if self.options:
            lines += ["", "What makes it fit, the mildest first:"]
        for option in self.options:
            each = " of each GPU" if option.gpus > 1 else ""
            lines += [
                f"{option.name}: {option.serving}",
                f"  takes    {format_bytes(option.needed_bytes)}{each}{_bound(option)}",
                f"  changes  {option.changes}",
                *(f"  {word:9}{line}" for word, line in _labelled(option.code)),
            ]
        taken = f"  vLLM takes {UTILIZATION:.0%} of the GPU at once, whatever its blocks hold."
        paged = any(option.serving.cache == "paged" for option in (self.asked, *self.options))
        return "\n".join(
            [
                *lines,
                "",
                "  A bound is by memory bandwidth; real answers come more slowly.",
                *([taken] if paged else []),
                f"  {self.tried} estimates run, {self.ruled_out} ruled out by arithmetic, in "
                f"{self.seconds:.0f} s, by the rules of PyTorch {self.torch}.",
                *(f"  Not tried: {sentence}" for sentence in self.refused),
            ]
        )


def _bound(option: Answering) -> str:
    bound = option.bound_tokens_per_second
    return f", bound ≤ {bound:,.0f} tokens a second" if bound else ""


def _labelled(code: str) -> list[tuple[str, str]]:
    return [("write" if not number else "", line) for number, line in enumerate(code.split("\n"))]


def advise_serving(
    model: Any,
    gpu: str | Gpu,
    *,
    gpus: int = 1,
    serving: Serving | None = None,
    margin: float = MARGIN,
    torch: str | None = None,
    **changes: Any,
) -> ServingAdvice:
    """Return whether ``model`` answers so on ``gpu``, how far it could go, and else what helps.

    Args:
        model: a model of the table, a folder with a ``config.json``, a hub id when online, a
            transformers config.
        gpu: a name from the catalogue.
        gpus: how many of them, each with a copy of the model; they share the users.
        serving: how it answers; by default one user's 2048 + 512 tokens in bf16.
        margin: the share of the GPU's budget that is to stay free. vLLM leaves its own.
        torch: the release of PyTorch that will run, as "2.10"; by default the installed one.
        **changes: fields of ``serving`` to change, ``users=16``.

    Raises:
        InputError: unknown model, GPU, field or release, a bad number, or what `serve` refuses.
    """
    started = time.perf_counter()
    gpu = catalogue.gpu(gpu)
    room_bytes(gpu.budget_bytes, margin)
    gpus = positive_int(gpus, "gpus", most=MOST_GPUS)
    serving = (serving or Serving()).but(**changes)
    name = find_generator(model)[0]
    search = Search(model, name, gpu, gpus, serving, margin)
    with following(torch):
        found = search.run(search.each)
        most, longest = found.most_users(), found.longest_prompt_tokens()
        asked = search.option("as asked", NOTHING, found)
        if not asked.fits:
            search.all(found, most, longest)
        return ServingAdvice(
            **common_fields(search, name, started),
            serving=serving,
            asked=asked,
            most_users=most * gpus,
            longest_tokens=longest + serving.new_tokens if longest else 0,
            options=tuple(search.options),
            tried=search.tried,
        )

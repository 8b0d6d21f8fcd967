"""advise(): recipes that fit a model on a card, what each costs, what it gives up.

    print(lab.advise("Llama-3.1-8B", gpu="rtx-4090"))

Every way to train (`labkit.candidates`) is tried with more and more memory savers, each with the
largest batch that fits (`labkit.recipe_search`). What arithmetic alone rules out is not simulated;
everything shown was. Ways that change the training least come first, among equals the one with the
lowest bound on its seconds per token: the bound of the roofline model (arithmetic at the card's
rate, or bytes moved at its bandwidth, whichever takes longer) plus the bytes that cross the host's
link. Source: https://doi.org/10.1145/1498765.1498785.

Limits: the bound is no time: no kernel reaches peak rates, and caches may spare memory traffic.
Float32 products count at half the 16-bit rate, as TF32's. Several cards are equal and
train in data parallel, each holding everything, and the bound leaves their exchange out; sharding a
model over cards is not tried yet. Whether the host has the memory is for the reader to see.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import hardware
from labkit.catalogue import Gpu
from labkit.memory import InputError, one_of, positive_int
from labkit.model_source import find_config
from labkit.recipe_search import GROUPS, Option, Search, room_bytes
from labkit.recipes import MOST_SEQUENCE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KINDS = ("full", "lora")
#: Of the card's budget. Kernels' own workspaces are not simulated, and the capacity that cards of
#: one name report differs by up to 0.5 GiB: 2 to 5 % of most cards of the catalogue.
MARGIN = 0.05
MOST_CARDS = 1024


@dataclass(frozen=True)
class Advice:
    """What `advise` found.

    Attributes:
        model, gpu, gpus, seq_len, only, margin: what was asked.
        capacity_bytes: what the card leaves PyTorch's allocator.
        options: every recipe simulated, the best first.
        ruled_out: how many recipes arithmetic alone showed too large.
        refused: why ways could not be tried, a sentence each.
        larger_gpu: where nothing fits, the smallest card of the catalogue that holds the smallest
            option; None if no card does, or something fits.
        seconds: how long the advice took.
    """

    model: str
    gpu: str
    gpus: int
    seq_len: int
    only: str | None
    margin: float
    capacity_bytes: int
    options: tuple[Option, ...]
    ruled_out: int
    refused: tuple[str, ...]
    larger_gpu: str | None
    seconds: float = field(compare=False)
    source: Any = field(repr=False, compare=False)

    @property
    def room_bytes(self) -> int:
        """What a recipe may take: the capacity less the margin."""
        return room_bytes(self.capacity_bytes, self.margin)

    @property
    def fitting(self) -> tuple[Option, ...]:
        """The options that fit with the margin, the best first."""
        return tuple(option for option in self.options if option.fits)

    @property
    def best(self) -> Mapping[str, Option]:
        """The best of each group that fits: ``"same"``, ``"changed"``."""
        return {option.group: option for option in reversed(self.fitting)}

    @property
    def smallest(self) -> Option:
        """The option that takes the least memory."""
        return min(self.options, key=lambda option: (option.needed_bytes, option.rank()))

    @property
    def frontier(self) -> tuple[Option, ...]:
        """Fitting options that no other of their group beats in both memory and bound.

        By group, the smallest first.
        """
        found: list[Option] = []
        by_memory = sorted(self.fitting, key=lambda option: (option.needed_bytes, option.rank()))
        for option in sorted(by_memory, key=lambda option: GROUPS.index(option.group)):
            last = found[-1] if found and found[-1].group == option.group else None
            if last is None or option.seconds_per_token < last.seconds_per_token:
                found.append(option)
        return tuple(found)

    def write(self, path: str | Path, *, which: str | Option | None = None) -> Path:
        """Write a training script for one option.

        Args:
            path: the file; one that exists is left alone.
            which: ``"same"``, ``"changed"``, or an option; by default the best of all.

        Raises:
            InputError: the file exists, nothing fits, or the advice is for several cards.
        """
        from labkit.train_script import write_script

        if not self.best:
            raise InputError(f"nothing fits {self.gpu}, so there is no script to write")
        if not isinstance(which, Option):
            which = self.best[one_of(which or next(iter(self._in_order())), self.best, "group")]
        if which.recipe.ranks < self.gpus:
            raise InputError(
                "a script for several cards is written where they share the model, and this "
                "recipe has a copy on each: name another option, or ask for advice without gpus"
            )
        return write_script(path, which.recipe, model=self.source, needed_bytes=which.needed_bytes,
                            gpu=self.gpu)  # fmt: skip

    def _in_order(self) -> list[str]:
        return [group for group in GROUPS if group in self.best]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy."""
        names = ("model", "gpu", "gpus", "seq_len", "only", "margin", "capacity_bytes",
                 "room_bytes", "ruled_out", "larger_gpu")  # fmt: skip
        places = {option.recipe: number for number, option in enumerate(self.options)}
        return {name: getattr(self, name) for name in names} | {
            "options": [option.to_dict() for option in self.options],
            "best": {group: places[self.best[group].recipe] for group in self._in_order()},
            "frontier": [places[option.recipe] for option in self.frontier],
            "refused": list(self.refused),
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        from labkit.planning_text import advice_text

        return advice_text(self)


def advise(
    model: Any,
    gpu: str | Gpu,
    *,
    gpus: int = 1,
    seq_len: int | None = None,
    only: str | None = None,
    margin: float = MARGIN,
) -> Advice:
    """Recipes that fit ``model`` on ``gpu``: the best of each group, and all that were tried.

    Args:
        model: a model of the table, a folder with a ``config.json``, a hub id when online, or a
            transformers config.
        gpu: a name from the catalogue.
        gpus: so many of them: in data parallel, where each holds everything, or sharing one model
            (``fully_shard``).
        seq_len: tokens per sequence; by default 1024, or what the model takes if that is less.
        only: ``"full"`` training or ``"lora"``; None tries both.
        margin: the share of the card's budget that is to stay free.

    Raises:
        InputError: unknown model or GPU, a bad number, or a model that no recipe can train.
    """
    started = time.perf_counter()
    card = hardware.gpu(gpu)
    name, config = find_config(model)
    gpus = positive_int(gpus, "gpus", most=MOST_CARDS)
    only = one_of(only, KINDS, "kind of training") if only is not None else None
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < 1:
        raise InputError(f"margin must be a share from 0 to below 1, not {margin!r}")
    search = Search(config, card, gpus, _sequence(seq_len, config), only, margin)
    search.all()
    if not search.options:
        raise InputError(search.refused[0] if search.refused else _too_large(name, card))
    larger = search.larger_gpu() if not search.fitting else None
    return Advice(
        model=name,
        gpu=card.key,
        gpus=gpus,
        seq_len=search.seq_len,
        only=only,
        margin=float(margin),
        capacity_bytes=card.budget_bytes,
        options=tuple(sorted(search.options.values(), key=Option.rank)),
        ruled_out=search.ruled_out,
        refused=tuple(dict.fromkeys(search.refused)),
        larger_gpu=larger,
        seconds=time.perf_counter() - started,
        source=model,
    )


def _sequence(seq_len: int | None, config: "PreTrainedConfig") -> int:
    most = getattr(config, "max_position_embeddings", None) or MOST_SEQUENCE
    if seq_len is None:
        return min(1024, most)
    seq_len = positive_int(seq_len, "seq_len", most=MOST_SEQUENCE)
    if seq_len > most:
        raise InputError(f"seq_len must be at most {most}, the positions that the model knows")
    return seq_len


def _too_large(name: str, card: Gpu) -> str:
    return f"{card.name} can run none of the recipes that would train {name}"

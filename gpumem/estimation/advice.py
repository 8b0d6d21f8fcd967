"""advise(): recipes that fit a model on a GPU, what each costs, what it gives up.

    print(lab.advise("Llama-3.1-8B", gpu="rtx-4090"))

Every configuration (`recipes_to_try`) is tried with more and more memory techniques, each with the
largest batch that fits (`search`). Recipes that change the training least come first, among
equals the one with the lowest bound on its seconds per token: the bound of the roofline model
(arithmetic at the GPU's rate, or bytes moved at its bandwidth, whichever takes longer) plus the
bytes that cross the host's link. Source: https://doi.org/10.1145/1498765.1498785.

Limits: the bound is no time: no kernel reaches peak rates, and caches may spare memory traffic.
FP32 counts without TF32, as PyTorch computes it by default. Several GPUs are equal and in one
machine; the bound leaves their exchange out.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpumem.estimation.estimate import MOST_HOST_BYTES
from gpumem.estimation.recipe import MOST_SEQUENCE
from gpumem.estimation.search import GROUPS, Option, Search
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import MARGIN, MOST_GPUS, Gpu
from gpumem.inputs import InputError, one_of, positive_int
from gpumem.models.config import find_config
from gpumem.torch_release import following, torch_release
from gpumem.units import as_printed, format_bytes, table_lines

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KINDS = ("full", "lora")
_HEADINGS = {"same": "The same training", "changed": "Changed training"}
_COLUMNS = ("memory", "host", "bound", "changes", "recipe")


@dataclass(frozen=True, kw_only=True)
class Advised:
    """What advice says, on training and on answering.

    Attributes:
        model, gpu, gpus, margin: what was asked.
        capacity_bytes: what the GPU leaves PyTorch's allocator.
        options: what was found, the best first.
        ruled_out: how many ways arithmetic alone showed too large.
        refused: why ways could not be tried, a sentence each.
        torch: the release of PyTorch whose rules it follows, as "2.13".
    """

    model: str
    gpu: str
    gpus: int
    margin: float
    capacity_bytes: int
    options: tuple[Any, ...]
    ruled_out: int
    refused: tuple[str, ...]
    seconds: float = field(compare=False)
    torch: str

    @property
    def room_bytes(self) -> int:
        """What may be taken: the capacity less the margin."""
        return catalogue.room_bytes(self.capacity_bytes, self.margin)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        options = [option.to_dict() for option in self.options]
        return {**vars(self), "room_bytes": self.room_bytes, "options": options}

    _repr_pretty_ = as_printed

    def _where(self) -> str:
        gpus = f"{self.gpus} × " if self.gpus > 1 else ""
        return f"{self.model} on {gpus}{catalogue.gpu(self.gpu).name}"


def common_fields(search: Any, model: str, started: float) -> dict[str, Any]:
    """Return the fields of `Advised` that a search, which began at ``started``, gives."""
    return {
        "model": model,
        "gpu": search.gpu.key,
        "gpus": search.gpus,
        "margin": float(search.margin),
        "capacity_bytes": search.gpu.budget_bytes,
        "ruled_out": search.ruled_out,
        "refused": tuple(dict.fromkeys(search.refused)),
        "seconds": time.perf_counter() - started,
        "torch": torch_release(),
    }


@dataclass(frozen=True, kw_only=True)
class Advice(Advised):
    """What `advise` found; ``options`` are all recipes that were simulated.

    Attributes:
        seq_len, only: what was asked; ``source`` is the model as given.
        larger_gpu: the smallest GPU of the catalogue that holds the smallest option, where this
            one does not; None if no GPU does.
        host_limit_bytes: memory of the machine that holds all GPUs; None: not judged.
    """

    seq_len: int
    only: str | None
    larger_gpu: str | None
    source: Any = field(repr=False, compare=False)
    host_limit_bytes: int | None

    @property
    def rated_as(self) -> str:
        """The GPU whose rates the bounds are of: another where nothing is known of this one's."""
        return catalogue.rated(catalogue.gpu(self.gpu)).key

    @property
    def fitting(self) -> tuple[Option, ...]:
        """The options that fit with the margin, the best first."""
        return tuple(option for option in self.options if option.fits)

    @property
    def best(self) -> dict[str, Option]:
        """The best of each group that fits, by group: ``"same"`` before ``"changed"``."""
        found: dict[str, Option] = {}
        for option in self.fitting:
            found.setdefault(option.group, option)
        return found

    @property
    def frontier(self) -> tuple[Option, ...]:
        """Fitting options that none of their group beats in memory and bound; smallest first."""
        found: list[Option] = []
        for group in GROUPS:
            fastest = float("inf")
            for option in sorted(self.fitting, key=lambda o: (o.needed_bytes, o.seconds_per_token)):
                if option.group == group and option.seconds_per_token < fastest:
                    fastest = option.seconds_per_token
                    found.append(option)
        return tuple(found)

    def write(self, path: str | Path) -> Path:
        """Write a training script for the best option to ``path``, a new file.

        Raises:
            InputError: nothing fits, or each of several GPUs would have a copy.
            OSError: the file exists, or cannot be written.
        """
        from gpumem.estimation.script import write_script

        if not self.fitting:
            raise InputError(f"nothing fits {self.gpu}, so there is no script to write")
        option = self.fitting[0]
        if option.recipe.ranks < self.gpus:
            raise InputError(
                "a script for several GPUs is written where they share the model, and this "
                "recipe has a copy on each: ask for advice without gpus"
            )
        return write_script(
            path, option.recipe, model=self.source, needed_bytes=option.needed_bytes, gpu=self.gpu
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        places = {option.recipe: number for number, option in enumerate(self.options)}
        record = super().to_dict()
        del record["source"]
        return {
            **record,
            "rated_as": self.rated_as,
            "best": {group: places[option.recipe] for group, option in self.best.items()},
            "frontier": [places[option.recipe] for option in self.frontier],
        }

    def __str__(self) -> str:
        """Write the best of each group, then all that is worth choosing from."""
        lines = [
            f"{self._where()}, {self.seq_len} tokens a sequence",
            f"  A recipe may take {format_bytes(self.room_bytes)}: the "
            f"{format_bytes(self.capacity_bytes)} that PyTorch gets, less {self.margin:.0%}.",
        ]
        if self.host_limit_bytes:
            lines.append(f"  The host has {format_bytes(self.host_limit_bytes)} for all of them.")
        if not self.fitting:
            lines += ["", *self._nothing_fits()]
        for group in GROUPS:
            lines += ["", *self._group_lines(group)]
        if self.fitting:
            lines += ["", "Configurations that fit, each with the techniques of its lowest bound:"]
            lines += table_lines(_COLUMNS, [_row(option) for option in self._by_configuration()])
            lines += ["", "No other of the same group needs less memory and has a lower bound too:"]
            lines += table_lines(_COLUMNS, [_row(option) for option in self.frontier])
        lines += [
            "",
            "  A bound is the least time per 1000 tokens that arithmetic, memory and links allow;"
            " real steps take longer.",
            f"  {len(self.options)} recipes simulated, {self.ruled_out} ruled out by arithmetic,"
            f" in {self.seconds:.0f} s, by the rules of PyTorch {self.torch}.",
        ]
        if self.rated_as != self.gpu:
            other = catalogue.gpu(self.rated_as).name
            lines.append(f"  Nothing is known of this GPU's speed: bounds are those of {other}.")
        return "\n".join([*lines, *(f"  Not tried: {sentence}" for sentence in self.refused)])

    def _nothing_fits(self) -> list[str]:
        smallest = min(self.options, key=_memory)
        over_bytes = smallest.needed_bytes - self.room_bytes
        if over_bytes <= 0:
            need = format_bytes(smallest.host_bytes * self.gpus)
            return [f"Nothing fits. The smallest needs {need} of the host: {smallest.recipe}"]
        over = format_bytes(over_bytes)
        larger = "none"
        if self.larger_gpu:
            larger = f"{catalogue.gpu(self.larger_gpu).name} ({self.larger_gpu})"
        lines = [
            f"Nothing fits. The smallest takes {over} too much: {smallest.recipe}",
            f"  The smallest GPU of the catalogue that holds it: {larger}.",
        ]
        if self.gpus == 1:
            lines.append("  Several GPUs of this kind can share one model: --gpus N tries that.")
        return lines

    def _group_lines(self, group: str) -> list[str]:
        heading = _HEADINGS[group]
        if best := self.best.get(group):
            memory, host, bound, *_ = _row(best)
            each = " for each GPU" if self.gpus > 1 else ""
            return [
                f"{heading}: {best.recipe}",
                f"  takes {memory}, and {host} of host memory{each}, bound {bound} per 1000 tokens",
                *(f"  changes  {sentence}" for sentence in best.changes),
                *(f"  costs    {sentence}" for sentence in best.costs),
            ]
        tried = [option for option in self.options if option.group == group]
        if not tried and group == "same" and self.only == "lora":
            return [f"{heading}: was not asked for."]
        if not tried:
            return [f"{heading}: is too large by arithmetic alone."]
        nearest = min(tried, key=_memory)
        need = format_bytes(nearest.needed_bytes)
        return [f"{heading}: nothing fits. The nearest takes {need}:", f"  {nearest.recipe}"]

    def _by_configuration(self) -> list[Option]:
        """Return the best of each precision, optimizer and adapters."""
        found: dict[tuple, Option] = {}
        for option in self.fitting:
            recipe = option.recipe
            key = (recipe.precision, recipe.optimizer, recipe.lora, recipe.quantize)
            found.setdefault(key, option)
        return list(found.values())


def _memory(option: Option) -> tuple:
    return option.needed_bytes, option.sort_key()


def _row(option: Option) -> list[str]:
    return [
        format_bytes(option.needed_bytes),
        format_bytes(option.host_bytes),
        f"≥ {1000 * option.seconds_per_token:.3g} s",
        str(len(option.changes) or "none"),
        str(option.recipe),
    ]


def advise(
    model: Any,
    gpu: str | Gpu,
    *,
    gpus: int = 1,
    seq_len: int | None = None,
    only: str | None = None,
    margin: float = MARGIN,
    host_memory_bytes: int | None = None,
    torch: str | None = None,
) -> Advice:
    """Return recipes that fit ``model`` on ``gpu``: the best of each group, and all tried.

    Args:
        model: a model of the table, a folder with a ``config.json``, a hub id when online, a
            transformers config.
        gpu: a name from the catalogue.
        gpus: how many of them: in data parallel, each with a copy, or sharing one model
            (``fully_shard``).
        seq_len: tokens per sequence; by default 1024, or what the model takes if that is less.
        only: ``"full"`` training or ``"lora"``; None tries both.
        margin: the share of the GPU's budget that is to stay free.
        host_memory_bytes: memory of the machine that holds all GPUs, to be judged too.
        torch: the release of PyTorch that will train, as "2.10"; by default the installed one.

    Raises:
        InputError: unknown model, GPU or release, a bad number, or a model that no recipe can
            train.
    """
    started = time.perf_counter()
    gpu = catalogue.gpu(gpu)
    gpus = positive_int(gpus, "gpus", most=MOST_GPUS)
    if only is not None:
        only = one_of(only, KINDS, "kind of training")
    host_share = None
    if host_memory_bytes is not None:
        positive_int(host_memory_bytes, "host_memory_bytes", most=MOST_HOST_BYTES)
        host_share = host_memory_bytes // gpus
    name, config = find_config(model)
    search = Search(config, gpu, gpus, _sequence(seq_len, config), only, margin, host_share)
    with following(torch):
        search.all()
        if not search.options:
            raise InputError(search.refused[0])
        options = tuple(sorted(search.options.values(), key=Option.sort_key))
        smallest = min(options, key=_memory)
        larger_gpu = None
        if smallest.needed_bytes > search.room_bytes:  # then nothing fits
            larger_gpu = search.larger_gpu(smallest.recipe)
        return Advice(
            **common_fields(search, name, started),
            seq_len=search.seq_len,
            only=only,
            options=options,
            larger_gpu=larger_gpu,
            source=model,
            host_limit_bytes=host_memory_bytes,
        )


def _sequence(seq_len: int | None, config: "PreTrainedConfig") -> int:
    most = getattr(config.get_text_config(), "max_position_embeddings", None) or MOST_SEQUENCE
    if seq_len is None:
        return min(1024, most)
    seq_len = positive_int(seq_len, "seq_len", most=MOST_SEQUENCE)
    if seq_len > most:
        raise InputError(f"seq_len must be at most {most}, the positions that the model knows")
    return seq_len

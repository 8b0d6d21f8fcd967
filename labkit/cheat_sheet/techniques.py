"""The techniques of the cheat sheet: each a change of a recipe, with what there is to say of it."""

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpumem.estimation.recipe import Recipe
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError

Change = Callable[[Recipe, Gpu], Recipe]


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One technique: the ``effort`` to write it, when not to use it.

    ``change`` makes a recipe with it of one without; None where no recipe can express it.
    """

    name: str
    lesson: str
    effort: str
    not_when: str
    change: Change | None = None


def _mixed_precision(recipe: Recipe, gpu: Gpu) -> Recipe:
    if recipe.precision != "fp32":  # it is in half precision already
        return recipe
    return recipe.but(precision="amp-bf16" if gpu.bf16_native else "amp-fp16")


def _two_halves(recipe: Recipe, gpu: Gpu) -> Recipe:
    if recipe.accumulate > 1:
        return recipe
    if recipe.batch_size % 2:
        raise InputError(f"a batch of {recipe.batch_size} has no halves")
    return recipe.but(batch_size=recipe.batch_size // 2, accumulate=2)


def _with_fields(fields: Mapping[str, Any], recipe: Recipe, gpu: Gpu) -> Recipe:
    return recipe.but(**fields)


_COMPUTED: Mapping[str, Change] = {
    "mixed precision": _mixed_precision,
    "accumulation of two halves": _two_halves,
}


def _read(name: str, recipe: Mapping[str, Any] | None = None, **entry: Any) -> Technique:
    change = _COMPUTED.get(name)
    if recipe is not None:
        change = functools.partial(_with_fields, recipe)
    return Technique(name=name, change=change, **entry)


_FILE = Path(__file__).with_name("techniques.toml")
TECHNIQUES = tuple(_read(**each) for each in tomllib.loads(_FILE.read_text("utf-8"))["technique"])

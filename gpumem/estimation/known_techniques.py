"""What is known of each memory technique, wherever it is named: ``known_techniques.toml``.

`labkit advise`, the cheat sheet, the page "Will it fit?" and `labkit phantom --fix` take names,
fields of recipes, and what changes in the training from here.

Limits: the code of a technique is where it is done, `gpumem.estimation.techniques` for a recipe and
`phantom_gpu.remedies` for a program that runs.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from gpumem.estimation.recipe import Recipe
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError


class Effect(IntEnum):
    """What a technique changes in the training, the mildest first."""

    NOTHING, ROUNDING, TRAINING = range(3)

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, kw_only=True)
class Technique:
    """A technique.

    Attributes:
        name: the field's term.
        changes: what it trains otherwise than AdamW in float32, a sentence each.
        besides: what else a training notices of it.
        rounds: rounding is all that it changes.
        recipe: the fields of a `Recipe` with it: precision ``"amp"`` is that of the GPU, and
            ``accumulate`` divides the batch. None where no recipe can express it.
        lesson: where it is taught; empty where it is not.
        effort: what there is to write. ``not_when``: when not to use it, a sentence.
    """

    name: str
    changes: tuple[str, ...] = ()
    besides: str = ""
    rounds: bool = False
    recipe: Mapping[str, Any] | None = None
    lesson: str = ""
    effort: str = ""
    not_when: str = ""

    @property
    def effect(self) -> Effect:
        if self.rounds:
            return Effect.ROUNDING
        return Effect.TRAINING if self.changes else Effect.NOTHING

    @property
    def in_training(self) -> str:
        """All that a training notices, in one line."""
        return "; ".join((*self.changes, *filter(None, (self.besides,)))) or "nothing"

    def is_in(self, recipe: Recipe) -> bool:
        """Return whether ``recipe`` has all its fields."""
        fields = self.recipe or {}
        return bool(fields) and all(getattr(recipe, name) == fields[name] for name in fields)

    def added(self, recipe: Recipe, gpu: Gpu) -> Recipe:
        """Return ``recipe`` with it on ``gpu``.

        Raises:
            InputError: no recipe can express it, or not together with what this one has.
        """
        if self.recipe is None:
            raise InputError("no recipe")
        fields = dict(self.recipe)
        if fields.get("precision") == "amp":
            if recipe.precision != "fp32":  # it is in half precision already
                return recipe
            fields["precision"] = "amp-bf16" if gpu.bf16_native else "amp-fp16"
        if "accumulate" in fields:
            if recipe.accumulate > 1:
                return recipe
            if recipe.batch_size % fields["accumulate"]:
                raise InputError(f"a batch of {recipe.batch_size} has no halves")
            fields["batch_size"] = recipe.batch_size // fields["accumulate"]
        return recipe.but(**fields)


def _read(entry: dict[str, Any]) -> Technique:
    return Technique(**entry | {"changes": tuple(entry.get("changes", ()))})


_TEXT = Path(__file__).with_suffix(".toml").read_text("utf-8")
#: By a short name; those that lessons teach come in the lessons' order.
KNOWN = {key: _read(entry) for key, entry in tomllib.loads(_TEXT).items()}

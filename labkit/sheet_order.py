"""In which order to adopt techniques, by the figures of one job.

Limits: greedy: it looks one move ahead, or two where nothing is free and neither saves by itself.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.memory import InputError
from labkit.recipes import Recipe
from labkit.sheet_figures import LEAST_SAVED, CommonJob, Figures, simulated
from labkit.sheet_techniques import TECHNIQUES, Technique

#: Share of the plain job's bound below which a move costs nothing.
LEAST_SLOWER = 0.001


@dataclass(frozen=True)
class Move:
    """One step of the order of adoption.

    Attributes:
        techniques: one, or two of which neither saves anything by itself.
        before, after: figures without and with it, on top of all earlier moves.
        instead_of: techniques adopted earlier that it displaces.
        changed: it trains otherwise.
    """

    techniques: tuple[Technique, ...]
    before: Figures
    after: Figures
    instead_of: tuple[Technique, ...] = ()
    changed: bool = False

    @property
    def name(self) -> str:
        """Its techniques in words."""
        return " + ".join(technique.name for technique in self.techniques)

    @property
    def saved_bytes(self) -> int:
        """Of the peak."""
        return self.before.peak_bytes - self.after.peak_bytes

    @property
    def added_seconds(self) -> float:
        """To the bound on a step; negative where it falls."""
        return self.after.seconds - self.before.seconds

    @property
    def is_free(self) -> bool:
        """Whether the bound does not grow."""
        return self.added_seconds <= LEAST_SLOWER * self.before.seconds

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts moves, the best last: free ones by bytes, the others by bytes per second."""
        return self.is_free, self.saved_bytes / (1 if self.is_free else self.added_seconds)


def order_of_adoption(
    job: CommonJob, techniques: Sequence[Technique] = TECHNIQUES
) -> tuple[Move, ...]:
    """Greedily, from the plain job on, what saves most bytes of the peak per second it adds.

    First all that trains the same, until nothing of it saves; then, on top of that, what changes
    the training. Where nothing is free, those that save nothing by themselves are tried in pairs.

    Raises:
        InputError: the plain job cannot be simulated.
    """
    adopted: list[Move] = []
    for changed in (False, True):
        while move := _best_move(job, techniques, adopted, changed):
            adopted.append(move)
    return tuple(adopted)


def _best_move(
    job: CommonJob, techniques: Sequence[Technique], adopted: Sequence[Move], changed: bool
) -> Move | None:
    plain = simulated(job.model, job.card.key, job.recipe)
    before = adopted[-1].after if adopted else plain
    used = {technique.name for move in adopted for technique in move.techniques}
    left = [(t,) for t in techniques if t.change and t.name not in used]
    moves = _moves(job, left, before, adopted, changed)
    least = LEAST_SAVED * plain.peak_bytes
    saving = [move for move in moves if move.saved_bytes >= least]
    if not changed and not any(move.is_free for move in saving):
        silent = [move.techniques[0] for move in moves if move.saved_bytes < least]
        pairs = list(itertools.combinations(silent, 2))
        both = _moves(job, pairs, before, adopted, changed)
        saving += [move for move in both if move.saved_bytes >= least]
    return max(saving, key=lambda move: move.rank, default=None)


def _moves(
    job: CommonJob, choices: Sequence[tuple[Technique, ...]], before: Figures,
    adopted: Sequence[Move], changed: bool,
) -> list[Move]:  # fmt: skip
    """Those of ``choices`` that can be made from ``before`` and are of this kind."""
    recipes = {names: _recipe(job, names, before.recipe, changed) for names in choices}
    moves = []
    for techniques, recipe in recipes.items():
        if recipe is None:
            continue
        try:
            after = simulated(job.model, job.card.key, recipe)
        except InputError:  # the card cannot
            continue
        earlier = [t for move in adopted for t in move.techniques]
        gone = tuple(t for t in earlier if t.change(recipe, job.card) != recipe)
        moves.append(Move(techniques, before, after, gone, changed))
    return moves


def _recipe(
    job: CommonJob, techniques: tuple[Technique, ...], before: Recipe, changed: bool
) -> Recipe | None:
    """``before`` with ``techniques``; None if that is nothing new or not of this kind."""
    from labkit.candidates import changes

    recipe = before
    try:
        for technique in techniques:
            recipe = technique.change(recipe, job.card)
    except InputError:  # an earlier choice excludes it
        return None
    otherwise = bool(set(changes(recipe)) - set(changes(before)))
    return None if recipe == before or recipe.ranks > 1 or otherwise != changed else recipe

"""Find the largest value of a script's own argument that fits, on a phantom GPU.

`largest` runs the script with twice the value, and again, until it no longer fits, and then halves
the gap. What fits is what ran to its end; a value at which the script fails for another reason ends
the search there.

Limits: whole numbers. The value found is the largest to within 1/32 of it, if memory grows with the
argument at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gpumem.hardware import catalogue
from gpumem.inputs import InputError
from gpumem.units import format_bytes, table_lines
from phantom_gpu.fix import length_of_trials
from phantom_gpu.run_script import run_program

MOST = 1 << 24
CLOSE = 32  # a gap of this part of a value is not looked into
BAR = 30
#: The second step has the optimizer's states beside the activations.
TELLING_STEPS = 2


@dataclass(frozen=True)
class Tried:
    """The script with one value: whether it fits, None where it failed otherwise (``failure``)."""

    value: int
    reserved_bytes: int
    fits: bool | None
    failure: str = ""


@dataclass(frozen=True)
class Curve:
    """What the script takes by the values of one argument, the smallest first."""

    argument: str
    tried: tuple[Tried, ...]

    @property
    def largest(self) -> int | None:
        """The largest value that fits; None if none does."""
        return max((each.value for each in self.tried if each.fits), default=None)

    def __str__(self) -> str:
        too_large = min((t.value for t in self.tried if t.fits is False), default=None)
        if self.largest is None:
            said = f"{self.argument}: nothing from {self.tried[0].value} on fits."
        elif too_large is None:
            said = f"{self.argument}: {self.largest} fits, and nothing larger was an answer."
        else:
            said = f"{self.argument}: {self.largest} fits, {too_large} does not."
        most = max(each.reserved_bytes for each in self.tried) or 1
        rows = [
            (
                f"{each.value}",
                format_bytes(each.reserved_bytes),
                {True: "yes", False: "no", None: "-"}[each.fits],
                "█" * round(BAR * each.reserved_bytes / most) + (" " + each.failure).rstrip(),
            )
            for each in self.tried
        ]
        return "\n".join([said, *table_lines(("value", "reserved", "fits", "of the most"), rows)])


@dataclass(frozen=True)
class Largest:
    """What `largest` found: a curve for each argument, and the GPU's name."""

    gpu: str
    curves: tuple[Curve, ...]
    interrupted: bool = False

    @property
    def fits(self) -> bool | None:
        """Whether each argument has a value that fits; None where none was tried."""
        return all(curve.largest for curve in self.curves) if self.curves else None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        curves = [asdict(curve) | {"largest": curve.largest} for curve in self.curves]
        return {"gpu": self.gpu, "interrupted": self.interrupted, "curves": curves}

    def __str__(self) -> str:
        head = f"On a phantom {self.gpu}, each by itself:"
        if self.interrupted:
            head += " (it was interrupted)"
        return "\n\n".join([head, *map(str, self.curves)])


def largest(
    command: Sequence[str],
    arguments: Sequence[str],
    *,
    gpu: str,
    steps: int = 0,
    report: Callable[[str], None] = lambda sentence: None,
    **options: Any,
) -> Largest:
    """Run ``command`` with other values of its ``arguments``, each by itself.

    Args:
        command: the program and its arguments.
        arguments: their names, ``"batch-size"``.
        gpu, steps, report, options: as for `run_program`.

    Raises:
        InputError: the command has no such argument, or its value is no whole number above 0.
    """
    places = {argument: _place(command, argument) for argument in arguments}
    searches = []
    interrupted = False
    for argument, (index, prefix, start) in places.items():
        asked = {"gpu": gpu, **options}
        search = _Search(argument, [*command], index, prefix, steps, report, asked)
        searches.append(search)
        try:
            search.run(start)
        except KeyboardInterrupt:
            interrupted = True
            break
    curves = tuple(search.curve() for search in searches if search.tried)
    return Largest(catalogue.gpu(gpu).name, curves, interrupted)


def _place(command: Sequence[str], argument: str) -> tuple[int, str, int]:
    """Return the index of the word with an argument's value, what comes before the value in that
    word, and the value."""
    wanted = argument.lstrip("-").replace("_", "-")
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if not name.startswith("-") or name.lstrip("-").replace("_", "-") != wanted:
            continue
        if not equals and index + 1 < len(command):
            index, value = index + 1, command[index + 1]
        if value.isdigit() and int(value) > 0:
            return index, f"{name}=" if equals else "", int(value)
        raise InputError(f"{argument} must have a whole number above 0, not {value!r}")
    raise InputError(f"the command has no --{wanted}: write it with the value to begin with")


@dataclass
class _Search:
    """Runs a command with values of one argument, and keeps what came out."""

    argument: str
    words: list[str]
    index: int  # of the word to change
    prefix: str  # of the value in that word
    steps: int
    report: Callable[[str], None]
    options: dict[str, Any]
    tried: dict[int, Tried] = field(default_factory=dict)
    made: int = 0  # training steps with the first value

    def run(self, start: int) -> None:
        """Try twice the value, and again, until it does not fit; then halve the gap."""
        low, high = 0, start
        while high <= MOST and self._fits(high):
            low, high = high, 2 * high
        failed = self.tried[start].fits is None  # and would with any value
        while not failed and high <= MOST and high - low > max(1, low // CLOSE):
            middle = (low + high) // 2
            if self._fits(middle):
                low = middle
            else:
                high = middle

    def _fits(self, value: int) -> bool | None:
        self.words[self.index] = f"{self.prefix}{value}"
        found = run_program(self.words, steps=self.steps, **self.options)
        made = max((answer.steps for answer, _ in found.by_gpu()), default=0)
        if not self.tried and found.by_gpu():
            self.steps, self.made = length_of_trials(found, self.steps), made
        fits, failure = found.fits, found.headline() if found.fits is None else ""
        if fits and made < min(self.made, TELLING_STEPS):  # the data do not fill a batch, for one
            fits, failure = None, f"No answer: {made} training steps, too few to tell."
        self.tried[value] = Tried(value, found.peak_reserved_bytes, fits, failure)
        said = failure or f"{format_bytes(found.peak_reserved_bytes)} reserved"
        self.report(f"{self.argument} {value}: {'fits' if fits else 'does not fit'}, {said}")
        return fits

    def curve(self) -> Curve:
        """Return what is known."""
        return Curve(self.argument, tuple(self.tried[value] for value in sorted(self.tried)))

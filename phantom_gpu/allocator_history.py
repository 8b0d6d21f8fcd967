"""Read what PyTorch's allocator recorded, block by block, and say what each block was for.

`History.read` takes the entries that ``torch.cuda.memory._snapshot`` gives for one GPU, in order
and each once. The text that ``torch.cuda.memory._set_memory_metadata`` attached to an entry is a
`Tag`: the step, phase and module that were running.

Limits: an entry has the bytes that were asked for; what the allocator gave beyond that is not in
it. Weights, gradients and states of optimizers are recognised by their addresses, when
`History.classify` is told them. Of the rest, what modules make before the backward pass and lives
into it counts as activations. cuBLAS's workspaces are recognised by their size.
"""

import os
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from gpumem.fake_cuda.refusals import LIBRARIES
from gpumem.files import PACKAGES
from gpumem.trace import WITHOUT_GRADIENTS, Category, Event, Phase, Storage, Timeline, Trace
from gpumem.units import KIB

#: A timeline needs the first training steps, and those in which the peak rises: the rest is counted
#: and forgotten, or collecting garbage would take longer and longer.
KEPT_STEPS, MOST_EVENTS = 3, 400_000
#: What a pass of an evaluation must leave behind, and how many must: a loss takes 512 bytes.
LEAST_KEPT_BYTES, LEAST_PASSES = 64 * KIB, 4
_COMPILED = "torchinductor_"  # in the folder of the code that torch.compile wrote
#: How the names of files of PyTorch and of our own packages begin.
TORCH_FOLDER = Path(torch.__file__).parent
_TORCH = ("<", *(f"{folder}{os.sep}" for folder in (TORCH_FOLDER, *PACKAGES)))
_PYTHON = sysconfig.get_path("stdlib") + os.sep
#: PyTorch's own code that asks for memory which people know by a name, and that name.
DDP_BUCKETS = "DDP's buckets"
_OWNERS = {f"{TORCH_FOLDER}{os.sep}nn{os.sep}parallel{os.sep}distributed.py": DDP_BUCKETS}
#: What lies between a caller of PyTorch and its allocator, as we look on.
_BETWEEN_CODE = (*(f"{folder}{os.sep}" for folder in PACKAGES), f"{TORCH_FOLDER}{os.sep}_")
_PHASES = {phase.value: phase for phase in Phase}
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.|$)")
_BETWEEN = "\x1f"  # which names of modules and files may not have
Entry = Mapping[str, Any]


class Found(NamedTuple):
    """What lies at an address: its category, None where unknown; the module, or what else people
    know it by; the numbers' type."""

    category: Category | None
    owner: str = ""
    dtype: str = ""


Addresses = dict[int, Found]


class Tag(NamedTuple):
    """Where the program was: in ``module``, or in backward, which ``line`` of it had called.

    ``model`` is the class of the outermost module that ran last, ``number`` counts such forward
    passes, and ``order`` the marks (see `Mark`) that were made before.
    """

    step: int
    phase: Phase
    module: str = ""
    line: str = ""
    recomputing: bool = False
    model: str = ""
    number: int = 0
    order: int = 0

    def written(self) -> str:
        """Return the text that is attached to the allocator's entries."""
        again = "again" if self.recomputing else ""
        where = (str(self.step), self.phase.value, self.module, self.line, again, self.model)
        return _BETWEEN.join((*where, str(self.number), str(self.order)))

    @classmethod
    def read(cls, text: str) -> "Tag":
        """Read what `written` wrote."""
        step, phase, *where, again, model, number, order = text.split(_BETWEEN)
        return cls(int(step), _PHASES[phase], *where, bool(again), model, int(number), int(order))


@dataclass(slots=True, eq=False)
class Block:
    """One block of the allocator, from a request to its end; ``nbytes`` were asked for."""

    address: int
    nbytes: int
    tag: Tag
    frames: list[dict[str, Any]]
    category: Category | None = None
    owner: str = ""  # as in `Found`
    dtype: str = ""
    number: int = -1  # in the kept log

    @property
    def kind(self) -> Category:
        """What it is for, as far as is known yet."""
        if self.category is not None:
            return self.category
        if self.known_as:
            return Category.GRADIENTS
        if self.tag.phase in (Phase.SETUP, Phase.OTHER) and not self.tag.module:
            is_scripts = self.line and self.line == self.users_line
            return Category.SCRIPT if is_scripts else Category.UNATTRIBUTED
        computed = self.tag.recomputing or self.tag.phase not in (Phase.BACKWARD, Phase.OPTIMIZER)
        return Category.ACTIVATIONS if computed else Category.TEMPORARY

    @property
    def known_as(self) -> str:
        """The module, or the name by which people know what PyTorch itself has asked for."""
        if self.owner or self.tag.module:
            return self.owner
        return _OWNERS.get(_innermost(self.frames), "")

    @property
    def line(self) -> str:
        """``file:line`` of the innermost code outside PyTorch; backward's, where that called."""
        return _line(self.frames, is_pytorchs) or self.tag.line

    @property
    def users_line(self) -> str:
        """``file:line`` of the innermost code outside Python's and installed libraries."""
        return _line(self.frames, is_librarys) or self.tag.line


def _innermost(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the file of the code that called PyTorch's operator."""
    files = (frame["filename"] for frame in frames)
    return next((file for file in files if not file.startswith(_BETWEEN_CODE)), "")


def _line(frames: Iterable[Mapping[str, Any]], is_skipped: Callable[[str], bool]) -> str:
    for frame in frames:
        file = frame["filename"]
        if file and not is_skipped(file) and _COMPILED not in file:
            return f"{file}:{frame['line']}"
    return ""


def is_pytorchs(file: str) -> bool:
    """Return whether a file, or a line of it, is PyTorch's, our own or Python's."""
    pythons = file.startswith(_PYTHON) and "-packages" not in file
    return pythons or file.startswith(_TORCH)


def is_librarys(file: str) -> bool:
    """Return whether a file, or a line of it, is Python's or an installed library's."""
    return file.startswith(LIBRARIES)


def line_of(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost of the user's own code, else of any outside PyTorch."""
    outside = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_librarys(file) and not is_written(frame):
            return f"{file}:{frame.f_lineno}"
        if not outside and not is_pytorchs(file):
            outside = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return outside


def is_written(frame: FrameType) -> bool:
    """Return whether a frame is of an ``__init__`` that `dataclasses` wrote."""
    return (frame.f_code.co_filename, frame.f_code.co_name) == ("<string>", "__init__")


def without_numbers(path: str) -> str:
    """Return a module's path with ``*`` for the numbers of its layers."""
    return _NUMBER.sub("*", path)


class Moment(NamedTuple):
    """When something was: bytes then, and where the program was."""

    nbytes: int
    tag: Tag


_START = Moment(0, Tag(0, Phase.SETUP))


class Mark(NamedTuple):
    """What lies at which addresses, before any entry whose `Tag` has at least this ``order``."""

    order: int
    addresses: Addresses


class FailedEntry(NamedTuple):
    """A request that the GPU could not serve, what was reserved then, the stack that made it,
    innermost first, and how many events were kept before."""

    nbytes: int
    reserved_bytes: int
    tag: Tag
    frames: list[dict[str, Any]]
    event: int

    @property
    def users_line(self) -> str:
        """As of a `Block`."""
        return _line(self.frames, is_librarys) or self.tag.line

    @property
    def is_scripts(self) -> bool:
        """Whether the script's own code asked, and no library's that could catch the error."""
        innermost = _innermost(self.frames)
        return bool(innermost) and not is_librarys(innermost)


class Collected(NamedTuple):
    """What an evaluation's earlier passes had left behind when another began, how many they were,
    and a block of the first."""

    nbytes: int = 0
    passes: int = 0
    block: Block | None = None


NOTHING = Collected()


@dataclass
class History:
    """What one GPU's allocator did so far.

    Attributes:
        live: blocks that hold memory now, by address.
        workspaces: sizes of what cuBLAS is given, in bytes.
        peak, peak_blocks: the most bytes asked for at once, when, and the blocks that held them.
        reserved_peak: the same of the allocator's segments.
        failures: the requests that failed.
        step_ends: indices of the kept events at which training steps ended.
        evaluations: the training steps after which forward passes without gradients ran.
        grown: what the steps so far leave behind, one step's of it; see `_growth`.
        recomputes: whether the program checkpoints activations itself.
        collected: the most that passes of an evaluation have left behind.
    """

    live: dict[int, Block] = field(default_factory=dict)
    workspaces: Collection[int] = ()
    held_bytes: int = 0
    reserved_bytes: int = 0
    peak: Moment = _START
    peak_blocks: list[Block] = field(default_factory=list)
    reserved_peak: Moment = _START
    failures: list[FailedEntry] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)
    grown: list[Block] = field(default_factory=list)
    recomputes: bool = False
    collected: Collected = NOTHING
    _held: dict[int, dict[int, Block]] = field(default_factory=dict)  # by pass and address
    _held_bytes: int = 0
    _keeps: bool = True
    _kept: list[Block] = field(default_factory=list)
    _events: list[tuple[int, int, Phase, int]] = field(default_factory=list)  # as in `Event`

    def read(self, entries: Sequence[Entry], step: int, marks: Sequence[Mark] = ()) -> None:
        """Take the allocator's next entries, recorded during training step number ``step``, and
        classify the blocks that lived at each of ``marks``, which are in order."""
        waiting = list(reversed(marks))
        # Autograd's own threads have no tag until a module's gradient passes through them. Those
        # in which a library loads weights never have one.
        last, tags = _START.tag, {"": Tag(step, Phase.BACKWARD)}
        highest = self._highest(entries)
        failed = any(entry["action"] == "oom" for entry in entries)
        self._keeps = step <= KEPT_STEPS or highest >= 0 or failed
        if self._keeps:
            for block in self.live.values():
                if block.number < 0:  # made in a step that was not kept
                    self._log(block, block.nbytes, Phase.OTHER)
        for index, entry in enumerate(entries):
            text = entry["user_metadata"]
            tag = tags.get(text)
            if tag is None:
                tag = tags[text] = Tag.read(text)
            if not text and last.phase is Phase.SETUP:
                tag = _START.tag
            last = tag
            action, nbytes = entry["action"], entry["size"]
            while waiting and waiting[-1].order <= tag.order:
                self.classify(waiting.pop().addresses)
            if tag.phase in WITHOUT_GRADIENTS and tag.step not in self.evaluations[-1:]:
                self.evaluations.append(tag.step)
            if action == "alloc":
                self.recomputes = self.recomputes or tag.recomputing
                block = Block(entry["addr"], nbytes, tag, entry.get("frames", []))
                if nbytes in self.workspaces:  # until an operator returns it
                    block.category = Category.WORKSPACES
                self.live[block.address] = block
                self.held_bytes += nbytes
                if tag.phase is Phase.EVALUATION and nbytes >= LEAST_KEPT_BYTES:
                    self._hold(block)
                self._log(block, nbytes, tag.phase, entry["stream"])
                if index == highest:
                    self.peak = Moment(self.held_bytes, tag)
                    self.peak_blocks = list(self.live.values())
            elif action == "free_completed" and entry["addr"] in self.live:
                self._free(self.live.pop(entry["addr"]), tag)
            elif action in ("segment_alloc", "segment_map"):
                self.reserved_bytes += nbytes
                if self.reserved_bytes > self.reserved_peak.nbytes:
                    self.reserved_peak = Moment(self.reserved_bytes, tag)
            elif action in ("segment_free", "segment_unmap"):
                self.reserved_bytes -= nbytes
            elif action == "oom":
                frames = entry.get("frames", [])
                before = len(self._events)
                self.failures.append(FailedEntry(nbytes, self.reserved_bytes, tag, frames, before))
        for mark in reversed(waiting):
            self.classify(mark.addresses)

    def _highest(self, entries: Sequence[Entry]) -> int:
        """Return the index of the entry that takes more than was ever held; -1: there is none."""
        held, most, highest = self.held_bytes, self.peak.nbytes, -1
        for index, entry in enumerate(entries):
            if entry["action"] == "alloc":
                held += entry["size"]
                if held > most:
                    most, highest = held, index
            elif entry["action"] == "free_completed":
                held -= entry["size"]
        return highest

    def _log(self, block: Block, change_bytes: int, phase: Phase, stream: int = 0) -> None:
        keeps = self._keeps and change_bytes > 0 and len(self._events) < MOST_EVENTS
        if keeps:
            block.number = len(self._kept)
            self._kept.append(block)
        if block.number >= 0:
            self._events.append((block.number, change_bytes, phase, stream))

    def _hold(self, block: Block) -> None:
        """Note a block of an evaluation; of those that earlier passes made, some may be left."""
        number = block.tag.number
        if number not in self._held:
            if len(self._held) >= LEAST_PASSES and self._held_bytes > self.collected.nbytes:
                first = next(iter(next(iter(self._held.values())).values()))
                self.collected = Collected(self._held_bytes, len(self._held), first)
            self._held[number] = {}
        self._held[number][block.address] = block
        self._held_bytes += block.nbytes

    def _let_go(self, block: Block) -> None:
        held = self._held.get(block.tag.number, {})
        if held.get(block.address) is block:
            del held[block.address]
            self._held_bytes -= block.nbytes
            if not held:
                del self._held[block.tag.number]

    def _free(self, block: Block, tag: Tag) -> None:
        self.held_bytes -= block.nbytes
        self._let_go(block)
        self._log(block, -block.nbytes, tag.phase)
        if block.category is None:
            before = block.tag
            same = tag[:2] == before[:2] and tag.recomputing == before.recomputing
            same = same and tag.number == before.number
            block.category = Category.TEMPORARY if same else block.kind

    def classify(self, addresses: Addresses) -> None:
        """Take the live blocks at ``addresses`` as what is said of them."""
        for address, found in addresses.items():
            block = self.live.get(address)
            if block is None:
                continue
            block.dtype = block.dtype or found.dtype
            if block.category is Category.WORKSPACES:
                block.category = None
            if found.category is Category.INPUTS and (block.category or block.tag.module):
                continue  # what is known already, or what a module has computed
            if found.category is not None:
                block.category, block.owner = found.category, found.owner
                self._let_go(block)  # an input, a weight

    def end_step(self) -> None:
        """Note that a training step has ended, and what lives on: the end of the program, or of the
        function that trains, frees it."""
        self.step_ends.append(len(self._events))
        self.grown = self._growth()

    def _growth(self) -> list[Block]:
        """Return what training steps leave behind, each after the first, or what evaluations do if
        that is more: blocks that nobody knows, made by one line of one module in at least three
        steps or evaluations on end and still there."""
        left: dict[tuple, dict[int, list[Block]]] = defaultdict(lambda: defaultdict(list))
        for block in self.live.values():
            tag = block.tag
            evaluating = tag.phase in WITHOUT_GRADIENTS
            unknown = block.category in (None, Category.CACHE)
            if unknown and (evaluating or tag.step > 1):
                number = self.evaluations.index(tag.step) if evaluating else tag.step
                left[evaluating, tag.module, block.line][number].append(block)
        grown: dict[bool, list[Block]] = {False: [], True: []}
        for (evaluating, *_), made in left.items():
            if len(made) > 2 and len(made) == max(made) - min(made) + 1:
                grown[evaluating] += made[min(made) + 1]
        return max(grown.values(), key=lambda blocks: sum(block.nbytes for block in blocks))

    def passes_alive(self) -> dict[tuple[str, Phase], list[int]]:
        """Return, for each model and phase, the bytes that each of its forward passes holds at the
        peak for activations; passes that left next to nothing behind are not in it."""
        found: dict[tuple[str, Phase], Counter[int]] = defaultdict(Counter)
        for block in self.peak_blocks:
            tag = block.tag
            if block.kind is Category.ACTIVATIONS and tag.phase in (
                Phase.FORWARD,
                Phase.EVALUATION,
            ):
                found[tag.model, tag.phase][tag.number] += block.nbytes
        return {
            which: [n for n in held.values() if n > max(held.values()) / 10]
            for which, held in found.items()
        }

    def timeline(self, stop: int | None = None) -> Timeline:
        """Return the kept events, of which the one numbered ``stop`` failed, as a line to draw."""
        storages = tuple(
            Storage(block.nbytes, block.kind, "", "", "", "", block.tag.phase, (), "")
            for block in self._kept
        )
        events = tuple(map(Event._make, self._events[:stop]))
        outside = (Phase.SETUP, Phase.OTHER)
        busy = [i for i, event in enumerate(events) if event.phase not in outside]
        last = busy[-1] if busy and stop is None else len(events)
        starts = (busy[0], *(end for end in self.step_ends if end <= last)) if busy else ()
        return Trace("", storages, events, starts).timeline().thinned()

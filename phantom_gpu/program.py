"""What a running program is made of, and where: its model, optimizer, data loader, arguments.

`Program` looks on while objects are made that decide what a step takes, and notes the user's line
of each. A remedy is tried at such a place: the arguments of that call are changed, or the model is,
just before its first training pass. Nothing else of the program is touched, and no file.

Limits: batches that a program cuts itself, and attention that it writes itself, are not seen.
"""

import functools
import importlib.util
import inspect
import operator
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gpumem.costs import tensors_in
from phantom_gpu.allocator_history import is_librarys, is_written, line_of
from phantom_gpu.kept_outputs import SMALL_BYTES, kept_names, names_to_drop, names_to_free
from phantom_gpu.report_records import (
    ACCELERATOR,
    ARGUMENTS,
    BACKWARD,
    CUDA,
    DDP,
    LIGHTNING,
    LOADED,
    LOADER,
    MODEL,
    MOVED,
    OPTIMIZER,
    PASS,
    TRL,
    Place,
)

Note = Callable[[str, Exception], None]
_BETWEEN = ("auto_factory.py", __file__)
#: The second forward pass finds what the first one left, unless the model is called otherwise, too.
PASSES_LOOKED_AT = 8
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")  # of DDP, torch.compile, FSDP


@dataclass
class Call:
    """A call at a place, before it runs.

    Attributes:
        kind: what is made: a class, or the function; of a pass, the frame that calls the model or
            ``backward``.
        named: its arguments, by name.
        after: each takes what was made, and may return what the program gets for it.
    """

    kind: Any
    named: dict[str, Any]
    after: list[Callable[[Any], Any]] = field(default_factory=list)


@dataclass(frozen=True)
class ModelFacts:
    """What decides which remedies a model takes, when its first training pass begins.

    Attributes:
        name: its class.
        layer, layers: the class of the blocks that repeat, and how many there are.
        transformers: whether it is one of that library's; ``attention`` is how it attends then,
            empty where it has no fused one.
        checkpoints, autocasts, quantized: whether it does so already.
        dtype: of most of its weights, ``trained_share`` the part of them that is trained.
        switch: the method that turns checkpointing on; empty if it has none.
        chunks: whether its loss can be computed a piece at a time.
        training: whether it is in training mode. What transformers loads is not, and trains so.
        parallel: whether FSDP, DeepSpeed or a tensor of several ranks holds its weights.
        whole_numbers: whether its inputs are.
        batch_norms: whether it keeps running statistics of its batches.
        made: where it was loaded, moved to the GPU, or both.
    """

    name: str
    layer: str
    layers: int
    transformers: bool
    attention: str
    checkpoints: bool
    switch: str
    autocasts: bool
    quantized: bool
    dtype: str
    trained_share: float
    chunks: bool
    training: bool
    parallel: bool
    whole_numbers: bool
    batch_norms: bool
    made: tuple[Place, ...]
    parameters: int


_CURRENT: list["Program"] = []  # this process's, if it has one


class Program:
    """See the module. ``trials`` are changes by the place at which each is made."""

    def __init__(
        self, trials: Mapping[Place, Sequence[Callable]] | None = None, note: Note = lambda *_: None
    ) -> None:
        self._trials, self._note = dict(trials or {}), note
        #: Arguments of each place that the program has come to, in the order of their first time.
        self.calls: dict[Place, dict[str, Any]] = {}
        self.models: dict[str, ModelFacts] = {}
        #: The loader whose batches a model was trained on, whether activations are recomputed
        #: already, the optimizers that made a step.
        self.trained_from: Place | None = None
        self.recomputes = False
        self.stepped: dict[Place, torch.optim.Optimizer] = {}
        #: Lines that make several optimizers, or loaders of several batch sizes.
        self.several: set[Place] = set()
        #: Whether a program clips gradients, scales them, or has a schedule of learning rates.
        self.clips = self.schedules = self.scales = False
        self._last_loader: Place | None = None
        self._passes: Counter[str] = Counter()  # looked at, by the kind of place
        self._loaders_of: dict[int, Place] = {}  # by what they read, as Accelerate makes its own
        self._inside: set[int] = set()
        self._changes = False  # whether a change is being made now
        self._made: defaultdict[int, list[Place]] = defaultdict(list)
        self._objects: dict[int, weakref.ref] = {}
        self._seen: weakref.WeakSet = weakref.WeakSet()

    # --- what is looked on --------------------------------------------------------------------

    def begin(self) -> None:
        """Look on from now on at what torch itself makes, and others once they are imported."""
        _CURRENT.append(self)
        for kind in vars(torch.optim).values():
            is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
            if is_class and kind is not torch.optim.Optimizer:
                self.watch_class(kind, OPTIMIZER)
        self.watch_class(torch.utils.data.DataLoader, LOADER)
        self._watch_batches(torch.utils.data.DataLoader)
        self.watch_class(torch.nn.parallel.DistributedDataParallel, DDP)
        self._watch_steps()
        self._watch_moves("to", MOVED)
        self._watch_moves("cuda", CUDA)
        if any(place.kind == MODEL for place in self._trials):
            self._watch_first_pass()

    def watch_class(self, kind: type, place: str) -> None:
        """Look on whenever an object of ``kind`` is made."""
        plain = kind.__init__
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def init(made: Any, *given: Any, **options: Any) -> None:
            # A class whose base is looked on, too; what a change makes.
            if id(made) in self._inside or self._changes:
                return plain(made, *given, **options)
            self._inside.add(id(made))
            try:
                call = Call(type(made), _named(signature, (made, *given), options))
                where = self._visit(place, call)
                if call.kind is not type(made):
                    made.__class__ = call.kind
                    call.kind.__init__(made, **call.named)
                elif where is None:
                    plain(made, *given, **options)
                else:
                    plain(made, **call.named)
            finally:
                self._inside.discard(id(made))
            if where is not None:
                self._remember(made, where)
                self._changed(call, made)

        kind.__init__ = init

    def watch_function(self, owner: Any, name: str, place: str) -> None:
        """Look on whenever the class method ``name`` of ``owner`` makes something."""
        plain = getattr(owner, name).__func__

        @functools.wraps(plain)
        def make(kind: type, *given: Any, **options: Any) -> Any:
            call = Call(kind, options)
            where = self._visit(place, call)
            made = self._changed(call, plain(kind, *given, **call.named))
            if where is not None and isinstance(made, torch.nn.Module):
                self._remember(made, where)
            return made

        setattr(owner, name, classmethod(make))

    def watch_fields(self, kind: type, place: str) -> None:
        """Look on whenever the fields of a dataclass are all there."""
        plain = kind.__post_init__

        @functools.wraps(plain)
        def post_init(made: Any) -> None:
            call = Call(type(made), vars(made))
            where = self._visit(place, call)
            plain(made)
            if where is not None:
                self.calls[where] = dict(vars(made))

        kind.__post_init__ = post_init

    def _visit(self, kind: str, call: Call) -> Place | None:
        """Note that the program has come to a place, and make what is tried there."""
        try:
            frame: FrameType | None = sys._getframe(2)
            while frame is not None and _is_between(frame):
                frame = frame.f_back
            if frame is None or (kind != ARGUMENTS and is_librarys(frame.f_code.co_filename)):
                return None  # a library's call, to which nobody can give an argument
            place = Place(kind, line_of(frame))
            first = self.calls.setdefault(place, dict(call.named))
            if kind == LOADER and first.get("batch_size") != call.named.get("batch_size"):
                self.several.add(place)
        except Exception as error:
            self._note("_visit", error)
            return None
        for change in self._trials.get(place, ()):
            change(call, self)
        return place

    def _changed(self, call: Call, made: Any) -> Any:
        """Return what the program gets for what it has made."""
        self._changes = True
        try:
            for change in call.after:
                made = change(made) or made
        finally:
            self._changes = False
        return made

    def _remember(self, made: Any, place: Place) -> None:
        if place.kind == LOADER:
            self._loaders_of.setdefault(id(made.dataset), place)
        self._made[id(made)].append(place)
        self._objects[id(made)] = weakref.ref(made)

    def _places_of(self, made: Any) -> list[Place]:
        reference = self._objects.get(id(made), lambda: None)
        return self._made[id(made)] if reference() is made else []

    def _watch_batches(self, kind: type) -> None:
        plain = kind.__iter__

        @functools.wraps(plain)
        def iterate(loader: Any) -> Iterator:
            if places := self._places_of(loader):
                self._last_loader = places[0]
            else:
                self._last_loader = self._loaders_of.get(id(loader.dataset), self._last_loader)
            return plain(loader)

        kind.__iter__ = iterate

    def _watch_moves(self, name: str, place: str) -> None:
        plain = getattr(torch.nn.Module, name)

        @functools.wraps(plain)
        def move(module: torch.nn.Module, *given: Any, **options: Any) -> torch.nn.Module:
            call = Call(plain, {"given": given, **options})
            where = self._visit(place, call)
            moved = plain(module, *call.named.pop("given"), **call.named)
            moved = self._changed(call, moved)
            if where is not None:
                self._remember(moved, where)
            return moved

        setattr(torch.nn.Module, name, move)

    def _watch_steps(self) -> None:
        """Look on at what a program does once a step, beside the step."""

        def noting(owner: Any, name: str, fact: str) -> None:
            plain = getattr(owner, name)

            @functools.wraps(plain)
            def call(*given: Any, **options: Any) -> Any:
                setattr(self, fact, True)
                return plain(*given, **options)

            setattr(owner, name, call)

        for name in ("clip_grad_norm_", "clip_grad_value_"):
            noting(torch.nn.utils, name, "clips")
        noting(torch.optim.lr_scheduler.LRScheduler, "__init__", "schedules")
        noting(torch.amp.GradScaler, "step", "scales")

    def _watch_first_pass(self) -> None:
        """Have models changed before `Module.__call__` has looked up what to call."""
        plain = torch.nn.Module.__call__

        @functools.wraps(plain)
        def call(module: torch.nn.Module, *given: Any, **options: Any) -> Any:
            if module not in self._seen and may_train(module):
                self._seen.add(module)
                inner = unwrapped(module)
                for change in self._trials.get(Place(MODEL, type(inner).__name__), ()):
                    change(inner, self)
            return plain(module, *given, **options)

        torch.nn.Module.__call__ = call

    # --- what is known -------------------------------------------------------------------------

    def trains(self, module: torch.nn.Module, inputs: Any) -> None:
        """Note that a pass of the outermost ``module`` begins, which `may_train`."""
        self.trained_from = self.trained_from or self._last_loader
        model = unwrapped(module)
        known = self.models.get(type(model).__name__)
        if known is None or (model.training and not known.training):
            self.models[type(model).__name__] = self._facts(module, model, inputs)
        # A graph of 8-bit layers keeps each one's input as long as the loss lives.
        least_bytes = 0 if self.models[type(model).__name__].quantized else SMALL_BYTES
        self._passes_at(PASS, names_to_free, least_bytes)

    def goes_back(self) -> None:
        """Note that a backward pass begins; that of a checkpoint within another is none."""
        self._passes_at(BACKWARD, names_to_drop, SMALL_BYTES)

    def _passes_at(self, kind: str, names: Callable, least_bytes: int) -> None:
        """Note what a loop keeps of a pass although nothing reads it; make what is tried."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and is_librarys(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return
        place = Place(kind, line_of(frame))
        if place not in self.calls and self._passes[kind] < PASSES_LOOKED_AT:
            self._passes[kind] += 1
            dropped = self._names_at(BACKWARD) if kind == PASS else ()
            if found := kept_names(frame, names, but=dropped, least_bytes=least_bytes):
                self.calls[place] = {"names": found}
        if place in self.calls:
            for change in self._trials.get(place, ()):
                change(Call(frame, self.calls[place]), self)

    def _names_at(self, kind: str) -> tuple[str, ...]:
        """Return the names that are freed at the first place of a kind."""
        place = self.first(kind)
        return self.calls[place]["names"] if place else ()

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that ``optimizer`` makes a step."""
        for place in self._places_of(optimizer):
            if self.stepped.setdefault(place, optimizer) is not optimizer:
                self.several.add(place)

    def main_model(self) -> ModelFacts | None:
        """Return the largest model that was trained, of those in training mode if there are any."""
        order = operator.attrgetter("training", "parameters")
        return max(self.models.values(), key=order, default=None)

    def first(self, *kinds: str) -> Place | None:
        """Return the first place of these kinds that the program came to."""
        return next((place for place in self.calls if place.kind in kinds), None)

    def _facts(self, module: torch.nn.Module, model: torch.nn.Module, inputs: Any) -> ModelFacts:
        parameters = list(model.parameters())
        numbers = sum(p.numel() for p in parameters)
        dtypes: dict[torch.dtype, int] = defaultdict(int)
        for parameter in parameters:
            dtypes[parameter.dtype] += parameter.numel()
        made = self._places_of(model)
        if not made:  # a part of it may have been
            made = [place for each in model.modules() for place in self._places_of(each)]
        library = next((m for m in model.modules() if hasattr(m, "_supports_sdpa")), None)
        chooses = getattr(library, "_supports_sdpa", False)
        layer, layers = repeated(model)
        kinds = {type(each).__name__ for each in (module, *model.modules())}
        given = list(tensors_in(inputs))  # not by name
        whole = getattr(library, "main_input_name", "") == "input_ids"
        if given:
            whole = not any(tensor.is_floating_point() for tensor in given)
        sharded = any(hasattr(p, "ds_id") or hasattr(p, "device_mesh") for p in parameters)
        return ModelFacts(
            name=type(model).__name__,
            layer=layer,
            layers=layers,
            transformers=library is not None,
            attention=(chooses and library.config._attn_implementation) or "",
            checkpoints=any(getattr(m, "gradient_checkpointing", False) for m in model.modules()),
            switch=checkpoint_switch(model),
            autocasts=torch.is_autocast_enabled("cuda"),
            quantized=bool(kinds & {"Linear4bit", "Linear8bitLt"}),
            dtype=str(max(dtypes, key=dtypes.__getitem__, default="")).removeprefix("torch."),
            trained_share=sum(p.numel() for p in parameters if p.requires_grad) / max(numbers, 1),
            chunks=has_chunked_loss(model),
            training=model.training,
            parallel=sharded or "FullyShardedDataParallel" in kinds or "DeepSpeedEngine" in kinds,
            whole_numbers=whole,
            batch_norms=any(isinstance(each, _BatchNorm) for each in model.modules()),
            made=tuple(dict.fromkeys(made)),
            parameters=numbers,
        )


def _is_between(frame: FrameType) -> bool:
    """Return whether a frame only passes a call on: of an ``__init__`` that `dataclasses` wrote, of
    transformers' classes that choose another, or one of ours."""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    moves = name in ("to", "cuda") and is_librarys(file)  # transformers' models have their own
    return is_written(frame) or moves or file.endswith(_BETWEEN)


def _named(signature: inspect.Signature, given: tuple, options: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, without the object itself."""
    try:
        bound = signature.bind(*given, **options)
    except TypeError:  # which the call itself says better
        return dict(options)
    named: dict[str, Any] = {}
    for (name, parameter), value in zip(
        ((name, signature.parameters[name]) for name in bound.arguments),
        bound.arguments.values(),
        strict=True,
    ):
        named |= value if parameter.kind is parameter.VAR_KEYWORD else {name: value}
    named.pop(next(iter(signature.parameters)))
    return named


def may_train(module: torch.nn.Module) -> bool:
    """Return whether a pass that begins now can be one of training, whatever the module's mode."""
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model within DDP, FSDP or torch.compile."""
    for name in _WRAPPERS:
        inner = module._modules.get(name)
        if inner is not None and len(module._modules) == 1:
            return unwrapped(inner)
    return module


def repeated(model: torch.nn.Module) -> tuple[str, int]:
    """Return the class of the blocks that a model repeats, and how many there are: of what stands
    in lists and sequences, the class with the most parameters."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for stack in model.modules():
        if not isinstance(stack, torch.nn.ModuleList | torch.nn.Sequential):
            continue
        for block in stack.children():
            if next(block.children(), None) is not None:
                sizes[type(block).__name__].append(sum(p.numel() for p in block.parameters()))
    several = {name: found for name, found in sizes.items() if len(found) > 1}
    name = max(several, key=lambda each: sum(several[each]), default="")
    return name, len(several.get(name, ()))


def checkpoint_switch(model: torch.nn.Module) -> str:
    """Return the name of the method by which a model of transformers begins to checkpoint."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return ""
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    return new if hasattr(model, new) else old


def has_chunked_loss(model: torch.nn.Module) -> bool:
    """Return whether `remedies.loss_in_chunks` can take the place of the model's forward pass."""
    from gpumem.estimation.techniques import output_layer
    from gpumem.inputs import InputError

    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not type(plain).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return False
    try:
        return output_layer(plain)[1] is None  # a soft cap is computed on all logits
    except InputError:
        return False


def is_installed(package: str) -> bool:
    """Return whether a package can be imported here."""
    return importlib.util.find_spec(package) is not None


# --- what libraries make, called by ``startup/sitecustomize.py`` ---------------------------------


def after_models(module: Any) -> None:
    """Look on at models that transformers loads."""
    for program in _CURRENT:
        program.watch_function(module.PreTrainedModel, "from_pretrained", LOADED)


def after_arguments(module: Any) -> None:
    """Look on at Trainer's arguments."""
    for program in _CURRENT:
        program.watch_fields(module.TrainingArguments, ARGUMENTS)


def after_accelerate(module: Any) -> None:
    """Look on at Accelerate's own object."""
    for program in _CURRENT:
        program.watch_class(module.Accelerator, ACCELERATOR)


def after_lightning(module: Any) -> None:
    """Look on at Lightning's Trainer."""
    for program in _CURRENT:
        program.watch_class(module.Trainer, LIGHTNING)


def after_trl(module: Any) -> None:
    """Look on at TRL's supervised trainer."""
    for program in _CURRENT:
        program.watch_class(module.SFTTrainer, TRL)

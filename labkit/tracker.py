"""track(): record every allocation and every free of the tensors of running code.

    with track() as tracker:
        ...                       # any PyTorch code, on any device, on fake tensors too
    trace = tracker.trace()

What is recorded is the life of *storages*: a dispatch mode sees each operator's results, and a
weak reference to the storage sees it go. What a storage was for is decided after the run, by
identity: it ever was a parameter, a buffer, some parameter's ``.grad``, in an optimizer's state,
saved by autograd for backward, or none of these (temporary). Nothing needs to be handed over.

Views count once, tied weights count once, wrapper sub-classes (DTensor, quantised tensors) count
what they hold, tensors on ``meta`` hold nothing.

Limits: memory that an operator takes and gives back inside itself (a kernel's workspace) is not a
tensor and is not seen; neither is what C++ extensions allocate without PyTorch. A tensor made
before tracking began is counted from the moment it is first met. Compiled code cannot run under
a dispatch mode, nor ``torch.func.grad`` under saved-tensor hooks. An L-BFGS closure's forward ends
the optimizer's phase. Sparse gradients are not seen. Recording is for one thread and its backward
pass.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from labkit.collectives import COLLECTIVES, sent_bytes
from labkit.memory import Category, Event, Mark, Phase, Storage, Trace, Work, format_bytes

# A storage keeps the first of these that it ever was.
PRIORITY = (
    Category.WEIGHTS,
    Category.GRADIENTS,
    Category.OPTIMIZER,
    Category.BUFFERS,
    Category.ACTIVATIONS,
)
_DEVICE = torch.ops.prim.device.default
_RANK = {category: rank for rank, category in enumerate(PRIORITY)}


class SimulatedOutOfMemory(torch.OutOfMemoryError):
    """A request went past the budget of a pretended device. Means what the real error means."""

    def __init__(self, requested_bytes: int, live_bytes: int, budget_bytes: int) -> None:
        self.requested_bytes = requested_bytes
        super().__init__(
            f"Simulated device out of memory. Tried to allocate {format_bytes(requested_bytes)}. "
            f"The pretended device allows {format_bytes(budget_bytes)}, of which "
            f"{format_bytes(live_bytes)} is in use."
        )


# What drivers, libraries and the CPU say in a plain RuntimeError.
_SHORTAGES = ("out of memory", "can't allocate memory", "status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch's own class, and the plain RuntimeErrors by which others say it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _SHORTAGES)


class Failure(NamedTuple):
    """Where the code was, and what it held, when an allocation failed."""

    operator: str
    module: str
    phase: Phase
    by_category: dict[Category, int]


class _StorageRef(weakref.ref):
    """A weak reference that knows which storage it watched."""

    __slots__ = ("address", "number")


class _Entry:
    """What is known of one storage while tracking; becomes a `Storage` afterwards."""

    __slots__ = (
        "category", "device", "dtype", "module", "name", "nbytes", "operator", "peak_bytes",
        "phase", "shape",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, nbytes: int, tracker: "Tracker") -> None:
        self.category = Category.TEMPORARY
        self.device = tracker.counted_as or str(tensor.device)
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.module = tracker.module_path
        self.operator = tracker.operator
        self.phase = tracker.phase
        self.name = ""
        self.nbytes = self.peak_bytes = nbytes


class Tracker(TorchDispatchMode):
    """The context manager behind `track`. One use each."""

    def __init__(
        self, *, budget_bytes: int | None = None, device: str | None = None, work: bool = False
    ) -> None:
        super().__init__()
        self.budget_bytes, self.device, self.count_work = budget_bytes, device, work
        self.phase, self.operator, self.module_path = Phase.SETUP, "", ""
        self.live_bytes: Counter[str] = Counter()
        self.counted_as = ""  # where new storages count, if not where they are
        self._entries: list[_Entry] = []
        self._events: list[Event] = []
        self._marks: list[Mark] = []
        self._numbers: dict[int, _StorageRef] = {}
        self._work: dict[str, list[int]] = {}
        self._names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._known_modules: weakref.WeakSet = weakref.WeakSet()
        self._modules: list[torch.nn.Module] = []
        self._roots = 0
        self._optimizers_running = 0
        self._used = False
        self._cleanup = ExitStack()
        self.failure: Failure | None = None

    # --- what callers use -----------------------------------------------------------------

    def mark(self, text: str) -> None:
        """Name this moment; ``step N`` marks begin a training step."""
        self._marks.append(Mark(len(self._events), text))

    def trace(self) -> Trace:
        """Everything recorded so far, classified."""
        storages = tuple(
            Storage(e.peak_bytes, e.category, e.device, e.operator, e.module, e.name, e.phase,
                    e.shape, str(e.dtype).removeprefix("torch."))
            for e in self._entries
        )  # fmt: skip
        work = {name: Work(*counts) for name, counts in self._work.items()}
        return Trace(self.main_device, storages, tuple(self._events), tuple(self._marks), work)

    @contextmanager
    def counting_as(self, device: str) -> Iterator[None]:
        """What is first met in the block counts as memory of ``device``, wherever it is.

        For code that would use another device elsewhere. Name the device to measure when tracking
        begins: a made-up one would be taken for it.
        """
        before, self.counted_as = self.counted_as, device
        try:
            yield
        finally:
            self.counted_as = before

    def count_as(self, device: str, tensors: Iterable[torch.Tensor]) -> None:
        """The same for ``tensors`` that live now, as if from their first moment."""
        for tensor in tensors:
            for number, _ in self._met(tensor):
                entry = self._entries[number]
                self.live_bytes[entry.device] -= entry.nbytes
                self.live_bytes[device] += entry.nbytes
                entry.device = device

    @property
    def events(self) -> int:
        """How many events have been recorded so far."""
        return len(self._events)

    def work_done(self) -> tuple[int, int, int]:
        """Floating-point operations, bytes moved and bytes sent to other ranks so far."""
        _, flops, moved, sent = (
            sum(column) for column in zip([0] * 4, *self._work.values(), strict=True)
        )
        return flops, moved, sent

    @property
    def main_device(self) -> str:
        """The device asked for, else the first one that is not the CPU, else the CPU."""
        if self.device is not None:
            return self.device
        others = (entry.device for entry in self._entries if entry.device != "cpu")
        return next(others, "cpu")

    def live_by_category(self) -> dict[Category, int]:
        """Bytes live right now on the main device, as far as they can be classified yet."""
        live: Counter[Category] = Counter()
        device = self.main_device
        for ref in self._numbers.values():
            entry = self._entries[ref.number]
            if entry.device == device:
                live[entry.category] += entry.nbytes
        return {category: live[category] for category in Category if live[category]}

    def _failure(self) -> Failure:
        return Failure(self.operator, self.module_path, self.phase, self.live_by_category())

    # --- entering and leaving -------------------------------------------------------------

    def __enter__(self) -> "Tracker":
        if self._used:
            raise RuntimeError("a tracker records once: call track() again for another block")
        self._used = True
        try:
            self._start()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def _start(self) -> None:
        push = self._cleanup.enter_context
        for handle in (
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ):
            self._cleanup.callback(handle.remove)
        push(mock.patch.object(torch.UntypedStorage, "resize_", self._resizing()))
        if sharding := sys.modules.get("torch.distributed.tensor._sharding_prop"):
            push(_unseen(sharding.ShardingPropagator, "_propagate_tensor_meta_non_cached"))
        hooks = torch._C._autograd
        # Hooks that somebody entered before us go on packing; ours only looks.
        outer = hooks._top_saved_tensors_default_hooks(True)
        self._hooks = self._observing(*outer) if outer else (self._pack, _unpack)
        hooks._push_saved_tensors_default_hooks(*self._hooks)
        self._cleanup.callback(self._remove_hooks)
        # From here on every other pair of hooks (checkpointing, saving on the CPU) reports too.
        push(mock.patch.object(saved_tensors_hooks, "__enter__", self._entering_hooks()))
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        # A generator may be suspended inside hooks or modes of its own, which then lie above ours.
        above = []
        while (mode := _get_current_dispatch_mode()) is not self and mode is not None:
            above.append(_pop_mode())
        try:
            super().__exit__(*error)
        finally:
            for mode in reversed(above):
                _push_mode(mode)
            self._cleanup.close()
        self._numbers.clear()  # drops the weak references: what dies later is not our business
        self._modules.clear()

    def _remove_hooks(self) -> None:
        """Take our pair out of autograd's stack, and leave those above it."""
        stack, above = torch._C._autograd, []
        while (top := stack._top_saved_tensors_default_hooks(True)) is not None:
            stack._pop_saved_tensors_default_hooks()
            if top[0] == self._hooks[0]:
                break
            above.append((getattr(top[0], "plain", top[0]), top[1]))
        for pair in reversed(above):
            stack._push_saved_tensors_default_hooks(*pair)

    # --- storages -------------------------------------------------------------------------

    def _met(self, tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Number and new bytes (0 if known) of each storage behind ``tensor``."""
        if is_traceable_wrapper_subclass(tensor):
            for attribute in tensor.__tensor_flatten__()[0]:
                inner = getattr(tensor, attribute)
                if isinstance(inner, torch.Tensor):  # a DTensor names its mesh of devices, too
                    yield from self._met(inner)
            return
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        ref = self._numbers.get(address)
        if ref is not None and ref() is not None:
            # An operator's `resize_` and `out=` make a living storage grow.
            grown_bytes = storage.nbytes() - self._entries[ref.number].nbytes
            if grown_bytes:
                self._changed(ref.number, grown_bytes)
            yield ref.number, 0
            return
        number, nbytes = len(self._entries), storage.nbytes()
        entry = _Entry(tensor, nbytes, self)
        ref = _StorageRef(storage, self._freed)
        ref.address, ref.number = address, number
        self._numbers[address] = ref
        self._entries.append(entry)
        self.live_bytes[entry.device] += nbytes
        self._events.append(Event(number, nbytes, self.phase))
        yield number, nbytes

    def _freed(self, ref: _StorageRef) -> None:
        if self._numbers.get(ref.address) is ref:
            del self._numbers[ref.address]
        self._changed(ref.number, -self._entries[ref.number].nbytes)

    def _changed(self, number: int, change_bytes: int) -> None:
        entry = self._entries[number]
        entry.nbytes += change_bytes
        entry.peak_bytes = max(entry.peak_bytes, entry.nbytes)
        self.live_bytes[entry.device] += change_bytes
        self._events.append(Event(number, change_bytes, self.phase))

    def _resizing(self) -> Callable:
        """`UntypedStorage.resize_` frees and regrows a living storage (FSDP does it)."""
        original, numbers = torch.UntypedStorage.resize_, self._numbers

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = original(storage, size)
            ref = numbers.get(storage._cdata)
            if ref is not None and ref() is not None and storage.nbytes() != before:
                self._changed(ref.number, storage.nbytes() - before)
            return result

        return resize_

    def _classify(self, tensor: Any, category: Category, name: str = "") -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        for number, _ in self._met(tensor):
            entry = self._entries[number]
            if _RANK[category] < _RANK.get(entry.category, len(_RANK)):
                entry.category = category
            entry.name = entry.name or name

    # --- operators ------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE:  # autograd asks every fake tensor for it, oftener than it computes
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the sub-class first: what it runs inside comes back here
        in_backward = torch._C._current_graph_task_id() != -1
        if self._optimizers_running:
            self.phase = Phase.OPTIMIZER
        elif in_backward:
            self.phase = Phase.BACKWARD
        elif self.phase is Phase.BACKWARD:
            self.phase = Phase.OTHER
        kwargs = kwargs or {}
        self.operator = func.__name__.partition(".")[0]
        try:
            out = func(*args, **kwargs)
            for item in (out,) if isinstance(out, torch.Tensor) else _tensors(out):
                for number, nbytes in self._met(item):
                    if self.budget_bytes is not None and nbytes:
                        self._check_budget(number, nbytes)
        except Exception as error:
            # The hooks unwind module and phase on the way out: note them here.
            if is_out_of_memory(error):
                self.failure = self._failure()
            raise
        if self.count_work and func.namespace in COUNTED and not func.is_view:
            self._count(func, args, kwargs, out)
        elif self.count_work and func.namespace in COLLECTIVES:
            row = self._work.setdefault(self.operator, [0, 0, 0, 0])
            row[0] += 1
            row[3] += sent_bytes(func, args)
        self.operator = ""
        return out

    def _check_budget(self, number: int, nbytes: int) -> None:
        device = self._entries[number].device
        if device != self.main_device or self.live_bytes[device] <= self.budget_bytes:
            return
        # The request failed, so it never was: forget it before saying so.
        live_bytes = self.live_bytes[device] - nbytes
        self._forget(number)
        raise SimulatedOutOfMemory(nbytes, live_bytes, self.budget_bytes)

    def _forget(self, number: int) -> None:
        """Take back the newest storage, as if it had not been met."""
        entry = self._entries.pop()
        # Rarely not the last event: the garbage collector may have freed something since.
        del self._events[max(i for i, e in enumerate(self._events) if e.storage == number)]
        self.live_bytes[entry.device] -= entry.nbytes
        address = next(a for a, ref in self._numbers.items() if ref.number == number)
        del self._numbers[address]

    def _count(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        row = self._work.setdefault(self.operator, [0, 0, 0, 0])
        formula = FLOP_FORMULAS.get(func._overloadpacket)
        row[0] += 1
        if formula:
            row[1] += formula(*args, **kwargs, out_val=out)
        elif self.operator in QUANTISED_PRODUCTS:
            row[1] += 2 * out.numel() * args[0].shape[-1]
        # What returns nothing writes into its arguments: `_foreach_` and fused updates.
        written = (out,) if func._schema.returns else _overwritten(func, args, kwargs)
        row[2] += sum(t.numel() * t.element_size() for t in _tensors((args, written)))

    # --- modules, gradients, optimizers ---------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if module not in self._names:
            self._name_modules(module)
        self._modules.append(module)
        self.module_path = self._names.get(module, "")
        if torch._C._current_graph_task_id() == -1:
            self.phase = Phase.FORWARD
            # A step that failed never says that it ended, and one with a closure calls the model.
            self._optimizers_running = 0
        if module in self._known_modules:
            for parameter in module._parameters.values():  # its `.data` may be another by now
                if parameter is not None:
                    self._classify(parameter, Category.WEIGHTS)
            return
        self._known_modules.add(module)
        prefix = f"{self.module_path}." if self.module_path else ""
        for name, parameter in module.named_parameters(recurse=False):
            self._watch_parameter(parameter, prefix + name)
        for name, buffer in module.named_buffers(recurse=False):
            self._classify(buffer, Category.BUFFERS, prefix + name)

    def _after_forward(self, module: torch.nn.Module, *_: Any) -> None:
        # An error in another hook may skip levels: unwind to this module's own.
        while self._modules and self._modules.pop() is not module:
            pass
        self.module_path = self._names.get(self._modules[-1], "") if self._modules else ""

    def _name_modules(self, module: torch.nn.Module) -> None:
        """Paths as `named_modules` gives them; a second model's begin with its class."""
        root = self._modules[0] if self._modules else module
        prefix = ""
        if root is module:
            self._roots += 1
            prefix = type(module).__name__ if self._roots > 1 else ""
        for name, child in root.named_modules(prefix=prefix):
            self._names.setdefault(child, name)
        if root is module:
            # Here, too: a module whose weights are sharded shows its forward only gathered ones.
            for name, parameter in root.named_parameters(prefix=prefix):
                self._classify(parameter, Category.WEIGHTS, name)
        self._names.setdefault(module, type(module).__name__)  # not in the tree of its caller

    def _watch_parameter(self, parameter: torch.Tensor, name: str) -> None:
        self._classify(parameter, Category.WEIGHTS, name)
        # A quantised parameter carries its scales and tables beside itself (bitsandbytes).
        carriers, names = [parameter], ("CB", "SCB")
        state = getattr(parameter, "quant_state", None)
        while state is not None:
            carriers, names = [*carriers, state], ("CB", "SCB", "absmax", "code", "offset")
            state = getattr(state, "state2", None)
        for carrier in carriers:
            for attribute in names:
                self._classify(getattr(carrier, attribute, None), Category.WEIGHTS, name)
        if parameter.requires_grad and parameter.is_leaf:

            def accumulated(owner: torch.Tensor) -> None:
                self._classify(owner.grad, Category.GRADIENTS, name)

            handle = parameter.register_post_accumulate_grad_hook(accumulated)
            self._cleanup.callback(handle.remove)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Parameters used outside any module, and gradients that nobody accumulated, show here.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._classify(parameter, Category.WEIGHTS)
                self._classify(parameter.grad, Category.GRADIENTS)
        self._classify_state(optimizer)
        self._optimizers_running += 1
        self.phase = Phase.OPTIMIZER

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._classify_state(optimizer)
        self._optimizers_running = max(0, self._optimizers_running - 1)
        self.phase = Phase.OTHER

    def _classify_state(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for tensor in _tensors(state):
                self._classify(tensor, Category.OPTIMIZER)

    # --- what autograd saves --------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Autograd's own behaviour, observed. Hooks turn its check for in-place changes off, so
        the version travels along; a result is detached, or it would keep its own graph alive."""
        self._classify(tensor, Category.ACTIVATIONS)
        kept = tensor if tensor.grad_fn is None else tensor.detach()
        return kept, tensor._version

    def _observing(self, pack: Callable, unpack: Callable) -> tuple[Callable, Callable]:
        """Other people's hooks, with what they keep counted."""

        def counted(tensor: torch.Tensor) -> Any:
            try:
                kept = pack(tensor)
            except BaseException:
                # Checkpointing keeps the last tensor it needs and then stops the forward.
                self._classify(tensor, Category.ACTIVATIONS)
                raise
            for item in _tensors(kept):
                self._classify(item, Category.ACTIVATIONS)
            return kept

        counted.plain = pack
        return counted, unpack

    def _entering_hooks(self) -> Callable:
        """`saved_tensors_hooks.__enter__` for other people's hooks: what they keep is counted."""

        def enter(hooks: saved_tensors_hooks) -> None:
            torch._C._autograd._push_saved_tensors_default_hooks(
                *self._observing(hooks.pack_hook, hooks.unpack_hook)
            )

        return enter


def _unseen(owner: type, name: str) -> Any:
    """Patch a method to run outside all modes.

    DTensor finds the shape of a result by a rehearsal on fake tensors of *global* size, which no
    rank ever holds.
    """
    original = getattr(owner, name)

    def method(*args: Any) -> Any:
        with _disable_current_modes():
            return original(*args)

    return mock.patch.object(owner, name, method)


def _unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
            f"expected version {version} instead."
        )
    return tensor


def _overwritten(func: Any, args: tuple, kwargs: dict) -> list[Any]:
    """The arguments that an operator writes into, by its schema."""
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and dictionaries."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _attention_flops(query, key, value, *_, **__) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward_flops(grad, query, key, value, *_, **__) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


#: Whose operators' work is counted.
COUNTED = ("aten", "bitsandbytes")
#: bitsandbytes' products, whose inner dimension is the last of their first argument.
QUANTISED_PRODUCTS = ("gemm_4bit", "int8_linear_matmul")
_aten = torch.ops.aten
# PyTorch's own table, and the CPU's flash attention, which it lacks: the same two products forward
# and five backward as the CUDA kernel's entry.
FLOP_FORMULAS = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def track(
    *, budget_bytes: int | None = None, device: str | None = None, work: bool = False
) -> Tracker:
    """Record the memory of the code inside a ``with`` block.

    Args:
        budget_bytes: raise `SimulatedOutOfMemory` when the tensors on ``device`` would hold more.
        device: whose bytes the trace counts, such as ``"cuda:0"``; by default the accelerator
            where there is one, else the CPU.
        work: count floating-point operations, bytes moved and bytes sent to other ranks per
            operator too (slower).

    Returns:
        The tracker: ``.mark(text)`` while it runs, ``.trace()`` for the `Trace` at any time.
    """
    return Tracker(budget_bytes=budget_bytes, device=device, work=work)

"""track(): record every allocation and every free of the tensors of running code.

    with track() as tracker:
        ...                       # any PyTorch code, on any device, on fake tensors too
    trace = tracker.trace()

What is recorded is the life of *storages*: a dispatch mode sees each operator's results, and a
weak reference to the storage sees it go. What a storage was for is decided after the run, by
identity: it ever was a parameter, a buffer, some parameter's ``.grad``, in an optimizer's state,
saved by autograd for backward, or none of these (temporary). Nothing needs to be handed over.

Views count once, tied weights count once, wrapper sub-classes (DTensor, quantized tensors) count
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
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
)

from gpumem.costs import (
    COLLECTIVES,
    COUNTED,
    flops_of,
    moved_bytes,
    plain_tensors,
    sent_bytes,
    tensors_in,
    with_scales,
)
from gpumem.gradient_sums import as_without_mode
from gpumem.out_of_memory import SimulatedOutOfMemory, is_out_of_memory
from gpumem.trace import Category, Event, Phase, Storage, Trace, Work

# A storage keeps the first of these that it ever was.
PRIORITY = (
    Category.WEIGHTS,
    Category.GRADIENTS,
    Category.OPTIMIZER,
    Category.BUFFERS,
    Category.ACTIVATIONS,
)
_DEVICE = torch.ops.prim.device.default
#: On CUDA these make their last result first, which decides where the allocator places them
#: (``dropout_cuda`` in PyTorch's Dropout.cu; ``backends/cuda/ops.py`` of bitsandbytes).
_LAST_FIRST = {"native_dropout", "quantize_4bit", "quantize_blockwise", "int8_vectorwise_quant"}
#: So many results are made before the kernel takes its workspaces, and the others after
#: (``mha_fwd`` in PyTorch's flash_api.cpp: the seeds of a dropout). Else all are.
_RESULTS_BEFORE = {"_scaled_dot_product_flash_attention": 2}
_RANK = {category: rank for rank, category in enumerate(PRIORITY)}


class Failure(NamedTuple):
    """Where the code was, and what it held, when an allocation failed; empty where unknown."""

    operator: str
    module: str
    phase: Phase | str
    by_category: dict[Category, int]


class Streams:
    """Numbers of streams where there is one: 0."""

    def current(self) -> int:
        """Return the number of the stream that is current."""
        return 0

    def number(self, stream: Any) -> int:
        """Return the number of ``stream``."""
        return 0


class CudaStreams(Streams):
    """CUDA's own numbers of the streams of the current GPU."""

    def current(self) -> int:
        return torch.cuda.current_stream().stream_id

    def number(self, stream: Any) -> int:
        return stream.stream_id


class _StorageRef(weakref.ref):
    """A weak reference that knows which storage it watched."""

    __slots__ = ("address", "number")


@dataclass(slots=True)
class _Entry:
    """What is known of one storage while tracking; becomes a `Storage` afterwards."""

    nbytes: int
    peak_bytes: int
    device: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    module: str
    operator: str
    phase: Phase
    category: Category = Category.TEMPORARY
    name: str = ""

    def storage(self) -> Storage:
        fields = {name: getattr(self, name) for name in Storage._fields}
        fields |= {"nbytes": self.peak_bytes, "dtype": str(self.dtype).removeprefix("torch.")}
        return Storage(**fields)


class Tracker(TorchDispatchMode):
    """The context manager behind `track`. One use each."""

    def __init__(
        self, *, budget_bytes: int | None = None, device: str | None = None, work: bool = False
    ) -> None:
        super().__init__()
        self.budget_bytes, self.device, self.count_work = budget_bytes, device, work
        self.phase, self.operator, self.module_path = Phase.SETUP, "", ""
        self.live_bytes: Counter[str] = Counter()
        #: Says what an operator takes and frees while it runs, by function and arguments: blocks,
        #: numbered from 0, and by how many bytes each grows.
        self.workspaces: Callable[[Any, tuple, dict], list[tuple[int, int]]] | None = None
        #: Says which kernel of an operator only calls others, which are recorded instead.
        self.key_of_parts: Callable[[Any], torch._C.DispatchKey | None] = lambda func: None
        self.streams: Streams = CudaStreams() if torch.cuda.is_available() else Streams()
        self._entries: list[_Entry] = []
        self._events: list[Event] = []
        self._step_ends: list[int] = []
        self._numbers: dict[int, _StorageRef] = {}
        self._work: dict[str, Work] = {}  # by operator
        self._work_before = Work()
        self.step_work: Work | None = None  # of the last whole step; None where none was counted
        self._names: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._known_modules: weakref.WeakSet = weakref.WeakSet()
        self._modules: list[torch.nn.Module] = []
        self._roots = 0
        self._optimizers_running = 0
        self._used = False
        self._cleanup = ExitStack()
        self.failure: Failure | None = None

    # --- what callers use -----------------------------------------------------------------

    def end_step(self, *, failed: bool = False) -> None:
        """End a training step; ``failed`` by an error, which during setup is no step.

        The first step begins with the first event that is not setup.
        """
        if failed and not self._step_ends and self._setup_end() is None:
            return
        self._step_ends.append(len(self._events))
        if not failed:
            done = self.work_done()
            self.step_work = done - self._work_before if done.calls else None
            self._work_before = done

    def _setup_end(self) -> int | None:
        """Return the index of the first event that is not setup."""
        stepping = (i for i, event in enumerate(self._events) if event.phase is not Phase.SETUP)
        return next(stepping, None)

    def trace(self) -> Trace:
        """Return everything recorded so far, classified."""
        starts = (self._setup_end() or 0, *self._step_ends[:-1]) if self._step_ends else ()
        storages = tuple(entry.storage() for entry in self._entries)
        return Trace(self.main_device, storages, tuple(self._events), starts, dict(self._work))

    def work_done(self) -> Work:
        """Return the work of all operators so far."""
        return sum(self._work.values(), start=Work())

    @property
    def main_device(self) -> str:
        """The device asked for, else the first one that is not the CPU, else the CPU."""
        others = (entry.device for entry in self._entries if entry.device != "cpu")
        return self.device or next(others, "cpu")

    def live_by_category(self) -> dict[Category, int]:
        """Return bytes live now on the main device, as far as they can be classified yet."""
        live: Counter[Category] = Counter()
        device = self.main_device
        for entry in self._entries:
            if entry.device == device:
                live[entry.category] += entry.nbytes
        return {category: live[category] for category in Category if live[category]}

    # --- entering and leaving -------------------------------------------------------------

    def __enter__(self) -> "Tracker":
        if self._used:
            raise RuntimeError("a tracker records once: call track() again for another block")
        self._used = True
        push = self._cleanup.enter_context
        for handle in (
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ):
            self._cleanup.callback(handle.remove)
        push(mock.patch.object(torch.UntypedStorage, "resize_", self._resizing()))
        push(mock.patch.object(torch.Tensor, "record_stream", self._recording_streams()))
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
        return super().__enter__()

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
        """Yield number and new bytes (0 if known) of each storage behind ``tensor``."""
        for plain in plain_tensors(tensor):
            if plain.device.type != "meta" and plain.layout is torch.strided:
                yield self._known_storage(plain)

    def _known_storage(self, tensor: torch.Tensor) -> tuple[int, int]:
        storage = tensor.untyped_storage()
        address = storage._cdata
        ref = self._numbers.get(address)
        if ref is not None and ref() is not None:
            # An operator's `resize_` and `out=` make a living storage grow.
            grown_bytes = storage.nbytes() - self._entries[ref.number].nbytes
            if grown_bytes:
                self._changed(ref.number, grown_bytes)
            return ref.number, 0
        number, nbytes = len(self._entries), storage.nbytes()
        entry = _Entry(
            nbytes=nbytes,
            peak_bytes=nbytes,
            device=str(tensor.device),
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            module=self.module_path,
            operator=self.operator,
            phase=self.phase,
        )
        ref = _StorageRef(storage, self._freed)
        ref.address, ref.number = address, number
        self._numbers[address] = ref
        self._entries.append(entry)
        self.live_bytes[entry.device] += nbytes
        self._events.append(Event(number, nbytes, self.phase, self.streams.current()))
        return number, nbytes

    def _freed(self, ref: _StorageRef) -> None:
        if self._numbers.get(ref.address) is ref:
            del self._numbers[ref.address]
        self._changed(ref.number, -self._entries[ref.number].nbytes)

    def _changed(self, number: int, change_bytes: int) -> None:
        entry = self._entries[number]
        entry.nbytes += change_bytes
        entry.peak_bytes = max(entry.peak_bytes, entry.nbytes)
        self.live_bytes[entry.device] += change_bytes
        stream = self.streams.current() if change_bytes > 0 else 0
        self._events.append(Event(number, change_bytes, self.phase, stream))

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

    def _recording_streams(self) -> Callable:
        """`Tensor.record_stream` with a line in the log."""
        original = torch.Tensor.record_stream

        def record_stream(tensor: torch.Tensor, stream: Any) -> None:
            original(tensor, stream)
            for number, _ in self._met(tensor):
                use = Event(number, 0, self.phase, self.streams.number(stream))
                self._events.append(use)

        return record_stream

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
        if (key := self.key_of_parts(func)) is not None:
            _push_mode(self)
            try:
                return func._op_dk(key, *args, **(kwargs or {}))
            finally:
                _pop_mode()
        in_backward = torch._C._current_graph_task_id() != -1
        if self._optimizers_running:
            self.phase = Phase.OPTIMIZER
        elif in_backward:
            self.phase = Phase.BACKWARD
        elif self.phase is Phase.BACKWARD:
            self.phase = Phase.OTHER
        kwargs = kwargs or {}
        func = as_without_mode(func, args)
        self.operator = func.__name__.partition(".")[0]
        try:
            out = func(*args, **kwargs)
            made = [out] if isinstance(out, torch.Tensor) else list(tensors_in(out))
            if self.operator in _LAST_FIRST:
                made.reverse()
            before = _RESULTS_BEFORE.get(self.operator, len(made))
            self._note_results(made[:before])
            first, changes = len(self._entries), []
            if self.workspaces is not None:
                changes = self.workspaces(func, args, kwargs)
            if before < len(made):
                taken = [change for change in changes if change[1] > 0]
                self._take_and_free(taken, first)
                self._note_results(made[before:])
                changes = changes[len(taken) :]
            self._take_and_free(changes, first)
        except Exception as error:
            # The hooks unwind module and phase on the way out: record them here.
            if is_out_of_memory(error):
                self.failure = Failure(
                    self.operator, self.module_path, self.phase, self.live_by_category()
                )
            raise
        if self.count_work:
            self._count(func, args, kwargs, out)
        self.operator = ""
        return out

    def _note_results(self, made: list[torch.Tensor]) -> None:
        for item in made:
            for number, nbytes in self._met(item):
                if self.budget_bytes is not None and nbytes:
                    self._check_budget(number, nbytes)

    def _take_and_free(self, changes: list[tuple[int, int]], first: int) -> None:
        """Log the changes of blocks of the main device, which are numbered from ``first`` on as
        they are taken."""
        for block, change_bytes in changes:
            stream = self.streams.current() if change_bytes > 0 else 0
            self._events.append(Event(first + block, change_bytes, self.phase, stream))
            if change_bytes > 0:
                self._entries.append(
                    _Entry(
                        nbytes=0,
                        peak_bytes=change_bytes,
                        device=self.main_device,
                        dtype=torch.uint8,
                        shape=(change_bytes,),
                        module=self.module_path,
                        operator=self.operator,
                        phase=self.phase,
                        category=Category.UNATTRIBUTED,
                    )
                )

    def _check_budget(self, number: int, nbytes: int) -> None:
        device = self._entries[number].device
        if device != self.main_device or self.live_bytes[device] <= self.budget_bytes:
            return
        # Remove the failed allocation from the log before raising.
        live_bytes = self.live_bytes[device] - nbytes
        self._forget(number)
        raise SimulatedOutOfMemory(nbytes, live_bytes, self.budget_bytes)

    def _forget(self, number: int) -> None:
        """Remove the newest storage."""
        entry = self._entries.pop()
        position = len(self._events) - 1
        while self._events[position].storage != number:
            position -= 1  # the garbage collector has freed something since
        del self._events[position]
        self.live_bytes[entry.device] -= entry.nbytes
        address = next(a for a, ref in self._numbers.items() if ref.number == number)
        del self._numbers[address]

    def _count(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        if func.namespace in COUNTED and not func.is_view:
            work = Work(1, flops_of(func, args, kwargs, out), moved_bytes(func, args, kwargs, out))
        elif func.namespace in COLLECTIVES:
            work = Work(1, sent_bytes=sent_bytes(func, args))
        else:
            return
        self._work[self.operator] = self._work.get(self.operator, Work()) + work

    # --- modules, gradients, optimizers ---------------------------------------------------

    def _before_forward(self, module: torch.nn.Module, _: Any) -> None:
        if module not in self._names:
            self._name_modules(module)
        self._modules.append(module)
        self.module_path = self._names.get(module, "")
        if torch._C._current_graph_task_id() == -1:
            if self.phase is Phase.SETUP and not self._step_ends:
                self._work_before = self.work_done()  # to make and move a model is no step's work
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
        for tensor in with_scales(parameter):
            self._classify(tensor, Category.WEIGHTS, name)
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
            for tensor in tensors_in(state):
                self._classify(tensor, Category.OPTIMIZER)

    # --- what autograd saves --------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Autograd's own behaviour, observed. Hooks turn its check for in-place changes off, so
        the version travels along; a result is detached, or it would keep its own graph alive."""
        self._classify(tensor, Category.ACTIVATIONS)
        kept = tensor if tensor.grad_fn is None else tensor.detach()
        return kept, tensor._version

    def _observing(self, pack: Callable, unpack: Callable) -> tuple[Callable, Callable]:
        """Return other people's hooks, with what they keep counted."""

        def counted(tensor: torch.Tensor) -> Any:
            try:
                kept = pack(tensor)
            except BaseException:
                # Checkpointing keeps the last tensor it needs and then stops the forward.
                self._classify(tensor, Category.ACTIVATIONS)
                raise
            for item in tensors_in(kept):
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
        The tracker: ``.end_step()`` after each training step, ``.trace()`` at any time.
    """
    return Tracker(budget_bytes=budget_bytes, device=device, work=work)

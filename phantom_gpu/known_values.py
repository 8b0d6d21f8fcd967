"""Follow the values of small tensors on a GPU that computes nothing.

Programs read small tensors to decide what to do: is the mask all true, how many tokens are there,
at which places. `KnownValues` keeps a copy on the CPU, the twin, of each small whole-number or
boolean tensor, and of floating-point tensors: of those that came from the host or from constants
up to 65,536 elements, trainable ones left out, of what is computed from these up to two million,
else of a few. It does every operation on known inputs a second time on the twins, and answers from
them. What is computed from unknown values, losses for example, is unknown, and reads as zero. Small
results of unknown values are those of zeros, so that a program which decides by them goes one way:
the largest logit is the first, and losses and gradients are finite. A mask that unknown numbers
decide chooses everything, since that takes the most memory.

Limits: twins belong to whole storages, so that views and writes through them agree. What a thread
that Python code starts itself does is not followed.
"""

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, ClassVar

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gpumem.costs import tensors_in
from gpumem.gradient_sums import as_without_mode
from phantom_gpu import collectives
from phantom_gpu.guarded import guarded

MOST_ELEMENTS = 1 << 21
MOST_FLOATS = 16
#: Boxes and schedules are read; what is larger is a batch or a weight.
MOST_KNOWN_FLOATS = 1 << 16
#: What is computed from known values alone: the anchors of an image, and how well each fits a box.
MOST_COMPUTED_FLOATS = 1 << 21
#: An operation on more unknown values than this is not done on zeros: its result is taken as zeros.
MOST_ZEROS = 1 << 20
#: Whole numbers that begin as zeros, which cost nothing until they are written: `one_hot` of the
#: experts that each token of a batch takes.
MOST_ZERO_NUMBERS = 1 << 26
PLAIN = (torch.Tensor, torch.nn.Parameter)

aten = torch.ops.aten
#: PyTorch's own kernels of composite operators; `decompose` prefers those that are in Python.
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
#: Only called, in a forward pass, by operators whose arguments autocast has cast.
INSIDE_OF_CAST = {aten._euclidean_dist.default, aten._trilinear.default}
AUTOCAST = {"cuda": torch._C.DispatchKey.AutocastCUDA, "cpu": torch._C.DispatchKey.AutocastCPU}
#: Programs redirect `torch.empty`: ``with torch.device("cuda")``, DeepSpeed's `zero.Init`.
_new = aten.empty.memory_format
#: Shapes of their results depend on values, so the result is made from the twin's.
SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten.index.Tensor,
}
#: They take masks, of which they ask the GPU for the places.
TAKE_MASKS = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
#: For them an unknown mask is taken to choose everything.
SELECTS = {aten.nonzero.default, *TAKE_MASKS}
#: They write all of their first argument and read nothing of it.
OVERWRITES = {
    aten.copy_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
}
#: They leave memory as it is, which reads as zeros.
UNINITIALIZED = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
#: They take a tensor's shape or type, and none of its values.
LIKE = {
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
}
#: Their kernels call operators that read values: where a matrix is not zero, whether it is finite.
READ_INSIDE = {
    aten._to_sparse.default,
    aten._to_sparse.sparse_dim,
    aten._to_sparse_csr.default,
    aten._to_sparse_csc.default,
    aten._to_sparse_bsr.default,
    aten._to_sparse_bsc.default,
    aten.linalg_eig.default,
    aten.linalg_eig.out,
}
#: They say whether two tensors are alike, and read the GPU for it.
COMPARISONS = {aten.equal.default, aten.allclose.default}
#: Collectives' companions, which move no values.
MOVES_NOTHING = {
    "c10d::barrier",
    "c10d::check_for_nan",
    "c10d::monitored_barrier_",
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
}
#: They give a tensor another storage, whose values stay as they are.
SETS_STORAGE = {getattr(aten.set_, name) for name in aten.set_.overloads()}
#: What they say of unknown values: nothing is wrong with these, and no number is exactly another.
OF_UNKNOWN = {aten.all: True, aten.any: False}
OF_UNKNOWN_FLOATS = {aten.eq.Scalar: False, aten.ne.Scalar: True}
#: Their masks choose everything: boxes that are large enough, scores that are high enough.
THRESHOLDS = {aten.ge, aten.gt, aten.le, aten.lt}
#: Unknown numbers are in order already, so each token takes the first experts, and no expert twice.
ORDERS = {aten.topk, aten.sort}
#: Of a loss scaler: divides gradients, and notes in its second argument if one is not finite.
CHECKS_GRADIENTS = aten._amp_foreach_non_finite_check_and_unscale_.default


class _Autocast(threading.local):
    """Which keys of autocast are on in a thread, and whether what runs is inside of an operator
    whose arguments it has cast.

    Modes run below autocast, which seems off there. It has cast the arguments of an operator for
    which it has a rule, and leaves alone what that calls; else it casts what is called.
    """

    #: Those of the thread that switched it last; a backward pass runs as its caller does.
    callers: ClassVar[set[torch._C.DispatchKey]] = set()

    def __init__(self) -> None:
        self.keys: set[torch._C.DispatchKey] = set()
        self.has_cast = False

    def follow(self) -> None:
        """Note from now on when the program switches it on or off."""
        plain = torch.set_autocast_enabled

        def noted(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            self.keys = {key for kind, key in AUTOCAST.items() if torch.is_autocast_enabled(kind)}
            if torch._C._current_graph_task_id() == -1:
                _Autocast.callers = self.keys

        torch.set_autocast_enabled = noted

    @contextmanager
    def inside_of(self, func: Any) -> Iterator[None]:
        """Let autocast see what ``func`` calls, if it would without a mode."""
        in_backward = torch._C._current_graph_task_id() != -1
        keys = self.keys or (self.callers if in_backward else self.keys)
        cast = _has_rule(func) or (func in INSIDE_OF_CAST and not in_backward)
        before, self.has_cast = self.has_cast, self.has_cast or cast
        with ExitStack() as stack:
            stack.callback(setattr, self, "has_cast", before)
            for key in () if self.has_cast else keys:
                stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
            yield


class KnownValues(TorchDispatchMode):
    """Follow small tensors while it is active; see the module."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._twins: dict[int, tuple[StorageWeakRef, torch.UntypedStorage, bool]] = {}
        self._purge_at = 1024
        self._autocast = _Autocast()
        self._autocast.follow()
        self._written: dict[Any, tuple[int, ...]] = {}  # by operator: positions of what it writes
        self._exchange = collectives.Exchange()
        #: By twin: what waits for values of other ranks, until they are read.
        self._arriving: dict[int, list[Callable[[], None]]] = {}
        #: Called with a tensor whose unknown values the program reads.
        self.on_unknown: Callable[[torch.Tensor], None] = lambda tensor: None
        #: Called with where a fault of ours was, and its error.
        self.note_fault = functools.partial(print, file=sys.stderr)
        #: Called with each operator that has run, its arguments and what it returned.
        self.on_operator: Callable[[Any, tuple, dict, Any], None] = lambda *call: None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: otherwise Dynamo compiles nothing while a mode is active."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, say: the operations on its parts come here
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs)
        func = as_without_mode(func, args)
        with self._autocast.inside_of(func):
            # Autograd takes it apart, but not in inference mode or in higher-order operators.
            if _is_composite(func):
                with self:
                    return func._op_dk(COMPOSITE, *args, **kwargs)
            out = self._run(func, args, kwargs)
        self.on_operator(func, args, kwargs, out)
        return out

    def _run(self, func, args, kwargs):
        if func is aten._local_scalar_dense.default:
            twin = self.twin(args[0])
            if twin is None or self._assumed(args[0]):
                self.on_unknown(args[0])
            return func(args[0] if twin is None else twin)
        if func in COMPARISONS and args[0].is_cuda:
            return self._compared(func, args, kwargs)
        if func in SETS_STORAGE:
            return func(*args, **kwargs)
        if func is aten.resize_.default:
            self._resize(*args)
            return func(*args, **kwargs)
        if func.overloadpacket in UNINITIALIZED:
            out = func(*args, **kwargs)
            self._empty(out)
            return out
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and func._schema.name not in MOVES_NOTHING
        ):
            out = func(*args, **kwargs)
            if not self._handed_on(func, args, kwargs, out):
                for tensor in tensors_in((args, kwargs)):
                    self._drop(tensor)
            return out
        if func is aten.lift_fresh.default:
            out = func(*args)
            self._lifted(out)
            return out
        tensors = list(tensors_in((args, kwargs)))
        if not any(tensor.is_cuda for tensor in tensors):
            out = func(*args, **kwargs)
            note = self._moved if tensors else self._factory
            note(func, args, kwargs, out)
            return out
        if func in OVERWRITES:
            self._begin(*args)
        if func is aten.masked_select.default:  # it is an index by the mask, once both have a shape
            func, args = aten.index.Tensor, _masked(*args)
        for tensor in _deciding(func, args, kwargs):
            unknown = self.twin(tensor) is None
            if unknown or self._assumed(tensor):
                self.on_unknown(tensor)
                if func is aten.nonzero.default and tensor.is_floating_point():
                    return _all_places(tensor)
            if unknown and func in SELECTS and tensor.dtype is torch.bool:
                if tensor.numel() <= MOST_ELEMENTS:
                    self._choose_all(tensor)
                elif func is aten.nonzero.default:
                    return _all_places(tensor)
        if func in TAKE_MASKS:
            args = self._places(args) or args
            tensors = list(tensors_in(args))
        known = all(
            (func in SELECTS or _knowable(each, MOST_COMPUTED_FLOATS) or _began_as_zeros(each))
            and self.twin(each) is not None
            for each in tensors
        )
        if func.overloadpacket in OF_UNKNOWN and any(map(self._assumed, tensors)):
            known = False
        if not known or torch.Tag.nondeterministic_seeded in func.tags:
            out = self._called(func, args, kwargs)
            if func is CHECKS_GRADIENTS:
                self._checked(args[1])
                return out
            if func.overloadpacket in LIKE:
                self._filled(func, args, kwargs, out)
                return out
            self._forget(func, args, kwargs)
            # What goes to pinned memory is offloaded, to come back unread.
            to_host = isinstance(out, torch.Tensor) and not out.is_cuda and out.numel()
            if to_host and not out.is_pinned():
                self.on_unknown(out)
            elif not isinstance(out, torch.Tensor) or _followed(out):
                self._assume(func, args, kwargs, out)
            return out
        assumed = any(map(self._assumed, tensors))
        if func in SHAPED_BY_VALUES:
            made = self._shaped(func, args, kwargs, assumed)
            if made is not None:
                return made
        out = self._called(func, args, kwargs)
        self._follow(func, args, kwargs, out, assumed)
        return out

    def _called(self, func, args, kwargs):
        """Run an operator; let those that read values inside read what is known."""
        if func not in READ_INSIDE or not _plain(args[0]):
            return func(*args, **kwargs)
        with self:
            out = func._op_dk(DispatchKey.CUDA, *args, **kwargs)
        for tensor in tensors_in(out):  # libraries wrote to what began as zeros
            self._drop(tensor)
        return out

    def _run_higher_order(self, func, args, kwargs):
        """Run an operator that calls others: a condition, a random one of a DTensor, attention."""
        if func is torch.ops.higher_order.cond:
            predicate, if_true, if_false, operands = args
            with self:
                return (if_true if predicate else if_false)(*operands)
        if DispatchKey.CUDA in func.py_kernels:
            with self:
                return func.py_kernels[DispatchKey.CUDA](*args, **kwargs)
        return func(*args, **kwargs)

    def _compared(self, func, args, kwargs) -> bool:
        on_gpu = func(*args, **kwargs)  # for what it allocates
        known = all(self.twin(tensor) is not None for tensor in args[:2])
        if not known or any(map(self._assumed, args[:2])):
            self.on_unknown(args[0])
        return self._on_twins(func, args, kwargs) if known else on_gpu

    @guarded
    def twin(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the CPU's tensor with the values of ``tensor``; None if they are unknown."""
        if not tensor.is_cuda:
            return tensor
        if not _plain(tensor):
            return None
        for settle in self._arriving.pop(tensor.untyped_storage()._cdata, ()):
            settle()
        return self._held(tensor)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor | None:
        storage = tensor.untyped_storage()
        _, twin, _ = self._twins.get(storage._cdata, (None, None, False))
        if twin is None or twin.nbytes() != storage.nbytes():  # resized since
            return None
        return _view(twin, tensor)

    def _assumed(self, tensor: torch.Tensor) -> bool:
        """Return whether what is known of ``tensor`` goes back to unknown values read as zeros."""
        if not tensor.is_cuda or not _plain(tensor):
            return False
        return self._twins.get(tensor.untyped_storage()._cdata, (None, None, False))[2]

    def print_what_is_known(self) -> None:
        """Make tensors of the GPU print their known values, and say so where they are unknown:
        printing switches dispatch modes off and would show zeros."""
        plain = torch.Tensor.__repr__

        def shown(tensor: torch.Tensor, *, tensor_contents: str | None = None) -> str:
            if tensor.is_cuda and _plain(tensor) and tensor_contents is None:
                twin = self.twin(tensor.detach())
                tensor_contents = "values unknown on a phantom GPU"
                if twin is not None and not self._assumed(tensor):
                    tensor_contents = torch._tensor_str._tensor_str(twin, len("tensor("))
            return plain(tensor, tensor_contents=tensor_contents)

        torch.Tensor.__repr__ = shown

    # --- what becomes known ----------------------------------------------------------------------

    def remember(
        self, tensor: torch.Tensor, value: torch.Tensor | None = None, assumed: bool = False
    ) -> None:
        """Take ``value``, or zeros, as what ``tensor``, and every view of its storage, holds;
        ``assumed`` if it comes from unknown values."""
        storage = tensor.untyped_storage()
        empty = _new([storage.nbytes()], dtype=torch.uint8, device="cpu")
        twin = empty.zero_().untyped_storage()
        if value is not None:
            _view(twin, tensor).copy_(value)
        if len(self._twins) >= self._purge_at:
            self._twins = {k: pair for k, pair in self._twins.items() if not pair[0].expired()}
            self._arriving = {k: v for k, v in self._arriving.items() if k in self._twins}
            self._purge_at = max(1024, 2 * len(self._twins))
        self._arriving.pop(storage._cdata, None)
        # The weak reference keeps the key from being used for another storage.
        self._twins[storage._cdata] = (StorageWeakRef(storage), twin, assumed)

    def _shaped(self, func, args, kwargs, assumed) -> Any:
        """Run an operation whose shape its values decide, which asks for room to sort or to count,
        and give its results their shapes; return None if nobody knows these."""
        values = self._values(func, args, kwargs)
        if values is None:
            return None
        if func is aten.repeat_interleave.Tensor:  # else it looks whether a count is negative
            kwargs = {**kwargs, "output_size": len(values)}

        def fill(made: Any, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if made.shape != value.shape:  # callers in C++ rely on the order of places
                    made.resize_(value.numel()).as_strided_(value.shape, value.stride())
                self.remember(made, value, assumed)
            return made

        return tree_map(fill, func(*args, **kwargs), values)

    @guarded
    def _values(self, func, args, kwargs) -> Any:
        return self._on_twins(func, args, kwargs)

    @guarded
    def _begin(self, tensor: torch.Tensor, *sources: Any) -> None:
        """Take a tensor that is about to be overwritten as zeros, if it is all of its storage."""
        if not tensor.is_cuda or not _is_whole(tensor) or self.twin(tensor) is not None:
            return
        known = all(self.twin(source) is not None for source in tensors_in(sources))
        if _followed(tensor) or (known and _knowable(tensor)):
            self.remember(tensor)

    @guarded
    def _empty(self, out: torch.Tensor) -> None:
        if out.is_cuda and _followed(out):
            self.remember(out)

    @guarded
    def _filled(self, func, args, kwargs, out) -> None:
        if out.is_cuda and _followed(out):
            self.remember(out, self._on_twins(func, args, kwargs, zeros=True))

    @guarded
    def _resize(self, tensor: torch.Tensor, shape: list[int]) -> None:
        """Resize what is known along with the tensor; what is added reads as zeros."""
        twin = self.twin(tensor) if tensor.is_cuda else None
        if twin is not None:
            storage = twin.untyped_storage()
            before = storage.nbytes()
            twin.resize_(shape)
            _new([0], dtype=torch.uint8, device="cpu").set_(storage)[before:].zero_()

    @guarded
    def _factory(self, func, args, kwargs, out) -> None:
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or not isinstance(out, torch.Tensor) or not out.is_cuda:
            return
        if _knowable(out) or (func is aten.zeros.default and _began_as_zeros(out)):
            self.remember(out, self._on_twins(func, args, kwargs))

    @guarded
    def _moved(self, func, args, kwargs, out) -> None:
        """Remember what an operation on tensors of the CPU put on a GPU: a copy, for example."""
        tensors = list(tensors_in((args, kwargs)))
        made = [each for each in tensors_in(out) if each.is_cuda]
        if any(map(_knowable, made)) and all(map(_knowable, tensors)):
            self._follow(func, args, kwargs, out)

    @guarded
    def _lifted(self, out: torch.Tensor) -> None:
        """Ask the runtime for values that ``torch.tensor(..., device="cuda")`` copied unseen."""
        if out.is_cuda and _knowable(out) and self.twin(out) is None:
            data = _last_copy()
            if len(data) == out.numel() * out.element_size() and data:
                value = torch.frombuffer(bytearray(data), dtype=out.dtype)
                self.remember(out, value.reshape(out.shape))

    @guarded
    def _choose_all(self, mask: torch.Tensor) -> None:
        """Take a mask that nobody knows as all true, since that takes the most memory."""
        self.remember(mask, torch.ones_like(mask, device="cpu"), assumed=True)

    # --- operations ------------------------------------------------------------------------------

    def _on_twins(self, func, args, kwargs, zeros: bool = False) -> Any:
        """Do an operation on the CPU, with zeros for unknown values if told so."""

        def swap(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                twin = self.twin(value)
                if twin is None and zeros:
                    return _new([], dtype=value.dtype, device="cpu").zero_().expand(value.shape)
                return twin
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return value

        flat, spec = tree_flatten((args, kwargs))
        twin_args, twin_kwargs = tree_unflatten([swap(value) for value in flat], spec)
        if twin_kwargs.get("pin_memory"):
            twin_kwargs["pin_memory"] = False
        return func(*twin_args, **twin_kwargs)

    @guarded
    def _assume(self, func, args, kwargs, out) -> None:
        """Take small results that come from unknown values as those of zeros."""
        flat = tree_flatten(out)[0]
        if func.namespace != "aten":  # libraries' own operators take their time on the CPU
            return
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not any(isinstance(made, torch.Tensor) and _counts(made, random) for made in flat):
            return
        tensors = list(tensors_in((args, kwargs)))
        values: list[Any] = [None] * len(flat)
        filled = OF_UNKNOWN.get(func.overloadpacket)
        if func in OF_UNKNOWN_FLOATS and args[0].is_floating_point():
            filled = OF_UNKNOWN_FLOATS[func]
        if func.overloadpacket in THRESHOLDS and args[0].is_floating_point() and out.numel() > 1:
            filled = True
        few = sum(tensor.numel() for tensor in tensors) <= MOST_ZEROS
        if func.overloadpacket in ORDERS and len(flat) == 2:
            values = [None, _in_order(flat[1], _dim(func, args, kwargs))]
        elif few and not random and filled is None:
            with suppress(RuntimeError):  # the CPU has no such operator, or zeros will not do
                values = tree_flatten(self._on_twins(func, args, kwargs, zeros=True))[0]
        for made, value in zip(flat, values, strict=True):
            if isinstance(made, torch.Tensor) and _counts(made, random):
                if value is None or value.shape != made.shape:
                    value = _new([], dtype=made.dtype, device="cpu").fill_(filled or 0)
                if value.is_floating_point() and value.element_size() > 1:  # 8-bit floats cannot
                    value = value.nan_to_num(0, 0, 0)
                self.remember(made, value, assumed=True)

    @guarded
    def _checked(self, found: torch.Tensor) -> None:
        """Take unknown gradients as finite: what a loss scaler has found stays as it is."""
        twin = self.twin(found)
        if twin is not None:
            self.remember(found, twin.clone(), assumed=True)

    @guarded
    def _follow(self, func, args, kwargs, out, assumed: bool = False) -> None:
        try:
            values = self._on_twins(func, args, kwargs)
        except Exception:  # the CPU has no such operator, or not for this type, or an index is out
            self._forget(func, args, kwargs)  # so what it wrote to is unknown
            return
        for made, value in zip(tree_flatten(out)[0], tree_flatten(values)[0], strict=True):
            if not isinstance(made, torch.Tensor) or made.shape != value.shape:
                continue
            if not made.is_cuda:
                if made is not value:
                    made.copy_(value)
                if assumed:
                    self.on_unknown(made)
            elif _knowable(made, MOST_COMPUTED_FLOATS) and self.twin(made) is None:
                self.remember(made, value, assumed)
        if assumed:
            for key in self._written_by(func, args, kwargs) & self._twins.keys():
                self._twins[key] = (*self._twins[key][:2], True)

    @guarded
    def _forget(self, func, args, kwargs) -> None:
        """What an operation on unknown values has written to is no longer known."""
        for key in self._written_by(func, args, kwargs):
            self._twins.pop(key, None)
            self._arriving.pop(key, None)

    def _written_by(self, func, args, kwargs) -> set[int]:
        """Return the keys of the twins of what an operation writes to."""
        names = self._written.get(func)
        if names is None:
            arguments = func._schema.arguments
            names = self._written[func] = tuple(
                (place, argument.name)
                for place, argument in enumerate(arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
        values = [args[n] if n < len(args) else kwargs.get(name) for n, name in names]
        return {
            tensor.untyped_storage()._cdata
            for tensor in tensors_in(values)
            if tensor.is_cuda and _plain(tensor)
        }

    @guarded
    def _places(self, args) -> tuple:
        """Replace masks among the indices by the places that they select."""
        indices = []
        for index in args[1]:
            if not _is_mask(index):
                indices.append(index)
            elif self.twin(index) is None:
                indices += _all_places(index).unbind(1)
            else:
                indices += self._shaped(aten.nonzero.default, (index,), {}, False).unbind(1)
        return (args[0], indices, *args[2:])

    @guarded
    def _handed_on(self, func, args, kwargs, out) -> bool:
        """Send what is known, and have what arrives be looked up once it is read; return False if
        nobody knows what the collective does. What it may have written is unknown then."""
        call = collectives.describe(func, args, kwargs, out)
        if call is None:
            return False
        if not any(tensor.is_cuda for tensor in [*call.sent, *call.targets]):
            return True
        arrived = None
        if call.has_message:
            sent = [each if collectives.is_sent(each) else None for each in call.sent]
            values = [None if each is None else self.twin(each) for each in sent]
            arrived = self._exchange.post(call, values, any(map(self._assumed, call.sent)))
        for place, target in enumerate(call.targets):
            self._receive(target, arrived, place)
        return True

    def _receive(self, target: torch.Tensor, arrived: Any, place: int) -> None:
        if arrived is None or not _knowable(target) or not collectives.is_sent(target):
            self._drop(target)
            return
        if self._held(target) is None:
            if not _is_whole(target):
                return
            self.remember(target)
        key = target.untyped_storage()._cdata
        view, twin = self._held(target), self._twins[key][1]

        def settle() -> None:
            values, assumed = arrived()
            reference, held, already = self._twins.get(key, (None, None, False))
            if held is not twin:  # overwritten since
                return
            if values[place] is None:
                del self._twins[key]
                return
            view.copy_(values[place].reshape(view.shape))
            self._twins[key] = (reference, twin, already or assumed)

        self._arriving.setdefault(key, []).append(settle)

    def _drop(self, tensor: torch.Tensor) -> None:
        """Take what ``tensor`` holds as unknown."""
        key = tensor.untyped_storage()._cdata if _plain(tensor) else None
        self._twins.pop(key, None)
        self._arriving.pop(key, None)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Return whether an operator only calls others on a GPU."""
    has, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    return has(name, "CompositeImplicitAutograd") and not has(name, "CUDA")


@functools.cache
def _has_rule(func: Any) -> bool:
    """Return whether autocast has a rule for an operator."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutocastCUDA")


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _all_places(mask: torch.Tensor) -> torch.Tensor:
    """Return room for the place of every element of a mask, in a tensor of unknown values."""
    return _new([mask.dim(), mask.numel()], dtype=torch.int64, device=mask.device).t()


def _deciding(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors whose values decide how large an operator's result or index is."""
    if func in TAKE_MASKS:
        return list(filter(_is_mask, args[1]))
    if func not in SHAPED_BY_VALUES or kwargs.get("output_size") is not None:
        return []
    return [args[0]]


def _masked(tensor: torch.Tensor, mask: torch.Tensor) -> tuple:
    """Return the arguments of the index that selects what a mask of another shape does."""
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    return tensor, [mask]


def _plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a storage of its own: no wrapper, not sparse."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided


def _followed(tensor: torch.Tensor) -> bool:
    if not _plain(tensor):
        return False
    small = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() <= (MOST_FLOATS if small else MOST_ELEMENTS)


def _knowable(tensor: torch.Tensor, most_floats: int = MOST_KNOWN_FLOATS) -> bool:
    """Return whether the values of a tensor are followed once they are known."""
    if _followed(tensor):
        return True
    few = _plain(tensor) and tensor.numel() <= most_floats
    return few and not tensor.requires_grad


def _dim(func: Any, args: tuple, kwargs: dict) -> int:
    """Return the ``dim`` that an operator is given, or its default."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            given = args[number] if number < len(args) else kwargs.get("dim")
            return argument.default_value if given is None else given
    raise ValueError(f"{func} takes no dim")


def _in_order(places: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the places of numbers that are in order along ``dim``, in the shape of ``places``."""
    if not places.dim():
        return torch.zeros_like(places, device="cpu")
    count = torch.arange(places.shape[dim], device="cpu")
    return count.expand(*places.movedim(dim, -1).shape).movedim(-1, dim)


def _began_as_zeros(tensor: torch.Tensor) -> bool:
    """Return whether these are whole numbers which, if they are known, began as zeros."""
    return _plain(tensor) and tensor.dtype is torch.int64 and tensor.numel() <= MOST_ZERO_NUMBERS


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _counts(tensor: torch.Tensor, random: bool) -> bool:
    """Return whether a program may decide by this result: not by masks of dropout, nor by parts of
    what is larger."""
    if not tensor.is_cuda or not _followed(tensor) or (random and tensor.dtype is torch.bool):
        return False
    return _is_whole(tensor)


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    empty = _new([0], dtype=like.dtype, device="cpu")
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _last_copy() -> bytes:
    """Return the bytes that this thread copied to the GPU last; see native/cuda.cpp."""
    runtime = ctypes.CDLL(None)
    first = ctypes.c_void_p()
    runtime.phantom_last_copy.restype = ctypes.c_size_t
    size = runtime.phantom_last_copy(ctypes.byref(first))
    return ctypes.string_at(first, size) if size else b""

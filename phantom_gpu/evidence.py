"""Note what a program's mistakes are told by, at the hooks of `phantom_gpu.watch_script`.

Limits: attention's kernel is known by the operators that PyTorch calls for it; attention that a
program writes itself is not seen, nor is what is gathered and moved to the host before it is saved.
What a library does with logits and masks is no mistake of the script's.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from gpumem.costs import tensors_in
from gpumem.trace import Phase
from phantom_gpu.allocator_history import (
    LEAST_KEPT_BYTES,
    is_librarys,
    is_pytorchs,
    line_of,
    without_numbers,
)
from phantom_gpu.guarded import guarded
from phantom_gpu.program import repeated, unwrapped

LEAST_STEPS = 4
_HALVES = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


@dataclass
class Pass:
    """A call of the outermost module, in evaluation or generation, that autograd may record.

    ``before_bytes`` were allocated when it began, ``graph_bytes`` more when it ended, its output
    left out. ``used`` is whether a backward pass has come to it.
    """

    line: str
    trained: bool
    generates: bool
    before_bytes: int
    recorded: bool = False
    graph_bytes: int = 0
    used: bool = False


@dataclass
class Cost:
    """The most bytes that a line took at once, and a text about it."""

    nbytes: int = 0
    text: str = ""


CURRENT: list["Evidence"] = []  # this process's, if it has one


class Evidence:
    """What the watch notes for `phantom_gpu.mistakes`."""

    def __init__(self, note_fault: Callable[[str, Exception], None]) -> None:
        CURRENT.append(self)
        self.note_fault = note_fault
        self.passes: list[Pass] = []
        self.trains_while_evaluating: set[str] = set()  # classes of models
        self.kept_losses = ""  # the line of the backward pass
        self.concatenated: dict[str, Cost] = {}
        self.fp32_logits: dict[str, Cost] = {}
        self.scores: dict[str, Cost] = {}
        self.masks: dict[str, Cost] = {}
        self.without_gradients = ""  # the line of a reentrant checkpoint
        self.switched_on = self._switched_on = "", True  # that line, whether the model trained
        self.whole_model: dict[str, Cost] = {}  # recomputed by one checkpoint
        self.frozen: dict[int, tuple[int, str]] = {}  # bytes and line by optimizer
        self.unused: dict[int, tuple[int, int, str, str]] = {}
        self.one_unit: dict[str, Cost] = {}
        self.gathered: dict[str, Cost] = {}
        self._pass: Pass | None = None
        self._recomputed_from = -1
        self._losses: list[tuple[int, weakref.ref]] = []
        self._looked_at: weakref.WeakSet = weakref.WeakSet()
        self._vocabularies: set[int] = set()
        self._tokens = 0
        self._joined: dict[tuple[int, torch.Size], int] = {}
        self._scaled = self._head = 0
        self._cast_from: torch.dtype | None = None
        self._never: dict[int, list[weakref.ref]] = {}
        self._trained: dict[int, set[int]] = {}  # at an optimizer's first step, by identity
        self._names: dict[int, str] = {}
        self._sharded_bytes = 0

    # --- forward passes -------------------------------------------------------------------------

    @guarded
    def begin_pass(self, model: torch.nn.Module, phase: Phase, trained: bool) -> None:
        """Note that the outermost module is called."""
        self._pass = None
        if model not in self._looked_at:
            self._looked_at.add(model)
            self._look_at(model)
        if phase is Phase.EVALUATION and model.training:
            self.trains_while_evaluating.add(type(model).__name__)
        if not torch.is_grad_enabled():
            return
        line = line_of(sys._getframe(1))
        if any(getattr(each, "gradient_checkpointing", False) for each in model.modules()):
            self._switched_on = line, model.training
        generates = is_running("generate")
        if not model.training or generates:
            self._pass = Pass(line, trained, generates, torch.cuda.memory_allocated())

    @guarded
    def end_pass(self, model: torch.nn.Module, output: Any) -> None:
        """Note that it has returned; ``output`` is None after an error."""
        begun, self._pass = self._pass, None
        if begun is None:
            return
        tensors = list(tensors_in(output))
        if any(is_functorch_wrapped_tensor(tensor) for tensor in tensors):
            return
        recorded = [tensor for tensor in tensors if tensor.grad_fn is not None]
        failed = output is None and any(p.requires_grad for p in model.parameters())
        begun.recorded = failed or bool(recorded)
        if not begun.recorded:
            return
        begun.graph_bytes = torch.cuda.memory_allocated() - begun.before_bytes - _bytes(tensors)
        self.passes.append(begun)

        def used(_: torch.Tensor) -> None:
            begun.used = True

        for tensor in recorded:
            tensor.register_hook(used)

    @guarded
    def embeds(self, module: torch.nn.Module, output: Any) -> None:
        """Note how many tokens a pass has, once they are embedded."""
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings in self._vocabularies:
            self._tokens = output.numel() // module.embedding_dim

    def _look_at(self, model: torch.nn.Module) -> None:
        """Look at a model when it is called first: at its vocabulary, and how it is sharded."""
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                rows, columns = module.num_embeddings, module.embedding_dim
                self._vocabularies |= {rows} if rows >= 2 * columns else set()
        if not _several_ranks():
            return
        units = [m for m in model.modules() if _is_unit(m)]
        if not units:
            return
        whole_bytes = sum(_whole_bytes(parameter) for parameter in model.parameters())
        self._sharded_bytes = max(self._sharded_bytes, whole_bytes)
        layer, layers = repeated(unwrapped(model))
        if len(units) == 1 and layers > 1:
            nbytes = sum(_whole_bytes(p) // _other_shards(p) for p in model.parameters())
            keep(self.one_unit, line_of(sys._getframe(2)), nbytes, layer)

    # --- backward passes and steps ----------------------------------------------------------------

    @guarded
    def begin_backward(self, hooks: Iterable[Any], line: str, step: int) -> None:
        """Note a backward pass by the hooks of its roots, which live as long as their graph."""
        self.switched_on = self._switched_on
        if self.kept_losses:
            return
        self._losses = [(made, hook) for made, hook in self._losses if hook() is not None]
        self._losses += [(step, weakref.ref(hook)) for hook in hooks]
        if len({made for made, _ in self._losses}) > LEAST_STEPS:
            self.kept_losses = line

    @guarded
    def before_recomputing(self, model: torch.nn.Module, passes: int) -> None:
        """Note that a checkpoint calls an outermost module again; ``passes`` were made since the
        last backward pass."""
        alone = passes == 1 and model in self._looked_at and repeated(unwrapped(model))[1] > 1
        self._recomputed_from = torch.cuda.memory_allocated() if alone else -1

    @guarded
    def after_recomputing(self, line: str) -> None:
        """Note that it has returned."""
        if self._recomputed_from >= 0:
            nbytes = torch.cuda.memory_allocated() - self._recomputed_from
            keep(self.whole_model, line, nbytes)
        self._recomputed_from = -1

    @guarded
    def checkpoints(self, inputs: Iterable[Any]) -> None:
        """Note what a reentrant checkpoint is given."""
        if not any(t.requires_grad for t in inputs if isinstance(t, torch.Tensor)):
            self.without_gradients = self.without_gradients or line_of(sys._getframe(1))

    @guarded
    def note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which weights have a gradient, before a step, which may free it, and after."""
        key, parameters = id(optimizer), [p for g in optimizer.param_groups for p in g["params"]]
        if key not in self._never:
            self._never[key] = [weakref.ref(p) for p in parameters if p.requires_grad and p.numel()]
            self._trained[key] = {id(p) for p in parameters if p.requires_grad}
        never = (p for ref in self._never[key] if (p := ref()) is not None and p.grad is None)
        self._never[key] = list(map(weakref.ref, never))

    @guarded
    def end_step(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int,
        line: str,
        modules: Callable[[], Iterator[tuple[torch.nn.Module, str]]],
    ) -> None:
        """Look at an optimizer's weights after its step."""
        self.note_gradients(optimizer)
        key, parameters = id(optimizer), [p for g in optimizer.param_groups for p in g["params"]]
        frozen = [p for p in parameters if not p.requires_grad and id(p) in self._trained[key]]
        state_bytes = _bytes(tensors_in([optimizer.state.get(p) for p in frozen]))
        self.frozen[key] = state_bytes + _bytes(p.grad for p in frozen if p.grad is not None), line
        never = [p for ref in self._never[key] if (p := ref()) is not None]
        self.unused.pop(key, None)
        if not never or steps < LEAST_STEPS - 1:
            return
        if not self._names:
            for module, path in modules():
                for name, parameter in module._parameters.items():
                    self._names.setdefault(id(parameter), without_numbers(f"{path}.{name}"))
        unused = set(map(id, never))
        # Of layers or experts that are drawn by lot, others have had their turn.
        others = {self._names.get(id(p)) for p in parameters if id(p) not in unused}
        left = [p for p in never if self._names.get(id(p), None) not in {None, *others}]
        if left:
            owner = self._names[id(max(left, key=torch.Tensor.numel))].rpartition(".")[0]
            self.unused[key] = _bytes(left), len(left), owner.lstrip("."), line

    @guarded
    def saves(self, values: Any) -> None:
        """Note what is saved by one of several ranks: a whole model, on the GPU?"""
        whole = [t for t in tensors_in(values) if type(t) in (torch.Tensor, torch.nn.Parameter)]
        nbytes = _bytes(t for t in whole if t.is_cuda)
        if 0 < self._sharded_bytes <= nbytes:
            keep(self.gathered, line_of(sys._getframe(1)), nbytes)

    # --- operators --------------------------------------------------------------------------------

    @guarded
    def on_operator(self, func: Any, args: tuple, out: Any, phase: Phase, inside: bool) -> None:
        """See an operator of a forward pass that has run, ``inside`` a module or not."""
        look = _LOOKS.get(func)
        if look is not None and torch._C._current_graph_task_id() == -1:
            look(self, args, out, phase, inside)

    def _cast(self, args: tuple, out: torch.Tensor, *_: Any) -> None:
        source = args[0]
        if out.dtype is not torch.float32 or source.dtype not in _HALVES or not out.is_cuda:
            return
        self._cast_from = source.dtype
        rows = out.numel() // max(out.shape[-1], 1) if out.dim() > 1 else 0
        # A loss in chunks copies a part of the rows at a time; one that is shifted leaves some out.
        if out.dim() > 1 and out.shape[-1] in self._vocabularies and 0 < self._tokens < 2 * rows:
            text = f"{list(out.shape)}"
            keep(self.fp32_logits, _own_line(sys._getframe(2)), _bytes([out]), text)

    def _joins(self, args: tuple, out: torch.Tensor, phase: Phase, inside: bool) -> None:
        first = args[0][0]
        if phase is not Phase.EVALUATION or inside or not out.is_floating_point():
            return
        times = self._joined.pop((first.data_ptr(), first.shape), 0)
        if out.is_cuda and _bytes([out]) >= LEAST_KEPT_BYTES:
            self._joined[out.data_ptr(), out.shape] = times + 1
            if times + 1 >= LEAST_STEPS - 1:
                text = "Trainer" if is_running("nested_concat") else ""
                keep(self.concatenated, line_of(sys._getframe(2)), _bytes([out]), text)

    def _scales(self, args: tuple, out: torch.Tensor, *_: Any) -> None:
        self._scaled += 1
        self._head = out.shape[-2] if out.dim() > 1 else 0

    def _triangle(self, *_: Any) -> None:
        self._scaled = 0

    def _softmax(self, args: tuple, out: torch.Tensor, *_: Any) -> None:
        """PyTorch's math kernel for attention with a mask has just scaled queries and keys. Where
        it has made the mask itself, which is causal, it did so after it had scaled the queries."""
        scaled, self._scaled = self._scaled, 0
        allowed = torch.backends.cuda.mem_efficient_sdp_enabled() and self._head % 8 == 0
        if torch.cuda.get_device_capability(out.device) < (8, 0):  # no fused kernel for BF16
            allowed = allowed and self._cast_from is not torch.bfloat16
        if scaled < 2 or not allowed:
            return
        keep(self.scores, _own_line(sys._getframe(2)), _bytes([out]), f"{list(out.shape)}")

    def _attention(self, args: tuple, *_: Any) -> None:
        query, bias = args[0], args[3]
        if bias is None or bias.requires_grad or min(query.shape[:2]) < 2:
            return
        nbytes = bias.untyped_storage().nbytes()
        # A mask that all heads share takes less; `torch.nn.MultiheadAttention` spreads its own.
        if nbytes >= _bytes([bias]) and not is_running("multi_head_attention_forward"):
            keep(self.masks, _own_line(sys._getframe(2)), nbytes, f"{list(bias.shape)}")


_LOOKS = {
    _aten._to_copy.default: Evidence._cast,
    _aten.cat.default: Evidence._joins,
    _aten.mul.Scalar: Evidence._scales,
    _aten.tril.default: Evidence._triangle,
    _aten._safe_softmax.default: Evidence._softmax,
    _aten._scaled_dot_product_efficient_attention.default: Evidence._attention,
}


def is_running(function: str) -> bool:
    """Return whether a function of this name is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


def _own_line(frame: FrameType | None) -> str:
    """Return the line outside PyTorch that called, if it is the user's own: none of a library."""
    while frame is not None and is_pytorchs(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or is_librarys(frame.f_code.co_filename):
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def keep(costs: dict[str, Cost], line: str, nbytes: int, text: str = "") -> None:
    """Note what a line costs, if there is one, and that is more than before."""
    if line and nbytes > costs.get(line, Cost(-1)).nbytes:
        costs[line] = Cost(nbytes, text)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _several_ranks() -> bool:
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    return ready and distributed.get_world_size() > 1


def _is_unit(module: torch.nn.Module) -> bool:
    """Return whether FSDP, of either kind, gathers this module's weights by themselves."""
    names = {kind.__name__ for kind in type(module).__mro__}
    return bool(names & {"FSDPModule", "FullyShardedDataParallel"})


def _whole_bytes(parameter: torch.nn.Parameter) -> int:
    """Return the bytes of a parameter of which this rank has a shard."""
    whole = getattr(parameter, "_unpadded_unsharded_size", parameter)  # of FSDP1's flat ones
    return whole.numel() * parameter.element_size()


def _other_shards(parameter: torch.nn.Parameter) -> int:
    """Return over how many ranks tensor parallelism splits what FSDP gathers of a parameter."""
    first, *others = getattr(parameter, "placements", [None])
    if first is None or not first.is_shard():
        return 1
    sizes = (parameter.device_mesh.size(n) for n, p in enumerate(others, 1) if p.is_shard())
    return math.prod(sizes)

"""Watch a program on a phantom GPU from inside: its steps, its phases, and where its bytes go.

`Watch` runs in the program's own process. It tells PyTorch's allocator at every module and phase
what is running, reads what the allocator recorded, and keeps a `ProcessReport` in a file up to
date. The program is not changed: hooks look on, no operator is intercepted, and no byte is
allocated.

Limits: phases are those of the thread that trains. Code that ``torch.compile`` made counts as its
caller. Of a backward pass, what one module computes is seen where its output's gradient arrives.
"""

import atexit
import bisect
import ctypes
import faulthandler
import gc
import inspect
import os
import pickle
import re
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import groupby
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gpumem.allocator.workspaces import LT_BYTES, nvidia_workspace_bytes
from gpumem.costs import COUNTED, plain_tensors, tensors_in, with_scales
from gpumem.files import write_atomic
from gpumem.torch_release import follows
from gpumem.trace import ROUNDING, WITHOUT_GRADIENTS, Category, Phase
from gpumem.units import KIB
from phantom_gpu import kv_cache, mistakes
from phantom_gpu.allocator_history import (
    KEPT_STEPS,
    Addresses,
    Block,
    Entry,
    Found,
    History,
    Mark,
    Tag,
    is_librarys,
    is_pytorchs,
    line_of,
    without_numbers,
)
from phantom_gpu.evidence import CURRENT, Evidence, is_running
from phantom_gpu.guarded import guarded
from phantom_gpu.program import Program, may_train
from phantom_gpu.remedies import offers, trials
from phantom_gpu.report_records import (
    NOT_READ,
    SAVED_IN,
    STOOD_IN,
    DrawnRecord,
    FailedRequest,
    GpuReport,
    Holder,
    Mistake,
    Offer,
    PassesAlive,
    Place,
    ProcessReport,
    UnknownValue,
    When,
)
from phantom_gpu.step_costs import Counted, copied_tensor

WRITE_SECONDS = 2.0
MOST_HOLDERS, MOST_FAULTS = 40, 20
#: Results of operators whose type of numbers is noted: others hold next to nothing.
LEAST_NOTED_BYTES = 64 * KIB
_PART_OF_LAYER = re.compile(r"(.*\*\.[^.]+)\..*")
_memory = torch.cuda.memory
_RECORD = _memory._record_memory_history
#: PyTorch 2.10 records what nobody reads.
_SKIPS = "skip_actions" in inspect.signature(_RECORD).parameters
_UNREAD = {"skip_actions": ["free_requested"]} if _SKIPS else {}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: None where PyTorch cannot, as 2.7.
_set_metadata = getattr(torch._C, "_cuda_setMemoryMetadata", None)


@dataclass(frozen=True)
class Orders:
    """What the program's parent asks for.

    ``folder`` is where each process writes its answer, ``steps`` how many optimizer steps end the
    program (0: it ends by itself), ``snapshot`` a file for PyTorch's own record of the last GPU,
    ``record`` whether each `GpuReport` has one, ``trials`` the remedies to try: each by its name,
    and the kinds and lines of its places.
    """

    folder: str
    steps: int = 0
    snapshot: str = ""
    record: bool = False
    trials: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()


class _Notes:
    """What is told to the allocator's record where PyTorch cannot attach it: entries get it by the
    time at which they were written."""

    def __init__(self) -> None:
        self._times, self._texts = [0], [""]

    def write(self, text: str) -> None:
        self._times.append(time.time_ns() // 1000)
        self._texts.append(text)

    def attach(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            place = bisect.bisect_right(self._times, entry["time_us"])
            entry["user_metadata"] = self._texts[place - 1]

    def forget(self) -> None:
        """Forget what only entries of the past could need."""
        del self._times[:-1], self._texts[:-1]


class _Thread(threading.local):
    """What one thread does: the modules that run, the outermost first, and what its tag says."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.tag: Tag | None = None


class Watch:
    """See the module. One for each process, from `begin` to the process's end."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.keeps_record = orders, bool(orders.snapshot)
        self.steps, self.counted = 0, Counted()
        self.phase, self.backward_line = Phase.SETUP, ""
        #: Whether the program updates weights itself, without `torch.optim`; None: not known yet.
        self.updates_itself: bool | None = None
        self.histories: dict[int, History] = {}
        self.peak_stats: dict[int, Counter[str]] = {}
        self.unknown: Counter[tuple[str, str]] = Counter()
        self.ended, self.error, self.error_stack = "", "", []
        self.faults: list[str] = []
        tried = [(name, [Place(*place) for place in places]) for name, places in orders.trials]
        self.program = Program(trials(tried), self.note_fault)
        self.caches, self._prefills = kv_cache.Caches(), False
        self.evidence = Evidence(self.note_fault)
        self._thread = _Thread()
        self._notes = _Notes()
        self._write_tag = _set_metadata or self._notes.write
        self._model, self._passes, self._order = "", 0, 0  # as in `Tag`
        self._forward = Phase.FORWARD  # or what such a pass is for
        self._trained: weakref.WeakSet = weakref.WeakSet()  # models that ran in training mode
        # Of each class of models: forward passes since the last backward pass, and how often a
        # backward pass has ended so many.
        self._open: Counter[str] = Counter()
        self._ended: dict[str, Counter[int]] = defaultdict(Counter)
        self._names: dict[int, tuple[weakref.ref, str]] = {}  # of modules, by identity
        self._optimizers: weakref.WeakSet = weakref.WeakSet()
        # By optimizer: tensors that require a gradient, and the most that had one at an update.
        self._trainable: dict[int, tuple[int, int]] = {}
        self._marks: list[Mark] = []
        self._stepped_in_backward = self._own_update_begun = False
        self._segments: tuple[str, list[dict[str, Any]]] = ("", [])  # at the moment named
        self._written_at = 0.0
        self._entries_read = Counter[int]()  # entries of each GPU's record that were read
        self._pid, self._rank = os.getpid(), int(os.environ.get("RANK", "0"))

    def begin(self) -> None:
        """Watch from now on; what CUDA needs is done when the program first uses it."""
        self.program.begin()
        kv_cache.SEEN_BY.append(self._cached)
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        run_backward = torch.autograd.graph._engine_run_backward
        for module in (torch.autograd, torch.autograd.graph):
            module._engine_run_backward = partial(self._backward, run_backward)
        torch.save = torch.serialization.save = _noting(torch.save)
        reentrant = torch.utils.checkpoint.CheckpointFunction
        reentrant.forward = staticmethod(partial(self._checkpoint, reentrant.forward))
        stack = open(Path(self.orders.folder, f"{os.getpid()}.stack"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=stack)  # where it hangs, if the parent asks
        # `torch.compile` says so of hooks like ours, of which the program knows nothing.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global")
        atexit.register(self.finish)
        os._exit = partial(self._leave, os._exit)
        torch.cuda._lazy_call(self._on_cuda)

    def note_fault(self, where: str, error: Exception) -> None:
        """Note a fault of ours, which the report shows; the first of each kind is printed, too."""
        line = traceback.extract_tb(error.__traceback__)[-1]
        fault = (
            f"{where}: {type(error).__name__}: {error} ({Path(line.filename).name}:{line.lineno})"
        )
        if fault not in self.faults and len(self.faults) < MOST_FAULTS:
            self.faults.append(fault)
            print(f"labkit: an error inside labkit; the program goes on: {fault}", file=sys.stderr)

    @guarded
    def _on_cuda(self) -> None:
        if _other_allocator():
            return
        self._record()
        _memory._record_memory_history = self._recorded_by_user
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)
        # A program that resets its peaks, or records a history of its own, does not reset ours.
        reset = torch._C._cuda_resetPeakMemoryStats

        def after_reading(device: int) -> None:
            self._look(device)
            reset(device)

        torch._C._cuda_resetPeakMemoryStats = after_reading
        self._say()
        Finalize(None, self.finish, exitpriority=0)  # in children that multiprocessing started

    def _record(self) -> None:
        """Begin PyTorch's record, or begin it anew."""
        if self.keeps_record:
            _RECORD("all", "alloc", "python")
            return
        _RECORD(None)  # which clears it: 2.7 has no option to do so
        _RECORD("all", "alloc", "python", **_UNREAD)

    def _recorded_by_user(self, *_: Any, **__: Any) -> None:
        self.keeps_record = True  # the program wants to read it

    # --- where the program is -----------------------------------------------------------------

    def _say(self) -> None:
        """Tell the allocator what this thread does now."""
        path = self._thread.modules[-1] if self._thread.modules else ""
        if torch._C._current_graph_task_id() == -1:
            line = self.backward_line if self.phase is Phase.BACKWARD else ""
            self._tell(self.phase, path, line)
        else:
            self._tell(Phase.BACKWARD, path, self.backward_line, bool(path))

    def _tell(self, phase: Phase, path: str, line: str, recomputing: bool = False) -> None:
        where = (self._model, self._passes, self._order)
        self._thread.tag = Tag(self._step, phase, path, line, recomputing, *where)
        self._write_tag(self._thread.tag.written())

    @property
    def _step(self) -> int:
        if self.phase in WITHOUT_GRADIENTS:
            return self.steps
        return 0 if self.phase is Phase.SETUP else self.steps + 1

    @guarded
    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._say()

    @guarded
    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        alone, in_backward = not self._thread.modules, torch._C._current_graph_task_id() != -1
        outermost = alone and not in_backward
        self._thread.modules.append(self._path(module))
        # What runs on the CPU first, to prepare data, does not end the setup.
        if self.phase is Phase.SETUP and not _on_gpu(module, inputs):
            return
        if outermost:
            self._begin_pass(module, inputs)
        self._enter(self._forward)
        if alone and in_backward:
            self.evidence.before_recomputing(module, self._open.total())

    def _begin_pass(self, model: torch.nn.Module, inputs: Any) -> None:
        """Note that the outermost module is called, and what it is called with."""
        self._end_own_update()
        self._model, self._passes = type(model).__name__, self._passes + 1
        trained = model in self._trained and not model.training
        self._forward = self._kind_of_pass(model)
        self.evidence.begin_pass(model, self._forward, trained)
        if self._forward is Phase.FORWARD:
            self._open[self._model] += 1
            if may_train(model):
                self.program.trains(model, inputs)
        given = [tensor for tensor in tensors_in(inputs) if tensor.grad_fn is None]
        self._mark(dict.fromkeys(_addresses_of(given), Found(Category.INPUTS)))

    def _kind_of_pass(self, model: torch.nn.Module) -> Phase:
        """Return the phase of a forward pass: without gradients it is part of a step only if the
        model is frozen, as a teacher is. In evaluation mode with gradients it is an evaluation if
        the same model has been trained in training mode."""
        if torch.is_grad_enabled():
            if model.training:
                self._trained.add(model)
            trains = model.training or model not in self._trained
            return Phase.FORWARD if trains else Phase.EVALUATION
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return Phase.FORWARD
        if not is_running("generate"):
            return Phase.EVALUATION
        if is_running("_prefill"):  # transformers' since 5
            self._prefills = True
            return Phase.PREFILL
        return Phase.DECODE if self._prefills and is_running("_sample") else Phase.GENERATION

    @guarded
    def _cached(self, cache: Any, layer: int, keys: torch.Tensor) -> None:
        """Note where a layer of a cache lies now, and at the last one what the cache holds."""
        tensors = kv_cache.tensors_of(cache.layers[layer])
        self._mark(dict.fromkeys(_addresses_of(tensors), Found(Category.CACHE)))
        if layer == len(cache.layers) - 1:
            self.caches.filled(cache, keys)

    @guarded
    def _after_forward(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        path = self._path(module)
        modules = self._thread.modules
        while modules and modules.pop() != path:  # errors may have skipped some
            pass
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._gradient_of, path))
        self._say()
        self.evidence.embeds(module, output)
        if not modules and torch._C._current_graph_task_id() == -1:
            self.evidence.end_pass(module, output)
        elif not modules:
            self.evidence.after_recomputing(self.backward_line)
        if not modules and not torch.is_grad_enabled():
            self._look_now_and_then()

    def _checkpoint(self, forward: Callable[..., Any], context: Any, *given: Any) -> Any:
        """See what a reentrant checkpoint is given, unless it is in an evaluation."""
        if not (self._thread.modules and self._forward in WITHOUT_GRADIENTS):
            self.evidence.checkpoints(given)
        return forward(context, *given)

    @guarded
    def _gradient_of(self, path: str, _: torch.Tensor) -> None:
        """Note, on autograd's own thread, that a module's backward begins."""
        self._tell(Phase.BACKWARD, path, self.backward_line)

    def _path(self, module: torch.nn.Module) -> str:
        known, path = self._names.get(id(module), (None, ""))
        if known is not None and known() is module:
            return path
        if not self._thread.modules:
            for name, child in module.named_modules():
                self._names[id(child)] = weakref.ref(child), name
        else:  # not in the tree of its caller
            self._names[id(module)] = weakref.ref(module), type(module).__name__
        return self._names[id(module)][1]

    def _backward(self, run: Any, *arguments: Any, **options: Any) -> Any:
        if detect_fake_mode(arguments[:1]):  # a compiler traces a backward pass
            return run(*arguments, **options)
        self._before_backward(sys._getframe(1), arguments[:1])
        try:
            return run(*arguments, **options)
        finally:
            self._after_backward()

    @guarded
    def _before_backward(self, caller: FrameType, roots: tuple) -> None:
        if torch._C._current_graph_task_id() == -1:  # not one of a checkpoint, within another
            self._end_own_update()
            self.program.goes_back()
        self.backward_line = line_of(caller)
        self._enter(Phase.BACKWARD)
        hooks = []
        for root in tensors_in(list(roots)):
            if not root.is_leaf:
                hooks.append(partial(self._gradient_of, ""))
                root.register_hook(hooks[-1])
        if torch._C._current_graph_task_id() == -1:
            self.evidence.begin_backward(hooks, self.backward_line, self.steps)

    @guarded
    def _after_backward(self) -> None:
        for model, passes in self._open.items():
            self._ended[model][passes] += 1
        self._open.clear()
        if self.updates_itself is None:
            self.updates_itself = not any(
                issubclass(type(each), torch.optim.Optimizer) for each in gc.get_objects()
            )
        if self.updates_itself and torch._C._current_graph_task_id() == -1:
            self.look()
            self._own_update_begun = True
        self._enter(Phase.OTHER)
        if self._stepped_in_backward:
            self._stepped_in_backward = False
            self._end_step()

    def _end_own_update(self) -> None:
        """End the step of a program that updates weights itself: nobody says when it is done."""
        if self._own_update_begun:
            self._own_update_begun = False
            self._end_step()

    @guarded
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.updates_itself:  # until now: what follows is counted as everybody counts steps
            self.updates_itself, self.steps, self._own_update_begun = False, 0, False
        self._optimizers.add(optimizer)
        self.program.steps(optimizer)
        self._count_trainable(optimizer)
        self.evidence.note_gradients(optimizer)
        self._mark(_gradients(optimizer))
        if torch._C._current_graph_task_id() == -1:
            self._enter(Phase.OPTIMIZER)

    def _count_trainable(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        trainable = [p for p in parameters if p.requires_grad and p.numel()]  # a shard may be empty
        trained = sum(p.grad is not None for p in trainable)
        _, most = self._trainable.get(id(optimizer), (0, 0))
        self._trainable[id(optimizer)] = len(trainable), max(most, trained)

    def _mark(self, addresses: Addresses) -> None:
        """Note what lies where now; this thread's next entries in the record come after it."""
        if not addresses:
            return
        self._order += 1
        self._marks.append(Mark(self._order, addresses))
        tag = self._thread.tag or Tag(self._step, self.phase)
        self._thread.tag = tag._replace(order=self._order)
        self._write_tag(self._thread.tag.written())

    def on_operator(self, func: Any, args: tuple, kwargs: dict, out: Any) -> None:
        """See an operator that has run."""
        self._note_result(func, args, out)
        self.evidence.on_operator(func, args, out, self.phase, bool(self._thread.modules))
        self.counted.count(func, args, kwargs, out)

    @guarded
    def _note_result(self, func: Any, args: tuple, out: Any) -> None:
        """Note the type of numbers of an operator's result, and what comes from the host outside
        modules: inputs. In backward or within a module it is something that was offloaded."""
        if self.phase is Phase.OPTIMIZER:
            return  # thousands of tensors that live for a moment
        source = copied_tensor(func, args)
        in_place = source is None and func._schema.is_mutable  # whose result is known already
        if func.namespace not in COUNTED or func.is_view or in_place:
            return
        from_host = source is not None and not source.is_cuda
        modules = self._thread.modules
        inside = torch._C._current_graph_task_id() != -1 or (modules and modules[-1])
        category = Category.INPUTS if from_host and not inside else None
        found = {}
        for tensor in tensors_in(out):
            large = tensor.numel() * tensor.element_size() >= LEAST_NOTED_BYTES
            if large or category is not None:
                found |= dict.fromkeys(_addresses_of([tensor]), Found(category, "", _dtype(tensor)))
        self._mark(found)

    @guarded
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._count_trainable(optimizer)  # one with a closure has its gradients only now
        made = [place.line for place, each in self.program.stepped.items() if each is optimizer]
        line = next(iter(made), "") or line_of(sys._getframe(1))
        self.evidence.end_step(optimizer, self.steps, line, self._named_modules)
        if torch._C._current_graph_task_id() != -1:
            self._stepped_in_backward = True
            return
        self.look(f"after the update of step {self.steps + 1}")
        self._end_step()

    @guarded
    def _end_step(self) -> None:
        self.steps += 1
        self.counted.end_step()
        for history in self.histories.values():
            history.end_step()
        self._enter(Phase.OTHER)
        if time.monotonic() - self._written_at > WRITE_SECONDS:
            self._write()
        if 0 < self.orders.steps <= self.steps:
            self.ended = "stopped"
            raise SystemExit(0)

    @guarded
    def read_unknown(self, tensor: torch.Tensor) -> None:
        """Note that the program read a value that nobody computed."""
        what = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        self.unknown[line_of(sys._getframe(1)), what] += 1

    # --- what the allocator did ---------------------------------------------------------------

    @guarded
    def _look_now_and_then(self) -> None:
        if time.monotonic() - self._written_at > WRITE_SECONDS:
            self.look()
            self._write()

    @guarded
    def look(self, moment: str = "") -> None:
        """Read what every GPU's allocator recorded since the last look, and whose blocks live; keep
        the segments of a moment that has a name."""
        if not torch.cuda.is_initialized() or _other_allocator():
            return
        collects = gc.isenabled()
        gc.disable()  # thousands of new records would have it walk through all of them
        try:
            self._read_record(moment)
        finally:
            if collects:
                gc.enable()

    def _read_record(self, moment: str) -> None:
        snapshot = _memory._snapshot()
        record = snapshot["device_traces"]
        if self.orders.record and moment:
            self._segments = moment, snapshot["segments"]
        if not self.keeps_record:
            self._record()
        addresses = self._addresses()
        marks, self._marks = self._marks, []
        for device, entries in enumerate(record):
            if not entries and device not in self.histories:
                continue
            history = self.histories.get(device)
            if history is None:
                history = self.histories[device] = History(workspaces=_workspaces(device))
            new = entries[self._entries_read[device] :]
            if _set_metadata is None:
                self._notes.attach(new)
            history.read(new, self.steps + 1, marks)
            history.classify(addresses)
            self._entries_read[device] = len(entries) if self.keeps_record else 0
            self._look(device)
        self._notes.forget()

    @guarded
    def _look(self, device: int) -> None:
        """Keep the highest of the allocator's own counters, which a program may reset."""
        found = torch.cuda.memory_stats(device)
        kept = self.peak_stats.setdefault(device, Counter())
        for name, value in found.items():
            kept[name] = max(kept[name], value)

    def _addresses(self) -> Addresses:
        """Return where weights, buffers, gradients and states of optimizers lie now."""
        found: Addresses = {}
        for module, path in self._named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    _note(found, parameter, path)
            for buffer in module._buffers.values():
                _add(found, [buffer], Category.BUFFERS, path)
        for optimizer in self._optimizers:
            _note_all(found, optimizer)
        return found

    def _named_modules(self) -> Iterator[tuple[torch.nn.Module, str]]:
        """Yield modules that ran, then those that only exist: a teacher, a part that is left out.
        These are looked for in the first steps and at the end, since it takes its time."""
        for reference, path in self._names.values():
            if (module := reference()) is not None:
                yield module, path
        if self.steps < KEPT_STEPS or self.ended:
            for model in _models():
                yield from (pair[::-1] for pair in model.named_modules())

    def _out_of_memory(self, device: int, *_: Any) -> None:
        self.look("at the out-of-memory error")
        self._write()

    # --- the answer ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Write the last answer; called as the process ends."""
        if os.getpid() != self._pid:
            return
        self._note_error()
        self.ended = self.ended or "finished"
        self.steps += self._own_update_begun
        self._own_update_begun = False
        self.look("" if self._segments[1] else "at the end")
        self._keep_snapshot()
        self._write() or self._write()  # nobody would learn of a fault in the last one

    @guarded
    def _keep_snapshot(self) -> None:
        if self.orders.snapshot and self.histories:
            _memory._dump_snapshot(self.orders.snapshot)

    def _leave(self, leave: Callable[[int], NoReturn], status: int) -> NoReturn:
        """Write the last answer of a program that skips what Python does as it ends."""
        try:
            if status and os.getpid() == self._pid:
                self.ended, self.error = "failed", f"exit code {status} from os._exit"
            self.finish()
        finally:
            leave(status)

    @guarded
    def _note_error(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is None:
            return
        self.ended = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        if any(isinstance(each, torch.OutOfMemoryError) for each in _chain(error)):
            self.ended = "out of memory"
        self.error = "".join(traceback.format_exception_only(error)).strip()[:4000]
        stack = reversed(traceback.extract_tb(error.__traceback__))
        self.error_stack = users_lines([f"{frame.filename}:{frame.lineno}" for frame in stack])

    def answer(self) -> ProcessReport:
        """Return what is known now."""
        return ProcessReport(
            script=" ".join(sys.argv)[:1000],
            rank=self._rank,
            ended=self.ended,
            error=self.error,
            error_stack=self.error_stack,
            steps=self.steps,
            gpus=self._gpu_reports(),
            unknown=[
                UnknownValue(line, what, times)
                for (line, what), times in self.unknown.most_common(20)
            ],
            host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
            pinned_bytes=_pinned_bytes(),
            work=self.counted.per_step(),
            versions=f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}",
            weights_not_read=list(dict.fromkeys(NOT_READ)),
            tokenizers_stood_in=list(dict.fromkeys(STOOD_IN)),
            saved_in=[*filter(os.path.isdir, dict.fromkeys(SAVED_IN))],
            trainable=sum(trainable for trainable, _ in self._trainable.values()),
            trained=sum(trained for _, trained in self._trainable.values()),
            faults=self.faults,
            unsized_workspaces=_unsized_workspaces(),
            updates_itself=bool(self.updates_itself),
            remedies=self._remedies(),
            cache=self.caches.largest,
            mistakes=self._mistakes() or [],
            allocator=_other_allocator() if torch.cuda.is_initialized() else "",
        )

    @guarded
    def _remedies(self) -> list[Offer]:
        """Return the remedies that apply, once the program has ended."""
        self.program.recomputes = any(history.recomputes for history in self.histories.values())
        return offers(self.program) if self.ended else []

    @guarded
    def _mistakes(self) -> list[Mistake]:
        """Return the program's mistakes, once it has ended."""
        if not self.ended:
            return []
        peaks = [stats["allocated_bytes.all.peak"] for stats in self.peak_stats.values()]
        return mistakes.found(
            mistakes.Run(
                evidence=self.evidence,
                histories=self.histories,
                peak_bytes=max(peaks, default=0),
                ended=self.ended,
                untrained=any(trained < all_ for all_, trained in self._trainable.values()),
                recomputes=any(history.recomputes for history in self.histories.values()),
                steps=self.steps,
                most_passes={model: max(ended, default=0) for model, ended in self._ended.items()},
                rank=self._rank,
                local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            )
        )

    def _gpu_reports(self) -> list[GpuReport]:
        """Return what is known of each GPU that held anything; where a fault of ours keeps its
        record from being read, what the allocator itself has counted."""
        found: list[GpuReport] = []
        if not torch.cuda.is_initialized() or _other_allocator():
            return found
        for device in range(torch.cuda.device_count()):
            stats = self.peak_stats.get(device) or torch.cuda.memory_stats(device)
            history = self.histories.get(device, History())
            used = stats.get("reserved_bytes.all.peak") or stats.get("num_ooms")
            if not used and not history.failures:
                continue
            try:
                drawn = self._drawn(device, history)
                alive = self._passes_alive(history)
                report = _gpu_report(device, history, stats, alive, drawn)
            except Exception as error:
                self.note_fault("_gpu_report", error)
                report = _gpu_report(device, History(), stats, [], None)
            found.append(report)
        return found

    def _passes_alive(self, history: History) -> list[PassesAlive]:
        """Return models of which more forward passes hold memory at the peak than a backward pass
        ends as a rule."""
        found = []
        for (model, phase), held in history.passes_alive().items():
            usual = self._ended[model].most_common(1) if phase is Phase.FORWARD else []
            if len(held) > max([2, *(passes for passes, _ in usual)]):
                found.append(PassesAlive(model, str(phase), len(held), sum(held)))
        return found

    def _drawn(self, device: int, history: History) -> DrawnRecord | None:
        if not (self.orders.record and self.ended):
            return None
        failed = self.ended == "out of memory" and history.failures
        timeline = history.timeline(history.failures[-1].event if failed else None)
        moment, segments = self._segments
        return DrawnRecord(timeline, [_drawn(s) for s in segments if s["device"] == device], moment)

    @guarded
    def _write(self) -> bool:
        self._written_at = time.monotonic()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._rank = torch.distributed.get_rank()  # not every launcher sets the variable
        if torch.cuda.is_initialized() or self.ended:
            path = Path(self.orders.folder, f"{os.getpid()}.answer")
            write_atomic(path, pickle.dumps(self.answer()))
        return True


def _gpu_report(
    device: int,
    history: History,
    stats: Mapping[str, int],
    alive: list[PassesAlive],
    record: DrawnRecord | None,
) -> GpuReport:
    """Return what is known of a GPU of this process.

    Args:
        device: its index.
        history: what its allocator did.
        stats: the highest values of ``torch.cuda.memory_stats``.
        alive: forward passes that hold memory at the peak.
        record: what a page draws.
    """
    allocated = stats["allocated_bytes.all.peak"]
    made_of: dict[str, int] = defaultdict(int)
    for block in history.peak_blocks:
        made_of[block.kind] += block.nbytes
    made_of = {str(c): made_of[c] for c in Category if made_of.get(c)}
    made_of[ROUNDING] = allocated - sum(made_of.values())
    grown = history.grown
    free_bytes, _ = torch.cuda.mem_get_info(device)
    failed = None
    if history.failures:
        request = history.failures[-1]
        stack = [f"{f['filename']}:{f['line']}" for f in request.frames]
        outside = [line for line in stack if not is_pytorchs(line)]
        # Autograd's own thread, in which a backward pass runs, has no line of the script.
        outside = outside or list(filter(None, [request.tag.line]))
        lines = list(dict.fromkeys([*outside[:1], *users_lines(outside)]))
        when = _when(request.tag)
        failed = FailedRequest(request.nbytes, request.reserved_bytes, when, lines)
    runtime = ctypes.CDLL(None)
    runtime.phantom_others.restype = ctypes.c_size_t
    others_bytes = runtime.phantom_others(device)
    return GpuReport(
        index=runtime.phantom_number(device),
        name=torch.cuda.get_device_name(device),
        capacity_bytes=free_bytes + torch.cuda.memory_reserved(device) + others_bytes,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=stats["reserved_bytes.all.peak"],
        allocated_at=_when(
            history.peak.tag, *(block.users_line for block in history.peak_blocks[-1:])
        ),
        reserved_at=_when(history.reserved_peak.tag),
        made_of=made_of,
        holders=_holders(history.peak_blocks),
        retries=stats["num_alloc_retries"],
        errors=stats["num_ooms"],
        failed=failed,
        growth_bytes=sum(block.nbytes for block in grown),
        growth=_holders(grown)[:3],
        grows_in=str(grown[0].tag.phase) if grown else "",
        passes_alive=alive,
        record=record,
    )


def _drawn(segment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a map of segments draws."""
    blocks = []
    for state, group in groupby(segment["blocks"], key=lambda block: block["state"]):
        blocks.append({"size": sum(block["size"] for block in group), "state": state})
    names = ("stream", "segment_type", "is_expandable")
    return {name: segment[name] for name in names} | {"blocks": blocks}


def _holders(blocks: Iterable[Block]) -> list[Holder]:
    """Return who holds ``blocks``, the largest first."""
    grouped: dict[tuple[str, ...], list[int]] = defaultdict(list)
    lines: dict[int, tuple[str, str]] = {}  # of stacks that several blocks share
    for block in blocks:
        where = lines.get(id(block.frames)) or (block.line, block.users_line)
        lines[id(block.frames)] = where
        module = without_numbers(block.known_as or block.tag.module)
        module = _PART_OF_LAYER.sub(r"\1", module)
        grouped[(str(block.kind), module, *where, block.dtype)].append(block.nbytes)
    found = [Holder(sum(sizes), len(sizes), *group) for group, sizes in grouped.items()]
    return sorted(found, key=lambda holder: -holder.nbytes)[:MOST_HOLDERS]


def _when(tag: Tag, users_line: str = "") -> When:
    return When(tag.step, str(tag.phase), tag.module, tag.line or users_line)


def users_lines(stack: list[str]) -> list[str]:
    """Return the lines of code of a stack that are the user's own; where none is, the libraries'
    outside PyTorch."""
    for is_skipped in (is_librarys, is_pytorchs):
        found = [line for line in stack if not is_skipped(line)]
        if found:
            return found
    return stack


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from, or while they were handled."""
    met: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in met:
            met.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def _add(found: Addresses, tensors: Iterable[Any], category: Category, owner: str = "") -> None:
    for tensor in tensors:
        for address in _addresses_of([tensor]):
            found.setdefault(address, Found(category, owner, _dtype(tensor)))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _note(found: Addresses, parameter: torch.Tensor, path: str) -> None:
    _add(found, with_scales(parameter), Category.WEIGHTS, path)
    _add(found, [parameter.grad], Category.GRADIENTS, path)


def _note_all(found: Addresses, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _note(found, parameter, "")
    _add(found, tensors_in(list(optimizer.state.values())), Category.OPTIMIZER)


def _gradients(optimizer: torch.optim.Optimizer) -> Addresses:
    found: Addresses = {}
    for group in optimizer.param_groups:
        _add(found, [parameter.grad for parameter in group["params"]], Category.GRADIENTS)
    return found


def _addresses_of(tensors: Iterable[Any]) -> Iterator[int]:
    for tensor in tensors:
        if tensor is None:
            continue
        for part in [tensor] if type(tensor) in _PLAIN else plain_tensors(tensor):
            traced = isinstance(part, FakeTensor) or is_functorch_wrapped_tensor(part)
            real = part.is_cuda and not traced
            if real and part.layout is torch.strided:
                yield part.untyped_storage().data_ptr()


def _workspaces(device: int) -> set[int]:
    """Return the sizes of what PyTorch gives cuBLAS and cuBLASLt on a GPU, in bytes."""
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    major, _ = torch.cuda.get_device_capability(device)
    asked_for = sum(int(kib) * int(count) * KIB for kib, count in sizes)
    found = {asked_for or nvidia_workspace_bytes(major)}
    return found if follows("2.12") else found | {LT_BYTES}


def _on_gpu(module: torch.nn.Module, inputs: Any) -> bool:
    tensors = [*tensors_in(inputs), *module.parameters()]
    return any(tensor.is_cuda for tensor in tensors)


def _models() -> list[torch.nn.Module]:
    """Return the outermost modules of a program."""
    # `isinstance` would ask objects that stand for others, and warn, what they are.
    objects = gc.get_objects()
    modules = [found for found in objects if issubclass(type(found), torch.nn.Module)]
    modules = [found for found in modules if "_modules" in vars(found)]  # the others are half made
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _other_allocator() -> str:
    """Return what the program has in place of PyTorch's caching allocator, if anything."""
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return "PYTORCH_NO_CUDA_MEMORY_CACHING"
    backend = torch.cuda.get_allocator_backend()
    return "" if backend == "native" else f"an allocator called {backend}"


def _unsized_workspaces() -> list[str]:
    """Return the libraries that were asked how large a workspace must be; see build_stubs.py."""
    if not torch.cuda.is_initialized():
        return []
    runtime = ctypes.CDLL(None)
    runtime.phantom_unsized_functions.restype = ctypes.c_char_p
    functions = runtime.phantom_unsized_functions().decode().split()
    names = {"cusolver": "cuSOLVER", "cufft": "cuFFT", "cusparse": "cuSPARSE", "cudnn": "cuDNN"}
    return [said for name, said in names.items() if any(f.startswith(name) for f in functions)]


def _pinned_bytes() -> int:
    if not torch.cuda.is_initialized() or not hasattr(torch.cuda, "host_memory_stats"):
        return 0  # 2.6 does not say
    return torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)


def after_safetensors(module: Any) -> None:
    """Note what is saved by safetensors, too."""
    module.save_file = _noting(module.save_file)


def _noting(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that saves: note the folder, and how much, if it is given tensors of a GPU.

    Missed is what was moved to the host, or into a buffer, before.
    """

    @wraps(save)
    def noting(*given: Any, **options: Any) -> Any:
        values = [*given, *options.values()]
        try:
            if any(tensor.is_cuda for tensor in tensors_in(values)):
                files = [value for value in values if isinstance(value, str | os.PathLike)]
                SAVED_IN.extend(os.path.dirname(os.path.abspath(file)) for file in files)
                for evidence in CURRENT:
                    evidence.saves(values)
        except Exception as error:  # something that holds itself, for one
            print(f"labkit: where zeros are saved is not noted: {error}", file=sys.stderr)
        return save(*given, **options)

    return noting

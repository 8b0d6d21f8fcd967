"""What can make a script take less: each remedy with what it changes, when it applies, how it is
tried on the running program, and what a person writes.

A remedy has a way for each kind of place (`phantom_gpu.program`): an argument of a call, such as
Trainer's or the optimizer's, or statements about the model. What is tried is what the lines say, so
that a script with these lines takes the same bytes.

Limits: half the rows needs a `DataLoader` or Trainer; the step in backward, a loop of the script's
own with one optimizer; the loss in chunks, a causal model of transformers with one output layer.
"""

import inspect
import linecache
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from gpumem.estimation.known_techniques import KNOWN
from gpumem.estimation.recipe import LORA_RANK
from gpumem.estimation.techniques import OPTIMIZERS
from phantom_gpu.kept_outputs import free
from phantom_gpu.program import (
    Call,
    ModelFacts,
    Program,
    checkpoint_switch,
    is_installed,
    repeated,
)
from phantom_gpu.report_records import (
    ACCELERATOR,
    ARGUMENTS,
    BACKWARD,
    CUDA,
    DDP,
    ENVIRONMENT,
    LIGHTNING,
    LOADED,
    LOADER,
    MODEL,
    MOVED,
    OPTIMIZER,
    PASS,
    TRL,
    Edit,
    Offer,
    Place,
)
from phantom_gpu.write_edits import variable

CHUNK_TOKENS = 1024
ALLOCATOR_VARIABLE, EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_ADAM = ("Adam", "AdamW")
_ADAMS_ARGUMENTS = ("lr", "betas", "eps", "weight_decay")
#: By the optimizer that it takes the place of: AdamW's default decays weights, and Adam's does not.
_8BIT = {"AdamW": OPTIMIZERS["adamw8bit"], "Adam": "bitsandbytes.optim.Adam8bit"}
_ADAFACTOR = dict.fromkeys(_ADAM, OPTIMIZERS["adafactor"])
Change = Callable[[Any, Program], None]  # of a Call, or of a model
Code = Callable[[Program, Place, str], str]  # with the name of the variable that it is about


@dataclass(frozen=True)
class Way:
    """How a remedy is made at a kind of place: ``change`` does it, ``codes`` say what to write,
    each by its ``how`` of an `Edit`."""

    change: Change
    codes: dict[str, Code]


@dataclass(frozen=True)
class Remedy:
    """``name`` is its key in `KNOWN`, ``applies`` is asked of a program and its largest model. Each
    of ``ways`` has all changes that make the remedy, by kind of place; the most fitting is the
    first. ``excludes`` names others that cannot be made beside it. ``besides`` says what else this
    model's training notices of it."""

    name: str
    applies: Callable[[Program, ModelFacts], bool]
    ways: tuple[dict[str, Way], ...]
    excludes: tuple[str, ...] = ()
    besides: Callable[[ModelFacts], str] = lambda _: ""


def offers(program: Program) -> list[Offer]:
    """Return the remedies that apply to a program that has trained a model."""
    model = program.main_model()
    found = []
    for remedy in REMEDIES if model is not None else ():
        ways = (way for way in remedy.ways if all(_place(program, model, kind) for kind in way))
        way = next(ways, None)
        if way is None or not remedy.applies(program, model):
            continue
        edits = []
        for kind, each in way.items():
            place = _place(program, model, kind)
            parts = (_edit(program, model, place, *code) for code in each.codes.items())
            edits += filter(lambda edit: edit.code, parts)
        known = KNOWN[remedy.name]
        changes = remedy.besides(model) or known.in_training
        about = remedy.name, known.name, known.effect, changes
        found.append(Offer(*about, tuple(edits), _excluded(remedy)))
    return found


def trials(chosen: Iterable[tuple[str, Sequence[Place]]]) -> dict[Place, list[Change]]:
    """Return the changes of remedies, each by its name and places, by place."""
    by_name = {remedy.name: remedy for remedy in REMEDIES}
    found: dict[Place, list[Change]] = {}
    for name, places in chosen:
        kinds = {place.kind for place in places}
        way = next(way for way in by_name[name].ways if way.keys() == kinds)
        for place in places:
            found.setdefault(place, []).append(way[place.kind].change)
    return found


def _excluded(remedy: Remedy) -> tuple[str, ...]:
    others = [other.name for other in REMEDIES if remedy.name in other.excludes]
    return tuple(sorted({*remedy.excludes, *others}))


def _place(program: Program, model: ModelFacts, kind: str) -> Place | None:
    """Return the place of a kind that decides how ``model`` is trained."""
    if kind in (LOADED, MOVED, CUDA):
        return next((place for place in model.made if place.kind == kind), None)
    if kind in (MODEL, ENVIRONMENT):
        return Place(kind, model.name if kind == MODEL else "")
    if kind == LOADER:
        return None if program.trained_from in program.several else program.trained_from
    if kind == OPTIMIZER:  # several may need each its own
        alone = len(program.stepped) == 1 and not program.several & program.stepped.keys()
        return next(iter(program.stepped)) if alone else None
    return program.first(kind)


def _edit(program: Program, model: ModelFacts, place: Place, how: str, code: Code) -> Edit:
    at, name = place, "optimizer" if place.kind == OPTIMIZER else "model"
    if place.kind == MODEL:
        at = next(reversed(model.made), Place(MODEL, ""))
    line = at.line
    if how == "after":
        file, _, number = line.rpartition(":")
        text = "".join(linecache.getlines(file))
        held_by = variable(text, int(number), at.kind) if text else ""
        line, name = line if held_by else "", held_by or name
    return Edit(place, line, how, code(program, place, name))


# --- ways -----------------------------------------------------------------------------------------


def _arguments(**values: Any) -> Way:
    """Give a call these arguments."""

    def change(call: Call, _: Program) -> None:
        call.named.update(values)

    return Way(change, {"arguments": lambda *_: _written(values)})


def _written(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _computed(values: Callable[[dict[str, Any]], dict[str, Any]]) -> Way:
    """Give a call the arguments that ``values`` makes of its own."""

    def change(call: Call, _: Program) -> None:
        call.named.update(values(call.named))

    def code(program: Program, place: Place, name: str) -> str:
        return _written(values(program.calls[place]))

    return Way(change, {"arguments": code})


def _on_model(change: Callable[[torch.nn.Module], Any], code: Code) -> tuple[dict[str, Way], ...]:
    """Change the model once it is loaded, else once it is moved, else before its first pass.

    ``change`` returns another model, or None where it changes the one it gets.
    """

    def made(call: Call, _: Program) -> None:
        call.after.append(change)

    def first_pass(model: torch.nn.Module, _: Program) -> None:
        change(model)

    after = Way(made, {"after": code})
    by_kind = ({LOADED: after}, {MOVED: after}, {CUDA: after})
    return *by_kind, {MODEL: Way(first_pass, {"after": code})}


def _source(function: Callable) -> str:
    return inspect.getsource(function).strip()


def _freed(program: Program, place: Place, _: str) -> str:
    return " = ".join((*program.calls[place]["names"], "None"))


_FREES = Way(lambda call, _: free(call.kind, call.named["names"]), {"before": _freed})


# --- the forward pass -----------------------------------------------------------------------------


def _fused_attention(model: torch.nn.Module) -> None:
    model.set_attn_implementation("sdpa")


def _sdpa_code(program: Program, place: Place, name: str) -> str:
    return f'{name}.set_attn_implementation("sdpa")'


def checkpoint_blocks(model: torch.nn.Module, name: str) -> None:
    """Recompute every block of this class in backward."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    for block in model.modules():
        inner = [type(each).__name__ for each in block.modules() if each is not block]
        if type(block).__name__ == name and name not in inner:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _checkpoint(model: torch.nn.Module) -> None:
    if switch := checkpoint_switch(model):
        getattr(model, switch)({"use_reentrant": False})
    else:
        checkpoint_blocks(model, repeated(model)[0])


def _checkpoint_code(program: Program, place: Place, name: str) -> str:
    model = program.main_model()
    if model.switch:
        return f'{name}.{model.switch}({{"use_reentrant": False}})'
    return f'{_source(checkpoint_blocks)}\n\n\ncheckpoint_blocks({name}, "{model.layer}")'


def _checkpoint_argument(fields: dict[str, Any]) -> dict[str, Any]:
    new = "activation_checkpointing"  # of transformers 5; the old name warns there
    return {new if new in fields else "gradient_checkpointing": True}


def loss_in_chunks(model, input_ids=None, labels=None, attention_mask=None, **inputs):
    """Take the place of a causal model's forward pass: 1024 tokens' logits exist at a time."""
    from torch.nn.functional import cross_entropy
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_outputs import CausalLMOutput

    if labels is None:
        return type(model).forward(model, input_ids, attention_mask=attention_mask, **inputs)
    count = inputs.pop("num_items_in_batch", None)  # Trainer's, over all batches of a step
    body, head = model.base_model, model.get_output_embeddings()
    hidden = body(input_ids, attention_mask=attention_mask, **inputs).last_hidden_state

    def chunk_loss(rows, targets):
        return cross_entropy(head(rows).float(), targets, reduction="sum")

    rows, targets = hidden[:, :-1].flatten(0, 1).split(1024), labels[:, 1:].flatten().split(1024)
    pairs = zip(rows, targets, strict=True)
    total = sum(checkpoint(chunk_loss, *pair, use_reentrant=False) for pair in pairs)
    return CausalLMOutput(loss=total / (count or (labels[:, 1:] != -100).sum()))


def _chunk(model: torch.nn.Module) -> None:
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    plain.forward = MethodType(loss_in_chunks, plain)


def _chunk_code(program: Program, place: Place, name: str) -> str:
    if place.kind == MODEL and program.main_model().name.startswith("Peft"):
        name = f"{name}.get_base_model()"
    lines = f"from types import MethodType\n\n{name}.forward = MethodType(loss_in_chunks, {name})"
    return f"{_source(loss_in_chunks)}\n\n\n{lines}"


def activations_on_host(model: torch.nn.Module) -> None:
    """Move what a forward pass stores for backward to the host until it is needed."""
    from functools import wraps
    from types import MethodType

    from torch.autograd.graph import save_on_cpu

    forward = model.forward.__func__

    @wraps(forward)
    def on_host(self, *given, **options):
        with save_on_cpu(pin_memory=True):
            return forward(self, *given, **options)

    model.forward = MethodType(on_host, model)  # a copy's is its own


def _offload_code(program: Program, place: Place, name: str) -> str:
    return f"{_source(activations_on_host)}\n\n\nactivations_on_host({name})"


def _autocast_dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16


def _autocast(model: torch.nn.Module) -> None:
    autocast = torch.autocast("cuda", _autocast_dtype())
    model.forward = MethodType(autocast(model.forward.__func__), model)  # a copy's is its own


def _autocast_code(program: Program, place: Place, name: str) -> str:
    autocast = f'torch.autocast("cuda", {_autocast_dtype()})'
    text = (
        "from types import MethodType\n\n"
        f"{name}.forward = MethodType({autocast}({name}.forward.__func__), {name})"
    )
    if _autocast_dtype() is torch.float16:
        text += "\n# and scale the loss, or small gradients are lost: torch.amp.GradScaler()"
    return text


_TO_BF16 = Way(
    lambda call, _: call.after.append(lambda model: model.to(torch.bfloat16)),
    {"after": lambda _, __, name: f"{name}.to(torch.bfloat16)"},
)


def _amp(_: dict[str, Any]) -> dict[str, Any]:
    return {"bf16" if _autocast_dtype() is torch.bfloat16 else "fp16": True}


def _mixed(_: dict[str, Any]) -> dict[str, Any]:
    return {"mixed_precision": next(iter(_amp({})))}


def _lightning_mixed(_: dict[str, Any]) -> dict[str, Any]:
    return {"precision": "bf16-mixed" if "bf16" in _amp({}) else "16-mixed"}


# --- weights --------------------------------------------------------------------------------------


_LORA = f'LoraConfig(r={LORA_RANK}, target_modules="all-linear")'


def _lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=LORA_RANK, target_modules="all-linear")


def _adapters(model: torch.nn.Module) -> torch.nn.Module:
    from peft import get_peft_model

    return get_peft_model(model, _lora_config())


def _lora_for_trl(call: Call, _: Program) -> None:
    call.named["peft_config"] = _lora_config()


def _lora(call: Call, _: Program) -> None:
    call.after.append(_adapters)


def _qlora(call: Call, program: Program) -> None:
    from transformers import BitsAndBytesConfig

    call.named["quantization_config"] = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=_autocast_dtype(),
    )
    call.after.append(_adapters)


def _lora_code(program: Program, place: Place, name: str) -> str:
    lines = "from peft import LoraConfig, get_peft_model\n\n"
    return f"{lines}{name} = get_peft_model({name}, {_LORA})"


def _qlora_code(*_: Any) -> str:
    return f"""\
quantization_config=transformers.BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype={_autocast_dtype()},
)"""


# --- the optimizer and the batch ------------------------------------------------------------------


def _becomes(paths: dict[str, str], kept: tuple[str, ...]) -> Way:
    """Make an optimizer of another class, by the name of its own, with the arguments ``kept``."""

    def change(call: Call, _: Program) -> None:
        package, _, name = paths[call.kind.__name__].rpartition(".")
        call.kind = getattr(__import__(package, fromlist=[name]), name)
        call.named = {key: call.named[key] for key in ("params", *kept) if key in call.named}

    def needless(program: Program, place: Place, name: str) -> str:
        return ", ".join(key for key in program.calls[place] if key not in ("params", *kept))

    def path(program: Program, place: Place, name: str) -> str:
        return paths[type(program.stepped[place]).__name__]

    return Way(change, {"class": path, "without": needless})


def step_in_backward(optimizer):
    """Update each weight, and free its gradient, as soon as backward has it."""
    from types import MethodType

    alone = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            alone[parameter] = group, type(optimizer)([{**group, "params": [parameter]}])

    def step(parameter):
        group, own = alone[parameter]
        own.param_groups[0]["lr"] = group["lr"]  # a scheduler may have changed it
        own.step()
        own.zero_grad()

    for parameter in alone:
        parameter.register_post_accumulate_grad_hook(step)
    optimizer.step = MethodType(lambda *_, **__: None, optimizer)  # a scheduler wraps the method
    optimizer.zero_grad = lambda *_, **__: None


def every_second_step(optimizer):
    """Have two batches make one step, with the mean of their gradients."""
    from types import MethodType

    step, zero_grad, batches = optimizer.step, optimizer.zero_grad, 0

    def step_or_not(_, *given, **options):
        nonlocal batches
        batches += 1
        if batches % 2 == 1:
            return None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= 2
        return step(*given, **options)

    def zero_or_not(*given, **options):
        if batches % 2 == 0:
            zero_grad(*given, **options)

    optimizer.step, optimizer.zero_grad = MethodType(step_or_not, optimizer), zero_or_not


def _on_optimizer(function: Callable[[torch.optim.Optimizer], None]) -> Way:
    def change(call: Call, _: Program) -> None:
        call.after.append(function)

    def code(program: Program, place: Place, name: str) -> str:
        return f"{_source(function)}\n\n\n{function.__name__}({name})"

    return Way(change, {"after": code})


def _half_batch(fields: dict[str, Any]) -> dict[str, Any]:
    rows, batches = fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]
    return {"per_device_train_batch_size": rows // 2, "gradient_accumulation_steps": 2 * batches}


def _twice_the_batches(fields: dict[str, Any]) -> dict[str, Any]:
    return {"accumulate_grad_batches": 2 * fields.get("accumulate_grad_batches", 1)}


def _half(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"batch_size": arguments["batch_size"] // 2}


#: Nothing is changed in a program that runs: the variable is there when it starts.
_VARIABLE = Way(lambda *_: None, {"variable": lambda *_: f"{ALLOCATOR_VARIABLE}={EXPANDABLE}"})


# --- when they apply ------------------------------------------------------------------------------


def _values(program: Program, kind: str) -> dict[str, Any]:
    place = program.first(kind)
    return program.calls[place] if place else {}


def _computes_in_fp32(program: Program, model: ModelFacts) -> bool:
    trainer, accelerator = _values(program, ARGUMENTS), _values(program, ACCELERATOR)
    mixed = trainer.get("bf16") or trainer.get("fp16")
    mixed = mixed or accelerator.get("mixed_precision") not in (None, "no")
    mixed = mixed or "16" in str(_values(program, LIGHTNING).get("precision", ""))
    return model.dtype == "float32" and not (model.autocasts or mixed or model.parallel)


def _trains_all_in_fp32(_: Program, model: ModelFacts) -> bool:
    whole = model.trained_share > 0.5 and model.whole_numbers and not model.parallel
    return whole and model.dtype == "float32"


def _trains_a_pretrained_model(_: Program, model: ModelFacts) -> bool:
    whole = model.transformers and model.trained_share > 0.5 and not model.parallel
    return whole and is_installed("peft")


def _optimizer_is(program: Program, classes: tuple[str, ...], trainers: str) -> bool:
    """Return whether the only optimizer is of these classes, or Trainer's name of it begins so."""
    if arguments := _values(program, ARGUMENTS):
        return str(arguments["optim"]).rpartition(".")[2].lower().startswith(trainers)
    return [type(optimizer).__name__ in classes for optimizer in program.stepped.values()] == [True]


def _updates_by_adam(program: Program, model: ModelFacts) -> bool:
    return _optimizer_is(program, _ADAM, "adamw_torch") and not model.parallel


def _updates_by_many_kernels(program: Program, _: ModelFacts) -> bool:
    if arguments := _values(program, ARGUMENTS):
        return str(arguments["optim"]).rpartition(".")[2].lower() == "adamw_torch"
    if not _optimizer_is(program, _FUSED, ""):
        return False
    [optimizer] = program.stepped.values()
    return all(not g.get("fused") and g.get("foreach") is None for g in optimizer.param_groups)


def _updates_all_at_once(program: Program, model: ModelFacts) -> bool:
    """Return whether the update makes temporary tensors for all weights, and no kernel spares them:
    torch's default on CUDA, `torch.optim.Optimizer`'s ``foreach``."""
    if len(program.stepped) != 1 or _updates_by_many_kernels(program, model):
        return False
    [optimizer] = program.stepped.values()
    groups = optimizer.param_groups
    return all(g.get("foreach", False) is not False and not g.get("fused") for g in groups)


def _has_a_plain_loop(program: Program, model: ModelFacts) -> bool:
    others = program.first(ARGUMENTS, LIGHTNING, ACCELERATOR, DDP) or model.parallel
    return not (others or program.scales)  # each weight's gradient would stay scaled


def _has_halves(program: Program, _: ModelFacts) -> bool:
    """Return whether half the rows and twice the batches train the same: schedules advance, and
    clipping and scalers work, once for each half where the script's own loop steps."""
    if arguments := _values(program, ARGUMENTS):
        return arguments["per_device_train_batch_size"] % 2 == 0
    loader = program.calls.get(program.trained_from, {})
    steps_alone = not (program.clips or program.schedules or program.scales)
    halves = (loader.get("batch_size") or 1) % 2 == 0
    return halves and (steps_alone or program.first(LIGHTNING) is not None)


def _stores_activations(program: Program, model: ModelFacts) -> bool:
    return not (program.first(TRL) or model.parallel)  # TRL has its own way


REMEDIES = (
    Remedy(
        "freed-outputs",
        lambda *_: True,  # where there is such a place
        ({BACKWARD: _FREES, PASS: _FREES}, {BACKWARD: _FREES}, {PASS: _FREES}),
    ),
    Remedy(
        "expandable-segments",
        lambda *_: "expandable_segments" not in os.environ.get(ALLOCATOR_VARIABLE, ""),
        ({ENVIRONMENT: _VARIABLE},),
    ),
    Remedy(
        "fused-attention",
        lambda _, model: model.attention == "eager",
        (
            {LOADED: _arguments(attn_implementation="sdpa")},
            *_on_model(_fused_attention, _sdpa_code),
        ),
    ),
    Remedy(
        "fused-optimizer",
        _updates_by_many_kernels,
        ({ARGUMENTS: _arguments(optim="adamw_torch_fused")}, {OPTIMIZER: _arguments(fused=True)}),
        excludes=("8bit-adam", "adafactor", "step-in-backward"),
    ),
    Remedy(
        "one-by-one",
        _updates_all_at_once,
        ({OPTIMIZER: _arguments(foreach=False)},),
        excludes=("8bit-adam", "adafactor", "step-in-backward"),
    ),
    Remedy(
        "bucket-views",
        lambda program, _: not _values(program, DDP).get("gradient_as_bucket_view"),
        ({DDP: _arguments(gradient_as_bucket_view=True)},),
    ),
    Remedy(
        "chunked-loss",
        lambda program, model: model.chunks and not (program.first(TRL) or model.parallel),
        _on_model(_chunk, _chunk_code),
    ),
    Remedy(
        "checkpointing",
        lambda program, model: model.layers > 1 and not (model.checkpoints or program.recomputes),
        ({ARGUMENTS: _computed(_checkpoint_argument)}, *_on_model(_checkpoint, _checkpoint_code)),
        besides=lambda model: "batch norms count each batch twice" * model.batch_norms,
    ),
    Remedy(
        "half-rows",
        _has_halves,
        (
            {ARGUMENTS: _computed(_half_batch)},
            {LIGHTNING: _computed(_twice_the_batches), LOADER: _computed(_half)},
            {LOADER: _computed(_half), OPTIMIZER: _on_optimizer(every_second_step)},
        ),
        excludes=("step-in-backward",),
    ),
    Remedy(
        "offload-activations",
        _stores_activations,
        _on_model(activations_on_host, _offload_code),
        excludes=("checkpointing",),
    ),
    Remedy(
        "step-in-backward",
        _has_a_plain_loop,
        ({OPTIMIZER: _on_optimizer(step_in_backward)},),
    ),
    Remedy(
        "autocast",
        _computes_in_fp32,
        (
            {ARGUMENTS: _computed(_amp)},
            {ACCELERATOR: _computed(_mixed)},
            {LIGHTNING: _computed(_lightning_mixed)},
            *_on_model(_autocast, _autocast_code),
        ),
        excludes=("bf16",),
    ),
    Remedy(
        "8bit-adam",
        lambda *facts: _updates_by_adam(*facts) and is_installed("bitsandbytes"),
        (
            {ARGUMENTS: _arguments(optim="adamw_8bit")},
            {OPTIMIZER: _becomes(_8BIT, _ADAMS_ARGUMENTS)},
        ),
        excludes=("adafactor",),
    ),
    Remedy(
        "bf16",
        lambda *facts: _trains_all_in_fp32(*facts) and _autocast_dtype() is torch.bfloat16,
        (
            {LOADED: _arguments(dtype=torch.bfloat16)},
            {MOVED: _arguments(dtype=torch.bfloat16)},
            {CUDA: _TO_BF16},
        ),
    ),
    Remedy(
        "adafactor",
        _updates_by_adam,
        (
            {ARGUMENTS: _arguments(optim="adafactor")},
            {OPTIMIZER: _becomes(_ADAFACTOR, ("lr", "weight_decay"))},
        ),
    ),
    Remedy(
        "lora",
        _trains_a_pretrained_model,
        (
            {TRL: Way(_lora_for_trl, {"arguments": lambda *_: f"peft_config=peft.{_LORA}"})},
            {LOADED: Way(_lora, {"after": _lora_code})},
        ),
        excludes=("8bit-adam", "adafactor", "step-in-backward", "bf16"),
    ),
    Remedy(
        "qlora",
        lambda *facts: _trains_a_pretrained_model(*facts) and is_installed("bitsandbytes"),
        ({LOADED: Way(_qlora, {"arguments": _qlora_code, "after": _lora_code})},),
        excludes=("lora", "8bit-adam", "adafactor", "step-in-backward", "bf16"),
    ),
)

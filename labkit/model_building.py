"""A recipe's model: random weights, made and quantised one layer at a time where they will be.

Limits: a layer made so on ``meta`` has its own class's start values, without what a model may set
for parts of a block (GPT-2 scales one matrix).
"""

import warnings
from contextlib import nullcontext
from typing import Any

import torch

from labkit import models
from labkit.experiment import first_line
from labkit.memory import InputError
from labkit.recipes import ALL_LINEAR, Recipe
from labkit.techniques import FetchedLayer, shard


def build_model(config: Any, recipe: Recipe, device: torch.device, layers: int | None) -> Any:
    """The model that ``recipe`` trains, with ``layers`` layers if that is given.

    Raises:
        InputError: it cannot be built, quantised, offloaded or adapted so.
    """
    dtype = models.dtype_of(recipe.precision)
    attention = "eager" if recipe.attention == "eager" else "sdpa"
    in_parts = recipe.quantize or recipe.offload == "weights" or recipe.ranks > 1
    where = "meta" if in_parts else device
    model = models.model(config, device=where, dtype=dtype, layers=layers, attention=attention)
    _refuse_length(model, recipe.seq_len)
    if recipe.ranks > 1:
        return _sharded(model, recipe, device)
    if in_parts:
        _materialise(model, recipe, device)
    if recipe.offload == "weights":
        for layer in _layers(model):
            FetchedLayer(layer, device)
    elif recipe.checkpointing:
        models.checkpointing(model)
    if recipe.lora:
        model = _with_adapters(model, recipe)
    return model


def _refuse_length(model: Any, seq_len: int) -> None:
    """A table of positions that ends too early, as GPT-2 has one, is a crash on real tensors only.

    Raises:
        InputError: the sequence is longer than the table.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or seq_len <= positions:
        return
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    # OPT's has two rows more.
    if any(m.num_embeddings - positions in (0, 2) and m.num_embeddings < seq_len for m in tables
           if m is not model.get_input_embeddings()):  # fmt: skip
        raise InputError(
            f"seq_len must be at most {positions}, the positions that this model knows, "
            f"not {seq_len}"
        )


def _layers(model: Any) -> list[torch.nn.Module]:
    layers = models.layers_of(model)
    if layers is None:
        depth = model.config.num_hidden_layers
        raise InputError(f"{type(model).__name__} has no list of {depth} layers to take apart")
    return list(layers)


def _materialise(model: Any, recipe: Recipe, device: torch.device) -> None:
    """Give a model on ``meta`` its weights, module by module, quantised before the next is made."""
    on_host = set()
    if recipe.offload == "weights":
        on_host = {module for layer in _layers(model) for module in layer.modules()}
    made: dict[torch.Tensor, torch.Tensor] = {}  # tied weights are one
    for name, module in list(model.named_modules()):
        host = torch.device("cpu") if module in on_host else device
        _fill(module, made, weights=host, buffers=device)
        model._init_weights(module)
        if recipe.quantize and _is_linear(module) and module is not model.get_output_embeddings():
            owner, _, child = name.rpartition(".")
            setattr(model.get_submodule(owner), child, _quantised(module, recipe, device))
            # Or the plain weight would stay until the whole model is built.
            made = {meta: own for meta, own in made.items() if own is not module.weight}
            module._parameters.clear()
    if recipe.quantize:
        # PEFT asks for these names before it looks at the layers.
        model.is_loaded_in_8bit = recipe.quantize == "int8"
        model.is_loaded_in_4bit = not model.is_loaded_in_8bit
    model.train()


def _fill(
    module: torch.nn.Module, made: dict, *, weights: torch.device, buffers: torch.device
) -> None:
    """Memory for what ``module`` itself holds on ``meta``; ``made`` remembers what was made."""
    # Buffers are small, and a layer's are not fetched with its weights.
    for tensors, target in ((module._parameters, weights), (module._buffers, buffers)):
        for key, tensor in tensors.items():
            if tensor is not None and tensor.device.type == "meta":
                if tensor not in made:
                    made[tensor] = _made(tensor, target)
                tensors[key] = made[tensor]


def _sharded(model: Any, recipe: Recipe, device: torch.device) -> Any:
    """A model on ``meta``, made unit by unit, each cut up among the ranks before the next is made.

    Its layers are units, and so is its embedding where that is not tied to the output. What is
    left belongs to the unit of the whole, which the caller makes.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    units = _layers(model)
    if output is None or embedding.weight is not output.weight:
        units.append(embedding)
    if recipe.checkpointing:
        models.checkpointing(model)
    whole = _with_adapters(model, recipe) if recipe.lora else model
    made: dict[torch.Tensor, torch.Tensor] = {}
    for part in (*units, whole):
        for name, module in part.named_modules():
            if any(t is not None and t.device.type == "meta" for t in _own(module)):
                _fill(module, made, weights=device, buffers=device)
                model._init_weights(module)
                if "lora_B" in name:  # adapters begin by adding nothing
                    torch.nn.init.zeros_(module.weight)
        if part is not whole:
            shard(part, recipe, device)
            made.clear()
    whole.train()
    return whole


def _own(module: torch.nn.Module) -> tuple[torch.Tensor | None, ...]:
    return *module._parameters.values(), *module._buffers.values()


def _made(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _is_linear(module: torch.nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, torch.nn.Linear | Conv1D)


def _quantised(linear: torch.nn.Module, recipe: Recipe, device: torch.device) -> torch.nn.Module:
    """bitsandbytes' layer with the weight of ``linear``, which may be dropped afterwards."""
    from bitsandbytes import nn

    weight = linear.weight.detach()
    if not isinstance(linear, torch.nn.Linear):  # GPT-2's layers hold the transpose
        weight = weight.t().contiguous()
    rows, columns = weight.shape
    options = {"bias": linear.bias is not None, "device": "meta"}
    if recipe.quantize == "int8":
        layer = nn.Linear8bitLt(columns, rows, has_fp16_weights=False, threshold=6.0, **options)
        layer.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        kind = {"quant_type": "nf4", "compress_statistics": recipe.quantize == "nf4-double"}
        computed_in = models.autocast_dtype(recipe.precision) or linear.weight.dtype
        layer = nn.Linear4bit(columns, rows, compute_dtype=computed_in, **kind, **options)
        layer.weight = nn.Params4bit(weight, requires_grad=False, module=layer, **kind)
    layer.weight = layer.weight.to(device)
    layer.bias = linear.bias
    return layer


def _with_adapters(model: Any, recipe: Recipe) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = list(recipe.lora_targets)
    if recipe.lora_targets == ALL_LINEAR:
        targets = ALL_LINEAR[0]
    config = LoraConfig(r=recipe.lora, target_modules=targets, task_type="CAUSAL_LM")
    try:
        with warnings.catch_warnings():
            # PEFT asks transformers for an old name; GPT-2's layers it adapts to by itself.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            empty = any(p.device.type == "meta" for p in model.parameters())
            with torch.device("meta") if empty else nullcontext():
                return get_peft_model(model, config)
    except ValueError as error:
        names = ", ".join(recipe.lora_targets)
        raise InputError(
            f"LoRA finds nothing to adapt in {type(model).__name__} called {names[:80]}: "
            f"{first_line(error)}"
        ) from error

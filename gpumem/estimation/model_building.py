"""A recipe's model: random weights, initialised layer by layer in their place, and quantized in the
order in which transformers loads a file.

Every weight is trained, or adapters are: on linear layers, which experts are not, and beside a
vision tower on the language model's alone, as is usual.

Limits: a layer initialised so has its own class's start values, without what a model may set for
parts of a block (GPT-2 scales one matrix).
"""

import re
import warnings
from contextlib import nullcontext
from typing import Any

import torch

from gpumem.estimation.recipe import ALL_LINEAR, Recipe
from gpumem.estimation.techniques import FetchedLayer, shard
from gpumem.estimation.weight_shapes import LANGUAGE, has_experts, linear_layers, shapes_of
from gpumem.experiment import first_line
from gpumem.inputs import InputError, one_of
from gpumem.models import catalogue


def build_model(config: Any, recipe: Recipe, device: torch.device, layers: int | None) -> Any:
    """Return the model that ``recipe`` trains, with ``layers`` layers if that is given; an
    `InputError` says why it cannot be built, quantized, offloaded or adapted so."""
    dtype = recipe.weights_dtype
    attention = "eager" if recipe.attention == "eager" else "sdpa"
    # Built in place, an output layer allocates a weight of its own before it is tied to the
    # embedding: a block that a model loaded from a file never had.
    tied = config.tie_word_embeddings or config.get_text_config().tie_word_embeddings
    in_parts = tied or recipe.quantize or recipe.offload == "weights" or recipe.ranks > 1
    where = "meta" if in_parts else device
    model = catalogue.model(config, device=where, dtype=dtype, layers=layers, attention=attention)
    _refuse_length(model, recipe.seq_len)
    if recipe.quantize and has_experts(model):
        raise InputError(
            "bitsandbytes quantizes linear layers, and this model's experts, which are most of it, "
            "are tensors of three dimensions: leave quantize out."
        )
    if recipe.ranks > 1:
        return _sharded(model, recipe, device)
    if in_parts:
        _materialise(model, config, recipe, device)
    if recipe.offload == "weights":
        for layer in _layers(model):
            FetchedLayer(layer, device)
    elif recipe.checkpointing:
        catalogue.checkpointing(model)
    if recipe.lora:
        model = _with_adapters(model, recipe)
    return model


def possible_for(config: Any, recipe: Recipe) -> Recipe:
    """Return ``recipe`` with the attention that transformers has for this model.

    Raises:
        InputError: it asks for flash attention, and the model has none.
    """
    if catalogue.has_fused_attention(config):
        return recipe
    if recipe.attention == "flash":
        raise InputError(f"transformers has no fused attention for {config.model_type} models")
    return recipe.but(attention="eager")


def _refuse_length(model: Any, seq_len: int) -> None:
    """Refuse more tokens than GPT-2's kind of model has positions: only real tensors would fail."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    rows = {table.num_embeddings for table in tables if table is not model.get_input_embeddings()}
    # OPT's table has two rows more.
    if positions and seq_len > positions and rows & {positions, positions + 2}:
        raise InputError(f"{seq_len} tokens are too many: this model knows {positions} positions")


def _layers(model: Any) -> list[torch.nn.Module]:
    layers = catalogue.layers_of(model)
    if layers is None:
        depth = model.config.get_text_config().num_hidden_layers
        raise InputError(f"{type(model).__name__} has no list of {depth} layers to take apart")
    return list(layers)


def _materialise(model: Any, config: Any, recipe: Recipe, device: torch.device) -> None:
    """Initialise a model on ``meta`` module by module, each quantized before the next.

    ``config`` is that of the whole model, of which this one may have some layers only.
    """
    on_host = set()
    if recipe.offload == "weights":
        on_host = {module for layer in _layers(model) for module in layer.modules()}
    made: dict[torch.Tensor, torch.Tensor] = {}  # tied weights are one
    initialise, linear = _initialisers(model), linear_layers(model)
    modules = list(model.named_modules())
    if recipe.quantize:
        modules.sort(key=lambda named: _place_in_file(model, *named))
        _reserve_for_weights(config, recipe, device)
    for name, module in modules:
        host = torch.device("cpu") if module in on_host else device
        _fill(module, made, weights=host, buffers=device)
        initialise[module](module)
        if recipe.quantize and name in linear:
            owner, _, child = name.rpartition(".")
            setattr(model.get_submodule(owner), child, _quantized(module, recipe, device))
            # Otherwise the plain weight would live until the whole model is built.
            made = {meta: own for meta, own in made.items() if own is not module.weight}
            module._parameters.clear()
    if recipe.quantize:
        # PEFT asks for these names before it looks at the layers.
        model.is_loaded_in_8bit = recipe.quantize == "int8"
        model.is_loaded_in_4bit = not model.is_loaded_in_8bit
    model.train()


def _place_in_file(model: Any, name: str, module: torch.nn.Module) -> tuple:
    """Return what sorts modules as transformers sorts the names of a file's tensors.

    Source: ``convert_and_load_state_dict_in_model`` in ``transformers/core_model_loading.py``.
    """
    from transformers.core_model_loading import dot_natural_key

    embedding = model.get_input_embeddings().weight
    absent = module is model.get_output_embeddings() and module.weight is embedding
    return absent, dot_natural_key(name)


def _reserve_for_weights(config: Any, recipe: Recipe, device: torch.device) -> None:
    """Request and free one block for all weights, on a GPU, as transformers does to load faster.

    Source: ``caching_allocator_warmup`` in ``transformers/modeling_utils.py``. It asks for less
    where the weights come within 1.2 GiB of the GPU's memory.
    """
    if device == torch.device("cpu"):
        return
    shapes, itemsize = shapes_of(config), recipe.weights_dtype.itemsize
    quantized_bytes = shapes.in_linear if recipe.quantize == "int8" else shapes.in_linear // 2
    nbytes = quantized_bytes + (shapes.parameters - shapes.in_linear) * itemsize
    torch.empty(nbytes // 2, dtype=torch.float16, device=device)


def _initialisers(model: torch.nn.Module) -> dict[torch.nn.Module, Any]:
    """Return for each module what initialises it: the innermost model of transformers around it."""
    models = [part for part in model.modules() if hasattr(part, "_init_weights")]
    return {module: part._init_weights for part in models for module in part.modules()}


def _fill(
    module: torch.nn.Module, made: dict, *, weights: torch.device, buffers: torch.device
) -> None:
    """Allocate the tensors on ``meta`` of ``module`` itself; ``made`` has those of tied modules.

    Buffers are small, and a layer's are not fetched with its weights.
    """
    for tensors, target in ((module._parameters, weights), (module._buffers, buffers)):
        for key, tensor in tensors.items():
            if tensor is not None and tensor.is_meta:
                if tensor not in made:
                    made[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, device=target)
                    if isinstance(tensor, torch.nn.Parameter):
                        trained = tensor.requires_grad
                        made[tensor] = torch.nn.Parameter(made[tensor], requires_grad=trained)
                tensors[key] = made[tensor]


def _sharded(model: Any, recipe: Recipe, device: torch.device) -> Any:
    """Initialise a model on ``meta`` unit by unit, each sharded among the ranks before the next.

    Its layers are units, a vision tower's too, and so is its embedding where that is not tied to
    the output. The rest belongs to the unit of the whole, which the caller shards.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    units = [*(catalogue.tower_layers_of(model) or ()), *_layers(model)]
    if output is None or embedding.weight is not output.weight:
        units.append(embedding)
    if recipe.checkpointing:
        catalogue.checkpointing(model)
    whole = _with_adapters(model, recipe) if recipe.lora else model
    made: dict[torch.Tensor, torch.Tensor] = {}
    initialise = _initialisers(whole)
    for part in (*units, whole):
        for name, module in part.named_modules():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if any(tensor.is_meta for tensor in own):
                _fill(module, made, weights=device, buffers=device)
                initialise[module](module)
                if "lora_B" in name:  # adapters begin by adding nothing
                    torch.nn.init.zeros_(module.weight)
        if part is not whole:
            shard(part, recipe, device)
            made.clear()
    whole.train()
    return whole


def _quantized(linear: torch.nn.Module, recipe: Recipe, device: torch.device) -> torch.nn.Module:
    """Return bitsandbytes' layer with the weight of ``linear``, which may be freed afterwards."""
    from bitsandbytes import nn

    weight = linear.weight.detach()
    if not isinstance(linear, torch.nn.Linear):  # GPT-2's layers hold the transpose
        weight = weight.t().contiguous()
    rows, columns = weight.shape
    options = {"bias": linear.bias is not None, "device": "meta"}
    if recipe.quantize == "int8":
        layer = nn.Linear8bitLt(columns, rows, has_fp16_weights=False, threshold=6.0, **options)
        weight = weight.to("cpu")  # quantized on the way to the GPU only
        layer.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        kind = {"quant_type": "nf4", "compress_statistics": recipe.quantize == "nf4-double"}
        computed_in = recipe.autocast_dtype or linear.weight.dtype
        layer = nn.Linear4bit(columns, rows, compute_dtype=computed_in, **kind, **options)
        layer.weight = nn.Params4bit(weight, requires_grad=False, module=layer, **kind)
    layer.weight = layer.weight.to(device)
    layer.bias = linear.bias
    return layer


def adapter_targets(model: Any, recipe: Recipe) -> str | list[str]:
    """Return what PEFT is to adapt.

    By "all-linear" it would adapt experts too, and compute the change of all of a layer's experts
    as one tensor of their size, for each layer: beside experts only linear layers are adapted,
    which are attention's.
    """
    if recipe.lora_targets != ALL_LINEAR:
        return list(recipe.lora_targets)
    if has_experts(model):
        return sorted({name.rpartition(".")[2] for name in linear_layers(model)})
    return ALL_LINEAR[0]


def _with_adapters(model: Any, recipe: Recipe) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = adapter_targets(model, recipe)
    if recipe.lora_targets != ALL_LINEAR:
        for target in targets:  # PEFT passes over one that nothing is called
            if not any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules()):
                names = {name.rpartition(".")[2] for name in linear_layers(model)}
                one_of(target, sorted(names), "layer in lora_targets")
    outside = f"(?!.*{re.escape(LANGUAGE)}).*" if catalogue.image_tokens(model.config) else None
    config = LoraConfig(
        r=recipe.lora, target_modules=targets, exclude_modules=outside, task_type="CAUSAL_LM"
    )
    try:
        with warnings.catch_warnings():
            # PEFT uses an old name of transformers', and adapts to GPT-2's layers by itself.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            empty = any(p.is_meta for p in model.parameters())
            with torch.device("meta") if empty else nullcontext():
                return get_peft_model(model, config)
    except ValueError as error:
        names = ", ".join(recipe.lora_targets)
        raise InputError(
            f"LoRA finds nothing to adapt in {type(model).__name__} called {names[:80]}: "
            f"{first_line(error)}"
        ) from error

"""transformers' models without their weights: what they hold does not matter on a phantom GPU.

`from_pretrained` of a model whose weights are not on this machine goes on with
zeros, and so does one whose weights transformers would convert to another dtype, which would read
them. Which tensors there are, of which shape, follows from the config. All the rest is
transformers' own code: devices, quantization, tied weights, every request to the allocator. Weights
that need no conversion are mapped by transformers, and the phantom never reads them.

Limits: without its files, a checkpoint is taken to be as transformers would write it. One that
is quantized already cannot be told from its config. Other libraries' loaders are not changed, and
transformers before 5 reads the weights that are here.
"""

import contextlib
import copy
import functools
import importlib.util
from typing import Any

import numpy as np
import torch

from phantom_gpu.hub_stand_ins import is_hub_id, say
from phantom_gpu.report_records import NOT_READ

_WEIGHT_FILES = ("SAFE_WEIGHTS", "SAFE_WEIGHTS_INDEX", "WEIGHTS", "WEIGHTS_INDEX")
_OTHER_SOURCES = ("state_dict", "gguf_file", "from_tf", "from_flax")


def after_models(module: Any) -> None:
    """Have transformers load zeros where a model's weights are not here, or would be converted."""
    if not hasattr(module, "LoadStateDictConfig"):
        return _after_models_before_5(module)
    find, load = (
        module._get_resolved_checkpoint_files,
        module.PreTrainedModel._load_pretrained_model,
    )

    @functools.wraps(find)
    def find_here(*, pretrained_model_name_or_path, **options):
        """Look for weights on this machine; finding none is no error."""
        name = pretrained_model_name_or_path
        adapter = (options.get("transformers_explicit_filename") or "").startswith("adapter")
        if name is None or options.get("gguf_file") or adapter:
            return find(pretrained_model_name_or_path=name, **options)
        if is_hub_id(name):  # or gigabytes would be fetched that nobody reads
            options["download_kwargs"] = (options.get("download_kwargs") or {}) | {
                "local_files_only": True
            }
        try:
            return find(pretrained_model_name_or_path=name, **options)
        except OSError:
            return None, {"dtype": torch.float32}  # where neither script nor config names one

    @functools.wraps(load)
    def load_zeros(model, state_dict, checkpoint_files, load_config, expected_keys=None):
        name, dtype = str(load_config.pretrained_model_name_or_path), load_config.dtype
        ready = load_config.hf_quantizer is not None and load_config.hf_quantizer.pre_quantized
        if state_dict is None and not checkpoint_files:
            state_dict = absent_weights(name, type(model), model.config, dtype, ready)
        elif state_dict is None and expected_keys is None and not ready:
            mapped = {}
            for file in checkpoint_files:
                mapped |= module.load_state_dict(file, weights_only=load_config.weights_only)
            converted = {
                name: zeros(tensor.shape, dtype)
                for name, tensor in mapped.items()
                if tensor.is_floating_point() and tensor.dtype != dtype
            }
            if converted:
                state_dict = mapped | converted
                say(name, f"the weights of {name} are not read: they are zeros")
                NOT_READ.append(name)
        expected = () if expected_keys is None else (expected_keys,)  # 5.0 takes none
        return load(model, state_dict, checkpoint_files, load_config, *expected)

    module._get_resolved_checkpoint_files = find_here
    module.PreTrainedModel._load_pretrained_model = staticmethod(load_zeros)


def _after_models_before_5(module: Any) -> None:
    """Do the same for transformers 4, which takes a state dict in place of a model's name."""
    from transformers import GenerationConfig

    plain = module.PreTrainedModel.from_pretrained.__func__
    files = [getattr(module, f"{kind}_NAME") for kind in _WEIGHT_FILES]

    def are_here(name, options):
        places = {
            key: options[key] for key in ("cache_dir", "revision", "subfolder") if key in options
        }
        return any(
            module.cached_file(
                name,
                module._add_variant(file, options.get("variant")),
                local_files_only=True,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
                **places,
            )
            for file in files
        )

    @functools.wraps(plain)
    def from_pretrained(cls, name, *args, config=None, **options):
        if name is None or any(map(options.get, _OTHER_SOURCES)) or are_here(name, options):
            return plain(cls, name, *args, config=config, **options)
        if "generation_config" not in options:
            with contextlib.suppress(OSError):  # there is none
                options["generation_config"] = GenerationConfig.from_pretrained(name)
        if not isinstance(config, module.PretrainedConfig):
            config, options = cls.config_class.from_pretrained(
                config or name, return_unused_kwargs=True, **options
            )
        dtype = options.get("dtype") or options.get("torch_dtype") or torch.float32
        if dtype == "auto":
            dtype = config.torch_dtype or torch.float32
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        quantized = getattr(config, "quantization_config", None) is not None
        absent = absent_weights(name, cls, config, dtype, quantized)
        if module.is_accelerate_available() and not module.is_deepspeed_zero3_enabled():
            options.setdefault("low_cpu_mem_usage", True)  # or 4.48 copies the zeros
        loaded = plain(cls, None, *args, config=config, state_dict=absent, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with what was found in files
        model.name_or_path = model.config.name_or_path = str(name)
        return loaded

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def after_stopping(module: Any) -> None:
    """Have texts become as long as was asked for: which token ends one is unknown."""
    plain = module.EosTokenCriteria.__call__

    @functools.wraps(plain)
    def never(self, *args, **options):
        return plain(self, *args, **options).zero_()

    module.EosTokenCriteria.__call__ = never


def absent_weights(
    name: str, kind: type, config: Any, dtype: torch.dtype, quantized: bool
) -> dict[str, torch.Tensor]:
    """Return zeros for all that transformers would write of a model as ``kind`` is unquantized.

    Whole numbers and booleans are left out: transformers computes what a checkpoint lacks.

    Raises:
        OSError: the checkpoint is quantized already.
    """
    if quantized:
        raise OSError(
            f"the weights of {name} are not on this machine, and as they are quantized "
            "already only their files say how they are laid out; put these here, or load "
            "the model that they were made from with a quantization_config"
        )
    with torch.device("meta"):
        whole = kind(copy.deepcopy(config))
        whole.tie_weights()  # 5.0 has not yet
    first_names = {}  # of each tensor: what has a second name is tied
    for weight, tensor in whole.state_dict(keep_vars=True).items():
        first_names.setdefault(tensor, weight)
    tensors = {weight: tensor.detach() for tensor, weight in first_names.items()}
    if importlib.util.find_spec("transformers.core_model_loading"):  # 5 changes what it read
        from transformers.core_model_loading import revert_weight_conversion

        tensors = revert_weight_conversion(whole, tensors)
    say(name, f"the weights of {name} are not on this machine: they are zeros")
    NOT_READ.append(name)
    return {
        weight: zeros(tensor.shape, dtype)
        for weight, tensor in tensors.items()
        if tensor.is_floating_point()
    }


def zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the CPU that take memory only where something is written to them."""
    space = np.zeros(shape.numel() * dtype.itemsize, np.uint8)
    return torch.from_numpy(space).view(dtype).reshape(shape)

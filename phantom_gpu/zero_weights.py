"""transformers' models without their weights: what they hold does not matter on a phantom GPU.

On `labkit phantom`, `from_pretrained` of a model whose weights are not on this machine goes on with
zeros, and so does one whose weights transformers would convert to another dtype, which would read
them. Which tensors there are, of which shape, follows from the config. All the rest is
transformers' own code: devices, quantization, tied weights, every request to the allocator. Weights
that need no conversion are mapped by transformers, and the phantom never reads them.

Limits: without its files, a checkpoint is taken to be as transformers would write it. One that
is quantized already cannot be told from its config. Other libraries' loaders are not changed.
"""

import copy
import functools
from typing import Any

import numpy as np
import torch

from phantom_gpu.hub_stand_ins import is_hub_id, say
from phantom_gpu.report_records import NOT_READ


def after_models(module: Any) -> None:
    """Have transformers load zeros where a model's weights are not here, or would be converted."""
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
            if ready:
                raise OSError(
                    f"the weights of {name} are not on this machine, and as they are quantized "
                    "already only their files say how they are laid out; put these here, or load "
                    "the model that they were made from with a quantization_config"
                )
            state_dict = absent_weights(model, dtype)
            say(name, f"the weights of {name} are not on this machine: they are zeros")
            NOT_READ.append(name)
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
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)

    module._get_resolved_checkpoint_files = find_here
    module.PreTrainedModel._load_pretrained_model = staticmethod(load_zeros)


def after_stopping(module: Any) -> None:
    """Have texts become as long as was asked for: which token ends one is unknown."""
    plain = module.EosTokenCriteria.__call__

    @functools.wraps(plain)
    def never(self, *args, **options):
        return plain(self, *args, **options).zero_()

    module.EosTokenCriteria.__call__ = never


def absent_weights(model: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return zeros for all that transformers would write of a model as ``model`` is unquantized.

    Whole numbers and booleans are left out: transformers computes what a checkpoint lacks.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        whole = type(model)(copy.deepcopy(model.config))
    tied = whole.all_tied_weights_keys
    names = {name: value for name, value in whole.state_dict().items() if name not in tied}
    return {
        name: zeros(tensor.shape, dtype)
        for name, tensor in revert_weight_conversion(whole, names).items()
        if tensor.is_floating_point()
    }


def zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros on the CPU that take memory only where something is written to them."""
    space = np.zeros(shape.numel() * dtype.itemsize, np.uint8)
    return torch.from_numpy(space).view(dtype).reshape(shape)

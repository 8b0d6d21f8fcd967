"""The techniques of a recipe, each in plain PyTorch: what a training step does differently.

`gpumem.estimation.script` writes the source of some of them into its scripts: these use nothing of
labkit but constants of this module, and InputError.

Limits: decoders of transformers, and PEFT's wrappers of them.
"""

import functools
import importlib
import weakref
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpumem.estimation.recipe import CHUNK_TOKENS, Recipe
from gpumem.inputs import InputError

OPTIMIZERS = {
    "adamw": "torch.optim.AdamW",
    "fused-adamw": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit",
    "paged-adamw8bit": "bitsandbytes.optim.PagedAdamW8bit",
}


def optimizer_of(recipe: Recipe, parameters: Any) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over ``parameters``."""
    module, _, name = OPTIMIZERS[recipe.optimizer].rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    options = {"fused": True} if recipe.optimizer == "fused-adamw" else {}
    return kind(parameters, lr=1e-2 if recipe.optimizer == "sgd" else 1e-4, **options)


def step_in_backward(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """Update ``parameter``, and free its gradient, as soon as the gradient is there.

    The caller keeps the optimizer. The hook only has a weak reference: a parameter that held its
    optimizer, which holds the parameter, would never be freed, since Python's garbage collector
    does not see the hooks that autograd keeps.
    """
    reference = weakref.ref(optimizer)

    def step(_: torch.Tensor) -> None:
        reference().step()
        reference().zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


class HostOptimizer:
    """An optimizer of this ``kind`` in host memory, with a copy of the weights to work on.

    Gradients are copied to the host, the step is done there, and the new weights come back.
    Source of the idea: ZeRO-Offload, https://arxiv.org/abs/2101.06840.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], kind: Any, **options: Any) -> None:
        self.parameters = parameters
        self.copies = [torch.nn.Parameter(p.detach().to("cpu", copy=True)) for p in parameters]
        self.optimizer = kind(self.copies, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the weights on the device: what a gradient scaler looks at."""
        return [{"params": self.parameters}]

    @torch.no_grad()
    def step(self) -> None:
        """One step. Each gradient leaves the device before the next is copied."""
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            if parameter.grad is not None:
                copy.grad = parameter.grad.to("cpu")
                parameter.grad = None
        self.optimizer.step()
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            parameter.copy_(copy)

    def zero_grad(self) -> None:
        for parameter in (*self.parameters, *self.copies):
            parameter.grad = None


def chunked_loss(
    model: torch.nn.Module, ids: torch.Tensor, chunk_tokens: int = CHUNK_TOKENS, **images: Any
) -> torch.Tensor:
    """Return the mean cross-entropy of the next token, logits ``chunk_tokens`` tokens at a time.

    Args:
        model: a causal language model of transformers, or PEFT's wrapper of one.
        ids: [batch, sequence], int64.
        **images: ``pixel_values``, for a vision tower.

    Raises:
        InputError: the model does more to the logits than its output layer and a soft cap.
    """
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    head, cap = output_layer(plain)
    hidden = plain.base_model(input_ids=ids, **images).last_hidden_state[:, :-1]
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1)

    def chunk_loss(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = head(rows)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return functional.cross_entropy(logits.float(), targets, reduction="sum")

    chunks = zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    total = sum(checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks)
    return total / labels.numel()


# Fields of configs by which some models change the logits; 1 or None leaves them alone.
CHANGES_LOGITS = (
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
    "logits_soft_cap",
    "unpadded_vocab_size",
)


def output_layer(plain: Any) -> tuple[torch.nn.Module, float | None]:
    """Return what turns hidden states into logits: a layer, and the soft cap that Gemma 2 has."""
    head, settings = plain.get_output_embeddings(), plain.config
    changed = any(getattr(settings, name, None) not in (None, 1) for name in CHANGES_LOGITS)
    if head is not None:
        known = {id(p) for p in (*plain.base_model.parameters(), *head.parameters())}
        changed = changed or any(id(p) not in known for p in plain.parameters())
    if head is None or changed:
        raise InputError(
            f"{type(plain).__name__} does more to its logits than one layer and a soft cap, so its "
            "loss cannot be computed in chunks: leave chunked_loss out."
        )
    return head, getattr(settings, "final_logit_softcapping", None)


# --- what lives on the host -----------------------------------------------------------------------


def activations_on_host(model: torch.nn.Module) -> saved_tensors_hooks:
    """Return `torch.autograd.graph.save_on_cpu` that leaves the weights where they are.

    Autograd saves a layer's weight too; it is on the device anyway, and need not be copied.
    """
    weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        if tensor.untyped_storage()._cdata in weights:
            return tensor.device, tensor.detach()
        return tensor.device, tensor.detach().to("cpu", copy=True)

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, tensor = packed
        return tensor.to(device)

    return saved_tensors_hooks(pack, unpack)


class FetchedLayer(torch.nn.Module):
    """A layer whose weights stay on the host: each call copies them to the device and frees them.

    The copying is inside the checkpoint. Otherwise backward would need the forward's copies, and
    every layer's would live until then.
    """

    def __init__(self, layer: torch.nn.Module, device: torch.device) -> None:
        super().__init__()
        self.layer, self.device, self.plain = layer, device, layer.forward
        layer.forward = functools.partial(checkpoint, self.fetch_and_call, use_reentrant=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)

    def fetch_and_call(self, *args: Any, **kwargs: Any) -> Any:
        copies = {name: p.to(self.device) for name, p in self.named_parameters()}
        return torch.func.functional_call(self, copies, args, kwargs)


# --- what is shared among GPUs --------------------------------------------------------------------


class Loss(torch.nn.Module):
    """A model with its loss, as one module: sharded weights are gathered for both.

    With ``keeps_outputs`` what the model returned lives until it has returned the next.
    """

    def __init__(self, model: torch.nn.Module, recipe: Recipe, *, keeps_outputs: bool) -> None:
        super().__init__()
        self.model, self.chunked = model, recipe.chunked_loss
        self.keeps_outputs, self.outputs = keeps_outputs, None

    def forward(self, ids: torch.Tensor, **images: torch.Tensor) -> torch.Tensor:
        if self.chunked:
            outputs = loss = chunked_loss(self.model, ids, **images)
        else:
            outputs = self.model(input_ids=ids, labels=ids, **images)
            loss = outputs.loss
        if self.keeps_outputs:
            self.outputs = outputs
        return loss


def shard(module: torch.nn.Module, recipe: Recipe, device: torch.device) -> None:
    """Make ``module`` a unit: every rank stores its share, all gather it whole when it is used.

    Needs a process group of ``recipe.ranks``.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (recipe.ranks,))}
    if recipe.precision == "amp-bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if recipe.offload == "weights":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    fully_shard(module, **options)

"""What the tests and the benchmarks hold to PyTorch's own allocator: recipes and set-ups.

``SMALL_RECIPES`` and ``GPU_RECIPES`` are recipes that between them use every technique, on a tiny
model and at real size. ``HEADLINES`` are jobs that people ask for. ``fits_recipes`` are of all
models of the table of `will_it_fit`.
``SETUPS`` are small training loops written as people write them, with what else the tracker must
understand. ``CAUSES`` says why one of them misses by more than a per cent.

Limits: every recipe of ``GPU_RECIPES`` fits a GPU of 24 GB, by simulation.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig

from gpumem.estimation.recipe import Recipe
from gpumem.estimation.recipes_to_try import least_bytes
from gpumem.estimation.training import training
from gpumem.estimation.weight_shapes import shapes_of
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import Gpu
from gpumem.models.config import find_config
from gpumem.units import format_bytes
from will_it_fit.build import longest_of, ways
from will_it_fit.table import USUAL_LENGTH, table

SETUPS: dict[str, Callable[..., Iterator[torch.Tensor]]] = {}


def setup(name: str) -> Callable:
    def register(experiment: Callable) -> Callable:
        SETUPS[name] = experiment
        return experiment

    return register


#: The model of the small recipes and of most set-ups: three layers, 1.1 million parameters.
TINY = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
}

CAUSES = {
    "convolutions": "its kernels take workspaces, which are no tensors",
}


# --- recipes --------------------------------------------------------------------------------------


def tiny_config() -> LlamaConfig:
    return LlamaConfig(**TINY)


def training_of_lengths(model, recipe: Recipe, lengths: Sequence[int]) -> Callable[..., Iterator]:
    """Return the experiment that trains ``model`` on one batch of each length, in this order."""

    def tokens(config, recipe, device):
        for length in lengths:
            yield torch.randint(config.vocab_size, (recipe.batch_size, length), device=device)

    train = training(model, recipe)

    def experiment(device: torch.device) -> Iterator[torch.Tensor]:
        with mock.patch("gpumem.estimation.training._tokens", tokens):
            yield from train(device)

    return experiment


def _named(recipes: list[tuple[str, Recipe]]) -> dict[str, tuple[str, Recipe]]:
    return {
        f"{model}, {recipe}" if model else str(recipe): (model, recipe) for model, recipe in recipes
    }


def _small(**fields: object) -> tuple[str, Recipe]:
    # Half precision is slow on most CPUs.
    size = {"batch_size": 4, "seq_len": 96}
    if fields.get("precision", "fp32") != "fp32":
        size = {"batch_size": 2, "seq_len": 32}
    return "", Recipe(**(size | fields))


#: Recipes on the tiny model by name; its config is ``tiny_config()``.
SMALL_RECIPES: dict[str, tuple[str, Recipe]] = _named(
    [
        _small(),
        _small(batch_size=8),
        _small(attention="eager"),
        _small(checkpointing=True),
        _small(checkpointing=True, attention="eager", batch_size=8),
        _small(optimizer="fused-adamw"),
        _small(optimizer="sgd"),
        _small(optimizer="sgd", checkpointing=True),
        _small(optimizer="adafactor"),
        _small(optimizer="adamw8bit"),
        _small(optimizer="paged-adamw8bit"),
        _small(optimizer_in_backward=True),
        _small(optimizer_in_backward=True, checkpointing=True),
        _small(accumulate=3),
        _small(accumulate=3, checkpointing=True, optimizer="sgd"),
        _small(chunked_loss=True),
        _small(chunked_loss=True, checkpointing=True, batch_size=16),
        _small(offload="activations"),
        _small(offload="activations", checkpointing=True),
        _small(offload="optimizer"),
        _small(offload="weights", checkpointing=True),
        _small(lora=8),
        _small(lora=8, lora_targets=("q_proj", "v_proj"), checkpointing=True),
        _small(lora=8, offload="weights", checkpointing=True),
        _small(lora=8, quantize="nf4"),
        _small(lora=8, quantize="nf4-double", checkpointing=True),
        _small(lora=8, quantize="int8"),
        _small(precision="bf16"),
        _small(precision="bf16", checkpointing=True, optimizer="sgd"),
        _small(precision="bf16", attention="flash"),
        _small(precision="amp-bf16"),
        _small(precision="amp-bf16", attention="eager", checkpointing=True),
        _small(precision="amp-fp16"),
        _small(precision="amp-fp16", offload="optimizer", accumulate=2),
        _small(
            precision="bf16",
            lora=8,
            quantize="nf4-double",
            checkpointing=True,
            optimizer="paged-adamw8bit",
            chunked_loss=True,
        ),
    ]
)


def _smollm(batch_size: int = 4, **fields: object) -> tuple[str, Recipe]:
    return "SmolLM2-135M", Recipe(batch_size=batch_size, seq_len=1024, **fields)


def _qwen(batch_size: int = 2, **fields: object) -> tuple[str, Recipe]:
    return "Qwen2.5-0.5B", Recipe(batch_size=batch_size, seq_len=1024, **fields)


def _gpt2(**fields: object) -> tuple[str, Recipe]:
    return "GPT-2", Recipe(batch_size=4, seq_len=1024, **fields)


def _llama(size: str, batch_size: int = 1, seq_len: int = 2048, **fields: object):
    return f"Llama-{size}", Recipe(batch_size=batch_size, seq_len=seq_len, **fields)


_QLORA = {
    "precision": "bf16",
    "lora": 16,
    "quantize": "nf4-double",
    "checkpointing": True,
    "optimizer": "paged-adamw8bit",
}
#: Recipes at real size by name, each with its model of the table.
GPU_RECIPES: dict[str, tuple[str, Recipe]] = _named(
    [
        _smollm(),
        _smollm(attention="eager"),
        _smollm(checkpointing=True),
        _smollm(optimizer="sgd"),
        _smollm(optimizer="fused-adamw"),
        _smollm(optimizer="adafactor"),
        _smollm(optimizer_in_backward=True),
        _smollm(offload="activations"),
        _smollm(offload="optimizer"),
        _smollm(precision="amp-bf16"),
        _smollm(precision="amp-bf16", attention="eager"),
        _smollm(precision="amp-bf16", batch_size=16, checkpointing=True, chunked_loss=True),
        _smollm(precision="amp-fp16"),
        _smollm(precision="bf16"),
        _smollm(precision="bf16", attention="flash"),
        _smollm(precision="bf16", attention="eager", checkpointing=True),
        _smollm(precision="bf16", optimizer="adamw8bit"),
        _smollm(precision="bf16", accumulate=4),
        _smollm(precision="bf16", batch_size=8, chunked_loss=True),
        _qwen(precision="amp-bf16"),
        _qwen(precision="amp-fp16", checkpointing=True),
        _qwen(precision="bf16", checkpointing=True, batch_size=4),
        _qwen(precision="bf16", lora=16),
        _qwen(precision="bf16", lora=16, quantize="nf4"),
        _qwen(precision="bf16", lora=16, quantize="int8", checkpointing=True),
        _qwen(precision="bf16", offload="weights", checkpointing=True),
        _qwen(precision="bf16", optimizer="paged-adamw8bit", chunked_loss=True),
        _gpt2(precision="amp-bf16", attention="eager"),
        _gpt2(precision="bf16", lora=16, quantize="nf4"),
        _llama("3.2-1B", seq_len=512, optimizer="sgd"),
        _llama("3.2-1B", precision="bf16", checkpointing=True),
        _llama("3.2-1B", precision="bf16", lora=16, attention="flash"),
        _llama(
            "3.2-1B",
            precision="bf16",
            optimizer="adamw8bit",
            optimizer_in_backward=True,
            checkpointing=True,
            chunked_loss=True,
        ),
        _llama("3.2-1B", batch_size=4, chunked_loss=True, **_QLORA),
        _llama(
            "3.2-3B",
            precision="bf16",
            optimizer="adamw8bit",
            checkpointing=True,
            optimizer_in_backward=True,
            chunked_loss=True,
        ),
        _llama("3.1-8B", chunked_loss=True, **_QLORA),
        # For GPUs without bfloat16, too.
        _smollm(chunked_loss=True),
        _smollm(lora=16),
        _smollm(optimizer="adamw8bit"),
        _smollm(offload="weights", checkpointing=True),
        _smollm(accumulate=2, checkpointing=True, attention="eager"),
        _smollm(
            batch_size=1,
            accumulate=6,
            precision="amp-fp16",
            attention="eager",
            checkpointing=True,
            chunked_loss=True,
        ),
        _smollm(precision="amp-fp16", batch_size=8, checkpointing=True),
        _smollm(precision="amp-fp16", attention="eager"),
        _smollm(precision="amp-fp16", optimizer="fused-adamw", checkpointing=True),
        _smollm(precision="amp-fp16", offload="activations"),
        _smollm(precision="amp-fp16", offload="optimizer", accumulate=2),
        _smollm(precision="amp-fp16", optimizer="paged-adamw8bit", chunked_loss=True),
        _smollm(precision="amp-fp16", lora=16, quantize="nf4", checkpointing=True),
        _smollm(precision="amp-fp16", lora=16, quantize="int8"),
        _gpt2(precision="amp-fp16"),
        _gpt2(optimizer="sgd", checkpointing=True),
        _qwen(precision="amp-fp16", batch_size=1, offload="activations"),
        _qwen(precision="amp-fp16", batch_size=1, lora=16, quantize="nf4-double"),
        # One of several GPUs that share the model.
        _smollm(batch_size=2, ranks=8),
        _smollm(precision="bf16", ranks=8, optimizer="fused-adamw", checkpointing=True),
        _smollm(batch_size=2, ranks=8, accumulate=2, checkpointing=True),
        _smollm(batch_size=2, ranks=2, optimizer="sgd", chunked_loss=True),
        _smollm(precision="amp-bf16", ranks=4, offload="weights"),
        _gpt2(ranks=4, checkpointing=True),
        _qwen(precision="bf16", ranks=4, lora=16),
        _llama("3.2-1B", ranks=4, precision="amp-bf16", checkpointing=True),
        _llama("3.2-1B", ranks=8, precision="bf16", attention="flash", chunked_loss=True),
        _llama("3.2-3B", ranks=8, precision="bf16", checkpointing=True, offload="weights"),
        _llama("3.1-8B", ranks=8, seq_len=1024, precision="bf16", checkpointing=True),
    ]
)


_FRUGAL = {"checkpointing": True, "chunked_loss": True}
_FRUGAL_QLORA = {**_FRUGAL, "lora": 16, "quantize": "nf4-double", "optimizer": "adamw8bit"}
_8B_FULL = {**_FRUGAL, "optimizer": "adafactor", "optimizer_in_backward": True}
_4090, _H100 = (catalogue.gpu(key).budget_bytes for key in ("rtx-4090", "h100"))
_T4 = 15096810045  # 512 MiB less than it has: as recorded, before its CUDA context was measured
_48GB = 47463129088  # 48e9 less the CUDA context; GPUs sold as 48 GB report 44 to 47.5 GiB
_AMP = {"seq_len": 512, "precision": "amp-fp16"}
#: Model, recipe, and how many bytes PyTorch's allocator may take; None for all of the GPU. The
#: batches within a T4's memory are the largest that fit there.
_JOBS: list[tuple[str, Recipe, int | None]] = [
    ("Llama-3.1-8B", Recipe(batch_size=2, precision="bf16", **_8B_FULL), _4090),
    ("Llama-2-70B", Recipe(batch_size=4, seq_len=2048, precision="bf16", **_FRUGAL_QLORA), _H100),
    ("Llama-2-70B", Recipe(precision="bf16", **_FRUGAL_QLORA), _48GB),
    ("SmolLM2-135M", Recipe(batch_size=16, attention="eager"), None),
    (
        "SmolLM2-135M",
        Recipe(accumulate=16, precision="amp-bf16", attention="eager", **_FRUGAL),
        None,
    ),
    (
        "SmolLM2-135M",
        Recipe(accumulate=16, precision="bf16", attention="eager", **_FRUGAL_QLORA),
        None,
    ),
    ("Qwen2.5-0.5B", Recipe(batch_size=3, seq_len=512, attention="eager"), _T4),
    ("Qwen2.5-0.5B", Recipe(batch_size=3, attention="eager", **_AMP), _T4),
    ("Qwen2.5-0.5B", Recipe(batch_size=3, **_AMP), _T4),
    ("Qwen2.5-0.5B", Recipe(batch_size=6, checkpointing=True, **_AMP), _T4),
    ("Qwen2.5-0.5B", Recipe(batch_size=59, **_FRUGAL, **_AMP), _T4),
    ("Qwen2.5-0.5B", Recipe(batch_size=78, optimizer="adamw8bit", **_FRUGAL, **_AMP), _T4),
    ("Llama-3.1-8B", Recipe(seq_len=2048, precision="bf16", checkpointing=True, ranks=8), None),
]
#: The jobs by name.
HEADLINES: dict[str, tuple[str, Recipe, int | None]] = {
    f"{model}{f' within {format_bytes(within)}' if within else ''}, {recipe}": (
        model,
        recipe,
        within,
    )
    for model, recipe, within in _JOBS
}


def fits_recipes(gpu: Gpu) -> dict[str, tuple[str, Recipe]]:
    """Return one row of ``USUAL_LENGTH`` tokens for each model that the table of fits has, in each
    kind of training: as it is, and with all that saves memory on the GPU itself. What ``gpu``
    cannot hold or compute in any case is left out.
    """
    tried = [
        way
        for way in ways()
        if way.checkpointing == way.chunked_loss
        and way.attention != "eager"
        and way.offload == "none"
        and not way.optimizer_in_backward
        and way.ranks in (1, 4)
        and (way.precision == "amp-fp16") != gpu.bf16_native
    ]
    found = []
    for name in table().models:
        config = find_config(name)[1]
        length = min(USUAL_LENGTH, longest_of(config))
        for way in tried:
            if least_bytes(way, shapes_of(config), way.ranks) < gpu.budget_bytes:
                found.append((name, way.but(batch_size=1, seq_len=length)))
    return _named(found)


# --- set-ups --------------------------------------------------------------------------------------


def llama(
    device: torch.device,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
) -> nn.Module:
    config = LlamaConfig(**TINY, use_cache=False, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model.to(device).train()


def checkpointed(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def train(
    model: nn.Module,
    device: torch.device,
    *,
    optimizer: Callable = torch.optim.AdamW,
    batch_size: int = 4,
    length: int = 96,
    amp: bool = False,
    steps: int = 3,
) -> Iterator[torch.Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    stepper = optimizer(trained, lr=1e-3)
    for _ in range(steps):
        tokens = torch.randint(0, 2048, (batch_size, length), device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        yield loss


@setup("fp32, SDPA, AdamW")
def baseline(device):
    yield from train(llama(device), device)


@setup("eager attention")
def eager(device):
    yield from train(llama(device, attention="eager"), device)


@setup("SGD")
def sgd(device):
    yield from train(llama(device), device, optimizer=torch.optim.SGD)


@setup("Adafactor")
def adafactor(device):
    yield from train(llama(device), device, optimizer=torch.optim.Adafactor)


@setup("AdamW, foreach")
def foreach(device):
    def optimizer(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, foreach=True)

    yield from train(llama(device), device, optimizer=optimizer)


@setup("autocast bf16")
def autocast(device):
    yield from train(llama(device), device, amp=True, batch_size=2, length=32)


@setup("pure bf16")
def pure_bf16(device):
    model = llama(device, dtype=torch.bfloat16)
    yield from train(model, device, batch_size=2, length=32)


@setup("checkpointing")
def checkpointing(device):
    yield from train(checkpointed(llama(device)), device)


@setup("checkpointing, SGD, eager")
def checkpointing_sgd(device):
    model = checkpointed(llama(device, attention="eager"))
    yield from train(model, device, optimizer=torch.optim.SGD)


@setup("frozen lower half")
def frozen(device):
    model = llama(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.2" in name or "lm_head" in name
    yield from train(model, device)


@setup("LoRA")
def lora(device):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    yield from train(get_peft_model(llama(device), config), device)


@setup("tied embeddings")
def tied(device):
    yield from train(llama(device, tied=True), device)


@setup("gradient accumulation")
def accumulation(device):
    model = llama(device)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        for _ in range(3):
            tokens = torch.randint(0, 2048, (2, 96), device=device)
            loss = model(input_ids=tokens, labels=tokens).loss / 3
            loss.backward()
        stepper.step()
        stepper.zero_grad()
        yield loss


@setup("in-place operations")
def in_place(device):
    model = nn.Sequential(
        nn.Linear(256, 512),
        nn.ReLU(inplace=True),
        nn.Linear(512, 512),
        nn.ReLU(inplace=True),
        nn.Linear(512, 10),
    ).to(device)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x = torch.randn(256, 256, device=device)
        logits = model(x.mul_(0.5).add_(1.0))
        loss = F.cross_entropy(logits, torch.randint(0, 10, (256,), device=device))
        stepper.zero_grad(set_to_none=False)
        loss.backward()
        stepper.step()
        yield loss


@setup("views and slices")
def views(device):
    mixed = nn.Linear(192, 3 * 192).to(device)
    out = nn.Linear(192, 192).to(device)
    stepper = torch.optim.AdamW([*mixed.parameters(), *out.parameters()], lr=1e-3)
    for _ in range(3):
        x = torch.randn(8, 64, 192, device=device)
        q, k, v = mixed(x).view(8, 64, 3, 6, 32).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        y = out(y.transpose(1, 2).reshape(8, 64, 192))
        loss = (y[:, 1:] - x[:, :-1]).square().mean()
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        yield loss


@setup("two models at once")
def two_models(device):
    teacher, student = llama(device).eval(), llama(device)
    stepper = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for _ in range(3):
        tokens = torch.randint(0, 2048, (4, 96), device=device)
        with torch.no_grad():
            target = teacher(input_ids=tokens).logits
        # Not F.mse_loss: its scalar keeps a buffer of the inputs' size, which fake tensors lack.
        loss = (student(input_ids=tokens).logits - target).square().mean()
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        yield loss


@setup("convolutions")
def convolutions(device):
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.GELU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).to(device)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        x = torch.randn(8, 3, 32, 32, device=device)
        loss = F.cross_entropy(model(x), torch.randint(0, 10, (8,), device=device))
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        yield loss

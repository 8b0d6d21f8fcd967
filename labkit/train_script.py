"""A recipe as a training script of its own: transformers, PEFT, bitsandbytes and a plain loop.

The script holds what its recipe needs and nothing else, and imports nothing of labkit. It trains
on a text file and saves the model, or its adapters. A file that exists is never overwritten.

Where GPUs share the model, `labkit.cluster_script` writes it.

Limits: one GPU else. The learning rate is constant, and a starting point: what suits depends on the
model and the text. Nothing is evaluated and no checkpoint is kept on the way.
"""

import re
from pathlib import Path
from textwrap import fill
from typing import Any

from labkit import cluster_script, script_parts
from labkit.memory import InputError, format_bytes
from labkit.model_source import find_config
from labkit.models import autocast_dtype, dtype_of
from labkit.recipes import Recipe

_DEFINES = ("def ", "class ", "@")


def write_script(
    path: str | Path, recipe: Recipe, *, model: Any, needed_bytes: int | None = None, gpu: str = ""
) -> Path:
    """Write the script of ``recipe`` to ``path``, a new file. Other arguments as `script`.

    Raises:
        InputError: the file exists or cannot be written.
    """
    path = Path(path)
    text = script(recipe, model=model, needed_bytes=needed_bytes, gpu=gpu)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise InputError(
            f"{path} exists, and a script you may have changed is not overwritten: "
            "name another file"
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    return path


def script(recipe: Recipe, *, model: Any, needed_bytes: int | None = None, gpu: str = "") -> str:
    """The text of a script that trains by ``recipe``.

    Args:
        recipe: how to train.
        model: what the script loads by default: a model of the table, a folder, a hub id. Of a
            config, whose weights nobody knows, the script asks with ``--model``.
        needed_bytes: what the recipe is expected to take on ``gpu``, for the heading.
        gpu: the card's name.
    """
    heading = _heading(recipe, model, needed_bytes, gpu)
    if recipe.ranks > 1:
        parts = cluster_script.parts(recipe, model)
    else:
        arguments = script_parts.arguments(recipe, model, out="folder for the result")
        parts = [
            _imports(recipe), arguments + _DEVICE, script_parts.TEXT, _model(recipe),
            _adapters(recipe), _host_weights(recipe), _loss(recipe), _host_activations(recipe),
            _optimizer(recipe), script_parts.with_attention(recipe, _loop(recipe)), _END,
        ]  # fmt: skip
    return _joined([part.strip("\n") for part in (heading, *parts) if part])


def _joined(parts: list[str]) -> str:
    """The parts with a blank line between them, two around functions and classes."""
    text = parts[0]
    for part in parts[1:]:
        above = [line for line in text.splitlines() if line and not line.startswith(" ")][-1]
        defining = above.startswith(_DEFINES) or part.startswith(_DEFINES)
        text += ("\n\n\n" if defining else "\n\n") + part
    return text + "\n"


def _heading(recipe: Recipe, model: Any, needed_bytes: int | None, gpu: str) -> str:
    packages = ["torch", "transformers"] + ["peft"] * bool(recipe.lora)
    packages += ["bitsandbytes"] * ("8bit" in recipe.optimizer or bool(recipe.quantize))
    packages += ["accelerate"] * bool(recipe.quantize)
    expected = f" Expected on {gpu}: {format_bytes(needed_bytes)}." if needed_bytes else ""
    name = re.sub(r"[^\w ./:-]", "", find_config(model)[0])
    title = fill(f'"""Train {name}: {recipe}.', 98)
    return f'''{title}

Written by GPU Memory Lab's labkit.{expected}
    pip install {" ".join(packages)}
    {_start(recipe)}
"""'''


def _start(recipe: Recipe) -> str:
    if recipe.ranks == 1:
        return "python THIS_FILE my.txt"
    return f"""torchrun --nproc-per-node {recipe.ranks} THIS_FILE my.txt
On M machines with G GPUs each, on every one of them:
    torchrun --nnodes M --nproc-per-node G --rdzv-backend c10d --rdzv-id my-run \\
        --rdzv-endpoint FIRST_MACHINE:29500 THIS_FILE my.txt
Started again, it goes on after its last checkpoint. A checkpoint folder is a program, as loading
it unpickles its .metadata: go on only after one that you wrote."""


def _imports(recipe: Recipe) -> str:
    names = ["AutoModelForCausalLM", "AutoTokenizer"]
    names += ["BitsAndBytesConfig"] * bool(recipe.quantize)
    checkpoints = recipe.chunked_loss or recipe.offload == "weights"
    return script_parts.imports({
        "import argparse": True,
        "import functools": recipe.offload == "weights",
        "import sys": True,
        "from pathlib import Path": True,
        "": True,
        "import bitsandbytes": recipe.optimizer.endswith("8bit"),
        "import torch": True,
        "from peft import LoraConfig, get_peft_model": recipe.lora,
        "from torch.autograd.graph import saved_tensors_hooks": recipe.offload == "activations",
        "from torch.nn.attention import SDPBackend, sdpa_kernel": recipe.attention == "flash",
        "from torch.utils.checkpoint import checkpoint": checkpoints,
        f"from transformers import {', '.join(names)}": True,
    })  # fmt: skip


_DEVICE = 'device = "cuda" if torch.cuda.is_available() else "cpu"\n'


def _model(recipe: Recipe) -> str:
    attention = "eager" if recipe.attention == "eager" else "sdpa"
    options = [f"dtype={dtype_of(recipe.precision)}", f'attn_implementation="{attention}"']
    text, move = "", ".to(device)" if recipe.offload != "weights" else ""
    if recipe.quantize:
        text += _quantising(recipe)
        options += ["quantization_config=packed", 'device_map={"": device}']
        move = ""
    lines = "".join(f"\n    {option}," for option in options)
    text += f"model = AutoModelForCausalLM.from_pretrained(\n    args.model,{lines}\n){move}\n"
    text += "model.config.use_cache = False\nmodel.train()\n"
    if recipe.checkpointing and recipe.offload != "weights":
        text += script_parts.CHECKPOINTING
    return "\n" + text


def _quantising(recipe: Recipe) -> str:
    if recipe.quantize == "int8":
        return "packed = BitsAndBytesConfig(load_in_8bit=True)\n"
    computed_in = autocast_dtype(recipe.precision) or dtype_of(recipe.precision)
    return (
        "packed = BitsAndBytesConfig(\n    load_in_4bit=True,\n"
        '    bnb_4bit_quant_type="nf4",\n'
        f"    bnb_4bit_use_double_quant={recipe.quantize == 'nf4-double'},\n"
        f"    bnb_4bit_compute_dtype={computed_in},\n)\n"
    )


def _adapters(recipe: Recipe) -> str:
    if not recipe.lora:
        return ""
    return f"""
# Only adapters are trained.
lora = {script_parts.adapters(recipe)}
model = get_peft_model(model, lora)
"""


def _host_weights(recipe: Recipe) -> str:
    return _HOST_WEIGHTS if recipe.offload == "weights" else ""


_HOST_WEIGHTS = '''
# The layers' weights stay in host memory; all else goes to the device.
depth, lists = model.config.num_hidden_layers, torch.nn.ModuleList
layers = next(m for m in model.modules() if isinstance(m, lists) and len(m) == depth)
on_host = {id(parameter) for parameter in layers.parameters()}
for tensor in (*model.parameters(), *model.buffers()):
    if id(tensor) not in on_host:
        tensor.data = tensor.data.to(device)


class Fetched(torch.nn.Module):
    """Each call of a layer copies its weights to the device, in forward and again in backward."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.plain = layer, layer.forward
        layer.forward = functools.partial(checkpoint, self.fetch_and_call, use_reentrant=False)

    def forward(self, *args, **kwargs):
        return self.plain(*args, **kwargs)

    def fetch_and_call(self, *args, **kwargs):
        copies = {name: p.to(device) for name, p in self.named_parameters()}
        return torch.func.functional_call(self, copies, args, kwargs)


for layer in layers:
    Fetched(layer)
'''


def _loss(recipe: Recipe) -> str:
    if not recipe.chunked_loss:
        return ""
    plain = "model.get_base_model()" if recipe.lora else "model"
    return f"plain = {plain}{script_parts.chunked_loss(recipe)}"


def _host_activations(recipe: Recipe) -> str:
    return _HOST_ACTIVATIONS if recipe.offload == "activations" else ""


_HOST_ACTIVATIONS = """

# What autograd saves for backward waits in host memory; the weights among it stay.
weights = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}


def pack(tensor):
    if tensor.untyped_storage()._cdata in weights:
        return tensor.device, tensor.detach()
    return tensor.device, tensor.detach().to("cpu", copy=True)


def unpack(packed):
    return packed[1].to(packed[0])


"""


def _optimizer(recipe: Recipe) -> str:
    text = "trained = [p for p in model.parameters() if p.requires_grad]\n"
    if recipe.optimizer_in_backward:
        text += _IN_BACKWARD.replace("NEW", script_parts.new_optimizer(recipe, "[parameter]"))
    elif recipe.offload == "optimizer":
        text += _HOST_OPTIMIZER.replace("NEW", script_parts.new_optimizer(recipe, "copies"))
    else:
        text += f"optimizer = {script_parts.new_optimizer(recipe, 'trained')}\n"
    if recipe.precision == "amp-fp16":
        text += "scaler = torch.amp.GradScaler(device)  # float16 gradients would vanish\n"
    return "\n" + text


_IN_BACKWARD = '''

def step_in_backward(parameter):
    """Update a weight and free its gradient as soon as backward has made it."""
    optimizer = NEW

    def step(_):
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)


for parameter in trained:
    step_in_backward(parameter)
'''

_HOST_OPTIMIZER = '''

class HostOptimizer:
    """Gradients go to the host, one by one; the step is done there; the weights come back."""

    def __init__(self, parameters):
        self.param_groups = [{"params": parameters}]
        self.pairs = [(p, torch.nn.Parameter(p.detach().to("cpu", copy=True))) for p in parameters]
        copies = [copy for _, copy in self.pairs]
        self.optimizer = NEW

    @torch.no_grad()
    def step(self):
        for parameter, copy in self.pairs:
            if parameter.grad is not None:
                copy.grad = parameter.grad.to("cpu")
                parameter.grad = None
        self.optimizer.step()
        for parameter, copy in self.pairs:
            parameter.copy_(copy)

    def zero_grad(self):
        self.optimizer.zero_grad()
        for parameter, _ in self.pairs:
            parameter.grad = None


optimizer = HostOptimizer(trained)
'''


def _loop(recipe: Recipe) -> str:
    loss = "chunked_loss(ids)" if recipe.chunked_loss else "model(input_ids=ids, labels=ids).loss"
    contexts = []
    if recipe.offload == "activations":
        contexts.append("saved_tensors_hooks(pack, unpack)")
    if computed_in := autocast_dtype(recipe.precision):
        contexts.append(f"torch.autocast(device, dtype={computed_in})")
    body = ["ids = rows[torch.randint(len(rows), (BATCH_SIZE,))].to(device)"]
    if contexts:
        body.append(f"with {', '.join(contexts)}:")
    body.append(f"{'    ' * bool(contexts)}loss = {loss}")
    backward = "loss / ACCUMULATE" if recipe.accumulate > 1 else "loss"
    if recipe.precision == "amp-fp16":
        backward = f"scaler.scale({backward})"
    elif recipe.accumulate > 1:
        backward = f"({backward})"
    body.append(f"{backward}.backward()")
    if recipe.accumulate > 1:
        body = ["for _ in range(ACCUMULATE):", *("    " + line for line in body)]
    body += _step(recipe)
    lines = "".join(f"    {line}\n" for line in body)
    return f"torch.manual_seed(0)\nfor step in range(1, args.steps + 1):\n{lines}"


def _step(recipe: Recipe) -> list[str]:
    if recipe.optimizer_in_backward:
        return [_PRINT]
    if recipe.precision == "amp-fp16":
        return ["scaler.step(optimizer)", "scaler.update()", "optimizer.zero_grad()", _PRINT]
    return ["optimizer.step()", "optimizer.zero_grad()", _PRINT]


_PRINT = 'print(f"step {step}: loss {loss.item():.4f}", flush=True)'
_END = """
if device == "cuda":
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"peak: {peak / 2**30:.2f} GiB allocated, {held / 2**30:.2f} GiB reserved")
model.save_pretrained(args.out)
tokenizer.save_pretrained(args.out)
print(f"saved to {args.out}")
"""

"""A sharded recipe as a training script: ``torchrun`` starts it on one machine, or on many.

Every rank has the model without memory. Rank 0 alone reads the weights, and the others get their
parts of them. A checkpoint is written in parts, too, and a run that is started again goes on after
its last complete one, with as many ranks as there are then.

Limits: the learning rate is constant, nothing is evaluated, and a checkpoint is never removed.
"""

from labkit.models import dtype_of
from labkit.recipes import ALL_LINEAR, CHUNK_TOKENS, Recipe


def parts(recipe: Recipe, *, default: str, rate: float, optimizer: str, text: str) -> list[str]:
    """The script's parts, without its heading.

    Args:
        recipe: how to train; ``ranks`` are those of the run that starts it.
        default: the option by which the script knows its model.
        rate: the learning rate.
        optimizer: what makes the optimizer of the list ``trained``.
        text: what turns a text file into ``rows``.
    """
    return [
        _imports(recipe), _arguments(recipe, default, rate), _GROUP, text, _model(recipe),
        _loss(recipe), _UNITS.format(options=_options(recipe)), _WEIGHTS,
        _OPTIMIZER.format(new=optimizer), _CHECKPOINTS, _loop(recipe), _END,
    ]  # fmt: skip


def _imports(recipe: Recipe) -> str:
    policies = ["CPUOffloadPolicy"] * (recipe.offload == "weights")
    policies += ["MixedPrecisionPolicy"] * (recipe.precision == "amp-bf16")
    lines = {
        "import argparse": True,
        "import os": True,
        "import sys": True,
        "from pathlib import Path": True,
        "": True,
        "import torch": True,
        "import torch.distributed as dist": True,
        "import torch.distributed.checkpoint as dcp": True,
        "from peft import LoraConfig, get_peft_model": recipe.lora,
        "from torch.distributed.checkpoint import state_dict as parts": True,
        "from torch.distributed.device_mesh import init_device_mesh": True,
        f"from torch.distributed.fsdp import {', '.join([*policies, 'fully_shard'])}": True,
        "from torch.nn.attention import SDPBackend, sdpa_kernel": recipe.attention == "flash",
        "from torch.utils.checkpoint import checkpoint": recipe.chunked_loss,
        "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer": True,
    }
    return "\n".join(line for line, needed in lines.items() if needed) + "\n"


def _arguments(recipe: Recipe, default: str, rate: float) -> str:
    accumulate = f"\nACCUMULATE = {recipe.accumulate}" if recipe.accumulate > 1 else ""
    return f"""
BATCH_SIZE, SEQ_LEN = {recipe.batch_size}, {recipe.seq_len}  # of each GPU{accumulate}

parser = argparse.ArgumentParser()
parser.add_argument("text", help="a text file to train on")
parser.add_argument("--model", {default})  # folder or hub id
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--lr", type=float, default={rate!r}, help="learning rate")
parser.add_argument("--out", default="trained", help="folder for checkpoints and the result")
parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
args = parser.parse_args()
"""


_GROUP = """
if "RANK" not in os.environ:
    sys.exit("start it with torchrun, as its first lines say")
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
"""


def _model(recipe: Recipe) -> str:
    attention = "eager" if recipe.attention == "eager" else "sdpa"
    kind = f'{{"dtype": {dtype_of(recipe.precision)}, "attn_implementation": "{attention}"}}'
    targets = ALL_LINEAR[0] if recipe.lora_targets == ALL_LINEAR else list(recipe.lora_targets)
    lora = f"LoraConfig(r={recipe.lora}, target_modules={targets!r}, "
    lora = lora.replace("'", '"') + 'task_type="CAUSAL_LM")'
    text = f"""
# The model without memory. Rank 0 alone reads the weights.
kind = {kind}
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), **kind)
model.config.use_cache = False
model.train()
plain, weights, buffers = model, {{}}, {{}}
"""
    if recipe.checkpointing:
        text += """
# Every layer's activations are recomputed in backward (transformers 5.23 renamed the switch).
switch = getattr(model, "activation_checkpointing_enable", None)
(switch or model.gradient_checkpointing_enable)({"use_reentrant": False})
"""
    if recipe.lora:
        text += f"""
# Only adapters are trained.
lora = {lora}
with torch.device("meta"):
    model = get_peft_model(model, lora)
"""
    adapted = "\n    whole = get_peft_model(whole, lora)" if recipe.lora else ""
    return (
        text
        + f"""
if rank == 0:
    whole = AutoModelForCausalLM.from_pretrained(args.model, **kind){adapted}
    weights, buffers = whole.state_dict(), dict(whole.named_buffers())
"""
    )


def _loss(recipe: Recipe) -> str:
    if not recipe.chunked_loss:
        return _LOSS.format(loss="model(input_ids=ids, labels=ids).loss")
    return f'''

def chunked_loss(ids):
    """Mean cross-entropy of the next token; logits exist for a piece of the batch at a time."""
    hidden = plain.base_model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    labels, head = ids[:, 1:].flatten(), plain.get_output_embeddings()

    def piece(rows, targets):
        return torch.nn.functional.cross_entropy(head(rows).float(), targets, reduction="sum")

    pieces = zip(hidden.split({CHUNK_TOKENS}), labels.split({CHUNK_TOKENS}), strict=True)
    return sum(checkpoint(piece, *pair, use_reentrant=False) for pair in pieces) / labels.numel()
''' + _LOSS.format(loss="chunked_loss(ids)")


_LOSS = '''

class Loss(torch.nn.Module):
    """The model with its loss: the outermost unit, whose weights are there for all of it."""

    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return {loss}


'''


def _options(recipe: Recipe) -> str:
    options = ['"mesh": init_device_mesh(device.type, (ranks,))']
    if recipe.precision == "amp-bf16":
        options.append('"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)')
    if recipe.offload == "weights":
        options.append('"offload_policy": CPUOffloadPolicy(pin_memory=on_gpu)')
    if len(options) == 1:
        return f"{{{options[0]}}}"
    return "{" + "".join(f"\n    {option}," for option in options) + "\n}"


_UNITS = """
# Units that are gathered when they are used: the layers, the embedding if it is not tied to the
# output, and the rest. Each gets memory on the device, and is cut up before the next does.
depth, lists = plain.config.num_hidden_layers, torch.nn.ModuleList
layers = next(m for m in model.modules() if isinstance(m, lists) and len(m) == depth)
embedding, output = plain.get_input_embeddings(), plain.get_output_embeddings()
tied = output is not None and output.weight is embedding.weight
options = {options}
loss_of = Loss()
for unit in (*layers, *[embedding] * (not tied), loss_of):
    for module in unit.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            module.to_empty(device=device, recurse=False)
    if unit is loss_of and tied:
        plain.tie_weights()
    fully_shard(unit, **options)
"""

_WEIGHTS = """
from_first = parts.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
parts.set_model_state_dict(model, weights, options=from_first)
for name, buffer in model.named_buffers():  # tables of positions, which are in no file
    if rank == 0:
        buffer.copy_(buffers[name])
    dist.broadcast(buffer, 0)
whole = weights = buffers = None
"""

_OPTIMIZER = """
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = {new}
"""

_CHECKPOINTS = """
# A run that is started again goes on after its last complete checkpoint.
complete = [int(path.parent.name[5:]) for path in Path(args.out).glob("step-*/.metadata")]
done = max(complete, default=0)
if done:
    state = dict(zip(("model", "optimizer"), parts.get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=Path(args.out, f"step-{done}"))
    parts.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
"""


def _loop(recipe: Recipe) -> str:
    many = recipe.accumulate > 1
    context = ""
    if recipe.attention == "flash":
        context = "with sdpa_kernel(SDPBackend.FLASH_ATTENTION):\n"
    body = ["ids = rows[torch.randint(len(rows), (BATCH_SIZE,), generator=drawing)]"]
    body += ["if step <= done:", "    continue  # drawn all the same: what follows stays the same"]
    body += [context + ("    " if context else "") + "loss = loss_of(ids.to(device))"]
    body += ["(loss / ACCUMULATE).backward()" if many else "loss.backward()"]
    if many:
        body = ["for _ in range(ACCUMULATE):", *(f"    {line}" for line in _lines(body))]
    else:
        body = _lines(body)
    body += _lines(_STEP.splitlines())
    if many:
        body.insert(body.index("optimizer.step()"), "if step <= done:\n    continue")
        body = _lines(body)
    inner = "".join(f"    {line}\n" if line else "\n" for line in body)
    return (
        "\ndrawing = torch.Generator().manual_seed(rank)  # each rank has rows of its own\n"
        f"for step in range(1, args.steps + 1):\n{inner}"
    )


def _lines(pieces: list[str]) -> list[str]:
    return [line for piece in pieces for line in piece.split("\n")]


_STEP = """optimizer.step()
optimizer.zero_grad()
mean = loss.detach() / ranks
dist.all_reduce(mean)
if rank == 0:
    print(f"step {step}: loss {mean.item():.4f}", flush=True)
if step % args.save_every == 0:
    state = parts.get_state_dict(model, optimizer)
    state = dict(zip(("model", "optimizer"), state, strict=True))
    dcp.save(state, checkpoint_id=Path(args.out, f"step-{step}"))"""

_END = """
gathered = parts.StateDictOptions(full_state_dict=True, cpu_offload=True)
weights = parts.get_model_state_dict(model, options=gathered)
if rank == 0:
    if on_gpu:
        peak, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(f"peak: {peak / 2**30:.2f} GiB allocated, {held / 2**30:.2f} GiB reserved")
    model.save_pretrained(args.out, state_dict=weights)
    tokenizer.save_pretrained(args.out)
    print(f"saved to {args.out}")
dist.barrier()  # nobody leaves while another still talks
dist.destroy_process_group()
"""

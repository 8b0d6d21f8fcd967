"""A sharded recipe as a training script: ``torchrun`` starts it on one machine, or on many.

Every rank has the model without memory. Rank 0 alone reads the weights, and the others get their
parts of them. A checkpoint is written in parts, too, and a run that is started again goes on after
its last complete one, with as many ranks as there are then.

Limits: the learning rate is constant, nothing is evaluated, and a checkpoint is never removed.
Loading one runs what its `.metadata` holds, a pickle: the script's heading says so.
"""

from textwrap import indent
from typing import Any

from labkit import script_parts
from labkit.models import dtype_of
from labkit.recipes import Recipe


def parts(recipe: Recipe, model: Any) -> list[str]:
    """The script's parts, without its heading. Arguments as `labkit.train_script.script`."""
    arguments = script_parts.arguments(
        recipe, model, shape="  # of each GPU", out="folder for checkpoints and the result",
        more=_SAVE_EVERY,
    )  # fmt: skip
    return [
        _imports(recipe), arguments, _GROUP, script_parts.TEXT, _model(recipe),
        script_parts.chunked_loss(recipe), _loss(recipe), _UNITS.format(options=_options(recipe)),
        _WEIGHTS, _OPTIMIZER.format(new=script_parts.new_optimizer(recipe, "trained")),
        _CHECKPOINTS, _DRAWING, script_parts.with_attention(recipe, _loop(recipe)), _END,
    ]  # fmt: skip


def _imports(recipe: Recipe) -> str:
    policies = ["CPUOffloadPolicy"] * (recipe.offload == "weights")
    policies += ["MixedPrecisionPolicy"] * (recipe.precision == "amp-bf16")
    return script_parts.imports({
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
    })  # fmt: skip


_SAVE_EVERY = """\
parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints; 0: none")
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
        text += script_parts.CHECKPOINTING
    if recipe.lora:
        text += f"""
# Only adapters are trained.
lora = {script_parts.adapters(recipe)}
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
    chunked = "chunked_loss(ids)"
    return _LOSS.format(
        loss=chunked if recipe.chunked_loss else "model(input_ids=ids, labels=ids).loss"
    )


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
# A run that is started again goes on after its last complete checkpoint: the one that rank 0 sees.
complete = [int(path.parent.name[5:]) for path in Path(args.out).glob("step-*/.metadata")]
last = [max(complete, default=0)]
dist.broadcast_object_list(last, device=torch.device("cpu"))
done = last[0]
if done:
    state = dict(zip(("model", "optimizer"), parts.get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=Path(args.out, f"step-{done}"))
    parts.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
"""


def _loop(recipe: Recipe) -> str:
    shape, passes = "(BATCH_SIZE,)", _ONE_PASS
    if recipe.accumulate > 1:
        shape, passes = "(ACCUMULATE, BATCH_SIZE)", _PASSES
    return _LOOP.format(shape=shape, passes=indent(passes, "    "))


_ONE_PASS = """loss = loss_of(rows[drawn].to(device))
loss.backward()"""
_PASSES = """for some in drawn:
    loss = loss_of(rows[some].to(device))
    (loss / ACCUMULATE).backward()"""

_DRAWING = "drawing = torch.Generator().manual_seed(rank)  # each rank has rows of its own"
_LOOP = """\
for step in range(1, args.steps + 1):
    drawn = torch.randint(len(rows), {shape}, generator=drawing)
    if step <= done:
        continue  # drawn all the same: what follows stays the same
{passes}
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {{step}}: loss {{mean.item():.4f}}", flush=True)
    if args.save_every and step % args.save_every == 0:
        state = parts.get_state_dict(model, optimizer)
        state = dict(zip(("model", "optimizer"), state, strict=True))
        dcp.save(state, checkpoint_id=Path(args.out, f"step-{{step}}"))
"""

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

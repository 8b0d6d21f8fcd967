"""What training scripts for one GPU and for several have in common, as text.

Limits: as for the scripts, `labkit.train_script` and `labkit.cluster_script`.
"""

import json
import re
from pathlib import Path
from textwrap import indent
from typing import Any

from labkit.model_source import find_config
from labkit.models import MODELS
from labkit.recipes import ALL_LINEAR, CHUNK_TOKENS, Recipe
from labkit.techniques import CHANGES_LOGITS

_RATES = {"sgd": 1e-2}
_FULL_RATE, _LORA_RATE = 2e-5, 2e-4
_HUB_PAGE = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)")


def imports(lines: dict[str, object]) -> str:
    """Those lines whose value is true."""
    return "\n".join(line for line, needed in lines.items() if needed) + "\n"


def arguments(recipe: Recipe, model: Any, *, shape: str = "", out: str, more: str = "") -> str:
    """The shape of a batch, and the command line.

    Args:
        recipe: how to train.
        model: what the script trains by default, as for `labkit.train_script.script`.
        shape: a comment on the batch.
        out: what the folder ``--out`` is for.
        more: further options, whole lines.
    """
    accumulate = f"\nACCUMULATE = {recipe.accumulate}" if recipe.accumulate > 1 else ""
    default = weights_of(model)
    known = f"default={json.dumps(default, ensure_ascii=False)}" if default else "required=True"
    rate = _RATES.get(recipe.optimizer, _LORA_RATE if recipe.lora else _FULL_RATE)
    return f"""
BATCH_SIZE, SEQ_LEN = {recipe.batch_size}, {recipe.seq_len}{shape}{accumulate}

parser = argparse.ArgumentParser()
parser.add_argument("text", help="a text file to train on")
parser.add_argument("--model", {known})  # folder or hub id
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--lr", type=float, default={rate!r}, help="learning rate")
parser.add_argument("--out", default="trained", help="{out}")
{more}args = parser.parse_args()
"""


def weights_of(model: Any) -> str | None:
    """Where the weights of ``model`` are: a hub id or a folder; None where nobody has them."""
    name = find_config(model)[0]
    if not isinstance(model, str | Path):
        return None
    if name in MODELS and str(model).lower() == name.lower():
        page = _HUB_PAGE.search(MODELS[name].source)
        return page[1] if page else None
    path = Path(model).expanduser()
    return str(path.resolve().parent if path.is_file() else path) if path.exists() else str(model)


TEXT = """
# The text as rows of SEQ_LEN tokens.
tokenizer = AutoTokenizer.from_pretrained(args.model)
tokens = tokenizer(Path(args.text).read_text(encoding="utf-8"), verbose=False)["input_ids"]
rows = torch.tensor(tokens[: len(tokens) // SEQ_LEN * SEQ_LEN]).view(-1, SEQ_LEN)
if not len(rows):
    sys.exit(f"{args.text} has {len(tokens)} tokens, and one row needs {SEQ_LEN}")
"""

CHECKPOINTING = """
# Every layer's activations are recomputed in backward (transformers 5.23 renamed the switch).
switch = getattr(model, "activation_checkpointing_enable", None)
(switch or model.gradient_checkpointing_enable)({"use_reentrant": False})
"""


def adapters(recipe: Recipe) -> str:
    """PEFT's settings for the recipe's LoRA. Names of layers stay names, whatever is in them."""
    all_of_them = recipe.lora_targets == ALL_LINEAR
    targets = json.dumps(ALL_LINEAR[0] if all_of_them else list(recipe.lora_targets))
    return f'LoraConfig(r={recipe.lora}, target_modules={targets}, task_type="CAUSAL_LM")'


def chunked_loss(recipe: Recipe) -> str:
    """The function ``chunked_loss`` of a model ``plain``; empty if the recipe does without."""
    if not recipe.chunked_loss:
        return ""
    names = indent(",\n".join(map(json.dumps, CHANGES_LOGITS)), "    ")
    return f'''
changed = (
{names},
)
if any(getattr(plain.config, name, None) not in (None, 1) for name in changed):
    sys.exit("this model changes its logits in a way that the chunked loss does not know")


def chunked_loss(ids):
    """Mean cross-entropy of the next token; logits exist for a piece of the batch at a time."""
    hidden = plain.base_model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    labels, head = ids[:, 1:].flatten(), plain.get_output_embeddings()
    cap = getattr(plain.config, "final_logit_softcapping", None)  # of Gemma 2

    def piece(rows, targets):
        logits = head(rows)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")

    pieces = zip(hidden.split({CHUNK_TOKENS}), labels.split({CHUNK_TOKENS}), strict=True)
    return sum(checkpoint(piece, *pair, use_reentrant=False) for pair in pieces) / labels.numel()


'''


def new_optimizer(recipe: Recipe, parameters: str) -> str:
    """The call that makes the optimizer of the list ``parameters``."""
    home, kind = {
        "adamw": ("torch", "AdamW"), "sgd": ("torch", "SGD"), "adafactor": ("torch", "Adafactor"),
        "adamw8bit": ("bitsandbytes", "AdamW8bit"),
        "paged-adamw8bit": ("bitsandbytes", "PagedAdamW8bit"),
    }[recipe.optimizer]  # fmt: skip
    return f"{home}.optim.{kind}({parameters}, lr=args.lr)"


def with_attention(recipe: Recipe, loop: str) -> str:
    """The whole loop, under the recipe's kernel: checkpoints run attention again in backward."""
    if recipe.attention != "flash":
        return loop
    return "with sdpa_kernel(SDPBackend.FLASH_ATTENTION):\n" + indent(loop, "    ")

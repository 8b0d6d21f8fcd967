"""A tokenizer that stands in for one that is not on this machine, so that a script can be judged.

It splits by pairs of bytes learned from Python's own library, has as many ids as the model's config
says, and the same ids for the beginning, the end and padding.

Limits: a text comes out longer, the less it resembles English or code the more. Tokens have
other ids and names than the model's own, and the chat template is a plain one.
"""

import functools
import json
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoConfig, PreTrainedTokenizerFast

from gpumem.models.text import corpus

LEARNED, RESERVED = 16_000, 16
ROLES = ("bos_token", "eos_token", "pad_token")
CHAT = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token }}{% endfor %}"


def stand_in(name: str, **options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer for the model ``name``; options as of `PreTrainedTokenizerFast`."""
    config = AutoConfig.from_pretrained(name).get_text_config()
    size = config.vocab_size
    model = json.loads(_learned(min(size, LEARNED)).to_str())
    vocabulary = model["model"]["vocab"]
    vocabulary |= {_name(n): n for n in range(len(vocabulary), size)}
    ids = {role: getattr(config, f"{role}_id", None) for role in ROLES}  # T5 has no beginning
    end = ids["eos_token"]
    end = ids["eos_token"] = end[0] if isinstance(end, list) else size - 1 if end is None else end
    special = {role: _name(end if number is None else number) for role, number in ids.items()}
    longest = {"model_max_length": getattr(config, "max_position_embeddings", 512)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(model)),
        **{"name_or_path": name, "chat_template": CHAT, **longest, **special, **options},
    )


def _name(number: int) -> str:
    return f"<|{number}|>"


@functools.cache
def _learned(size: int) -> Tokenizer:
    """Return a tokenizer whose first few ids, and those that it did not learn, name themselves."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[_name(n) for n in range(RESERVED)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus().splitlines(keepends=True), trainer)
    return tokenizer

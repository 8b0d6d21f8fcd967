"""What vLLM's paged cache holds on a GPU: its own arithmetic, on simulated figures.

vLLM takes a share of the GPU at once, ``UTILIZATION``. What the weights, a rehearsal of the largest
batch and everything outside PyTorch leave of it is divided into blocks of ``BLOCK_TOKENS`` tokens.
A conversation takes whole blocks, as many as it has come to need, and one block stays empty. A
prompt is read in pieces of the batch's size beside the other conversations, so that users add
nothing but blocks.

Source, in vLLM: ``Worker.determine_available_memory`` in ``vllm/v1/worker/gpu_worker.py``;
``get_num_blocks`` and ``get_max_concurrency_for_kv_cache_config`` in
``vllm/v1/core/kv_cache_utils.py``; the empty block in ``vllm/v1/core/block_pool.py``;
``EngineArgs.get_batch_defaults`` in ``vllm/engine/arg_utils.py`` for the largest batch of a server;
``CacheConfig`` in ``vllm/config/cache.py`` for share and block.

Limits: transformers' layers stand for vLLM's in the rehearsal, which fuses some and takes less, and
for the logits of the rehearsal's sampler their bytes in float32 beside those in the weights' type.
Several GPUs, prefix caching and CUDA graphs are left out; from 0.21 on vLLM takes the graphs'
memory from the cache, unless ``VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS`` is 0. Windows of
attention and compressed caches, which vLLM's blocks hold in other ways, are refused.
"""

from dataclasses import dataclass, field
from typing import Any

from gpumem.estimation.generation import Serving
from gpumem.hardware.catalogue import Gpu
from gpumem.inputs import InputError
from gpumem.units import GIB, as_printed, format_bytes

#: For long vLLM's default, which is 0.92 since (``vllm/config/cache.py``): commands name it.
UTILIZATION = 0.9
BLOCK_TOKENS = 16
#: GPUs with so much memory, A100s aside, read larger batches.
LARGE_BYTES = 70 * GIB
#: Tokens of one batch, and conversations in it, of a server on a large GPU and on any other.
LARGE_BATCH, BATCH = (8192, 1024), (2048, 256)


def batch_of(gpu: Gpu) -> tuple[int, int]:
    """Return the most tokens, and the most conversations, of a batch of vLLM's server."""
    large = gpu.usable_bytes >= LARGE_BYTES and "a100" not in gpu.name.lower()
    return LARGE_BATCH if large else BATCH


def blocks_of(tokens: int) -> int:
    """Return how many blocks so many tokens of one conversation take."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class Paged:
    """What vLLM's cache holds on one GPU.

    Attributes:
        model, gpu, serving: what was asked for.
        weights_bytes, activations_bytes: of the weights, and of the rehearsal beside them.
        cache_bytes_per_token: what a token of one user takes in all layers.
        read_bytes: what a pass reads at least of the weights.
        torch, assumed: as `gpumem.estimation.serving.Served` has them.
    """

    model: str
    gpu: Gpu
    serving: Serving
    weights_bytes: int
    activations_bytes: int
    cache_bytes_per_token: int
    read_bytes: int
    torch: str
    config: Any = field(default=None, repr=False, compare=False)
    assumed: str | None = None
    seconds_to_estimate: float = field(default=0.0, compare=False)

    @property
    def taken_bytes(self) -> int:
        """What vLLM takes of the GPU, its context included."""
        return int(UTILIZATION * self.gpu.usable_bytes)

    @property
    def needed_bytes(self) -> int:
        """What weights, rehearsal and the blocks of all users' conversations take, the empty block
        included; more than vLLM leaves them where these do not fit."""
        blocks = 1 + self.serving.users * blocks_of(self.serving.seq_len)
        cache_bytes = blocks * BLOCK_TOKENS * self.cache_bytes_per_token
        return self.weights_bytes + self.activations_bytes + cache_bytes

    @property
    def cache_bytes(self) -> int:
        """The cache's, taken at once; 0 where nothing is left for it."""
        return self.blocks * BLOCK_TOKENS * self.cache_bytes_per_token

    @property
    def blocks(self) -> int:
        """How many blocks the cache has."""
        others = self.weights_bytes + self.activations_bytes + self.gpu.context_bytes
        left_bytes = self.taken_bytes - others
        return max(0, left_bytes // (BLOCK_TOKENS * self.cache_bytes_per_token))

    @property
    def _usable_blocks(self) -> int:
        return max(0, self.blocks - 1)

    def most_users(self) -> int:
        """Return the most users whose conversations fit when each has its last token."""
        return min(self._usable_blocks // blocks_of(self.serving.seq_len), batch_of(self.gpu)[1])

    def longest_prompt_tokens(self) -> int:
        """Return the longest prompt with which as many users, and as many new tokens, fit, up to
        the positions that the model knows. 0: no prompt does."""
        each = self._usable_blocks // self.serving.users * BLOCK_TOKENS
        new_tokens = self.serving.new_tokens
        if self.serving.users > batch_of(self.gpu)[1]:
            return 0
        return max(0, min(each + 1, positions_of(self.config) or each + 1) - new_tokens)

    @property
    def fits(self) -> bool:
        """Whether all users' conversations fit at once; vLLM lets the others wait."""
        return self.serving.users <= self.most_users()

    @property
    def bound_tokens_per_second(self) -> float | None:
        """As for a `Served`: an upper bound, never a time."""
        serving = self.serving
        if self.gpu.bandwidth_gb_per_s is None or serving.new_tokens == 1:
            return None
        tokens = serving.prompt_tokens + (serving.new_tokens - 1) / 2
        read_bytes = self.read_bytes + serving.users * tokens * self.cache_bytes_per_token
        return serving.users * self.gpu.bandwidth_gb_per_s * 1e9 / read_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return {
            "model": self.model,
            "gpu": self.gpu.key,
            "gpu_assumed": self.assumed,
            "torch": self.torch,
            "serving": self.serving.to_dict(),
            "taken_bytes": self.taken_bytes,
            "weights_bytes": self.weights_bytes,
            "activations_bytes": self.activations_bytes,
            "context_bytes": self.gpu.context_bytes,
            "cache_bytes": self.cache_bytes,
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "blocks": self.blocks,
            "block_tokens": BLOCK_TOKENS,
            "fits": self.fits,
            "bound_tokens_per_second": self.bound_tokens_per_second,
            "seconds_to_estimate": round(self.seconds_to_estimate, 3),
        }

    _repr_pretty_ = as_printed

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit at once"
        lines = [f"{self.model} on {self.gpu.name}: {verdict}"]
        lines += [f"  {line}" for line in (self.serving, self.assumed) if line]
        rows = [
            ("taken", self.taken_bytes, f"by --gpu-memory-utilization {UTILIZATION}, at once"),
            ("weights", self.weights_bytes, ""),
            ("activations", self.activations_bytes, "of the largest batch, rehearsed"),
            ("context", self.gpu.context_bytes, "for CUDA itself"),
            ("cache", self.cache_bytes, f"{self.blocks:,} blocks of {BLOCK_TOKENS} tokens"),
        ]
        lines.append("")
        lines += [f"  {name:<13}{format_bytes(n):>9}  {text}".rstrip() for name, n, text in rows]
        return "\n".join([*lines, "", *answers(self)])


def positions_of(config: Any) -> int | None:
    """Return how many positions a model was made for; None where its config does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def answers(found: Any) -> list[str]:
    """Return the lines that say how many users fit, how long a prompt, and how fast at most."""
    serving, known = found.serving, positions_of(found.config)
    each = f"{serving.prompt_tokens} + {serving.new_tokens} tokens"
    users, longest = found.most_users(), found.longest_prompt_tokens()
    most = serving.cache == "paged" and users == batch_of(found.gpu)[1]
    lines = [
        f"  One more token of one user takes {format_bytes(found.cache_bytes_per_token)} of cache.",
        f"  Users that fit with {each} each: {users:,}{', the most in vLLM' * most}.",
        f"  Longest prompt that fits for {serving.who}: {longest:,} tokens.",
    ]
    if serving.users > 1 and not serving.padded and serving.cache != "paged":
        lines.append("  All prompts have one length. Padding takes a mask, too: see --padded.")
    if known and serving.seq_len > known:
        lines.append(f"  The model was made for {known:,} positions, and {each} are more.")
    if bound := found.bound_tokens_per_second:
        lines.append(
            f"  At most {bound:,.0f} tokens a second for all users: a bound, by memory bandwidth."
        )
    return lines


def has_windows(config: Any) -> bool:
    """Return whether some layers do not attend to all tokens, so that their cache stops growing."""
    text = config.get_text_config()
    if kinds := getattr(text, "layer_types", None):
        return set(kinds) != {"full_attention"}
    return bool(getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True))


def refuse_other_caches(name: str, config: Any) -> None:
    """Raise `InputError` where a token does not take the same in every layer, or is compressed."""
    text = config.get_text_config()
    if has_windows(config):
        raise InputError(
            f"{name} attends to a window in some layers, which vLLM's blocks hold in another way: "
            "take cache='dynamic' or 'static'"
        )
    if getattr(text, "kv_lora_rank", None):
        raise InputError(f"{name} compresses its cache, which vLLM's blocks hold in another way")

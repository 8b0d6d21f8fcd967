"""The search behind `serving_advice`: estimates one change after another, the mildest first.

Limits: a change is not tried on top of one that is enough, nor one that leaves the weights as they
are where these alone are too large.
"""

from dataclasses import dataclass, replace
from typing import Any

from gpumem.estimation.generation import Serving
from gpumem.estimation.paged import UTILIZATION, Paged
from gpumem.estimation.script import weights_of
from gpumem.estimation.serving import Served, serve
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import MOST_GPUS, Gpu, room_bytes
from gpumem.inputs import InputError

NOTHING, ROUNDING, ANSWER = "nothing", "rounding", "the answer"
#: How people call a changed field.
_NAMES = {
    "bf16": "BF16",
    "fp16": "FP16",
    "static": "a static cache",
    "paged": "a paged cache, by vLLM",
    "fp8": "a cache in FP8",
    "int8": "int8 weights",
    "nf4": "NF4 weights",
}
#: What rounds, the mildest first.
_ROUNDED: tuple[dict[str, str], ...] = (
    {"kv_dtype": "fp8"},
    {"quantize": "int8"},
    {"quantize": "int8", "kv_dtype": "fp8"},
    {"quantize": "nf4"},
    {"quantize": "nf4", "kv_dtype": "fp8"},
)


@dataclass(frozen=True)
class Answering:
    """One way to answer that was estimated.

    Attributes:
        name: the change, as people call it.
        changes: what it changes of the answers: ``"nothing"``, ``"rounding"`` or ``"the answer"``.
        serving: what each GPU does.
        gpu, gpus: on what, each of ``gpus`` with a copy of the model.
        needed_bytes: what PyTorch's allocator takes of each GPU; of a paged cache the weights, the
            rehearsal and the users' blocks.
        fits: with the margin.
        bound_tokens_per_second: of all GPUs together, an upper bound; None where it is not known.
        code: what a person writes.
    """

    name: str
    changes: str
    serving: Serving
    gpu: str
    gpus: int
    needed_bytes: int
    fits: bool
    bound_tokens_per_second: float | None
    code: str

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready copy."""
        return vars(self) | {"serving": self.serving.to_dict()}


class Search:
    """Runs estimates, and stores the options that fit."""

    def __init__(
        self, model: Any, name: str, gpu: Gpu, gpus: int, serving: Serving, margin: float
    ) -> None:
        self.model, self.margin = model, margin
        self.weights = weights_of(model, name) or name
        self.gpu, self.gpus, self.serving = gpu, gpus, serving
        self.each = serving.but(users=-(-serving.users // gpus))  # of one GPU
        self.options: list[Answering] = []
        self.refused: list[str] = []
        self.tried = self.ruled_out = 0

    def run(self, serving: Serving, gpu: Gpu | None = None) -> Served | Paged:
        """Return the estimate on a GPU without the margin; vLLM leaves a tenth of it itself."""
        gpu = gpu or self.gpu
        if serving.cache != "paged":
            room = room_bytes(gpu.budget_bytes, self.margin)
            gpu = replace(gpu, usable_bytes=gpu.context_bytes + room)
        found = serve(self.model, gpu=gpu, serving=serving)
        self.tried += 1
        return found

    def all(self, found: Served | Paged, most: int, longest: int) -> None:
        """Try every change of what was ``found``, with which ``most`` users would fit, or prompts
        of the ``longest`` tokens."""
        users, weights_fit = self.serving.users, found.weights_bytes <= self._room(self.gpu)
        for cache in ("static", "paged"):
            self._change({"cache": cache}, NOTHING, possible=weights_fit)
        if most:  # then it is fewer than were asked for
            turns = self.each.but(users=most)
            self._offer(f"{most} of the users at a time", NOTHING, turns, gpus=self.gpus)
            copies = -(-users // most)
            if copies <= MOST_GPUS:
                shared = self.each.but(users=-(-users // copies))
                self._offer(f"{copies} GPUs, each with a copy", NOTHING, shared, gpus=copies)
        self._larger_gpu(found)
        if self.serving.precision == "fp32":
            half = "bf16" if self.gpu.bf16_native else "fp16"
            self._change({"precision": half}, ROUNDING)
        tried = [
            self._rounded(change, possible=weights_fit or "quantize" in change)
            for change in _ROUNDED
        ]
        rounded = [found for found in tried if found]
        if longest and longest < self.serving.prompt_tokens:
            shorter = self.each.but(prompt_tokens=longest)
            self._offer(f"prompts of {longest:,} tokens", ANSWER, shorter, gpus=self.gpus)
        if not any(option.gpu == self.gpu.key for option in self.options):
            self._rounded_in_turns(rounded)

    def _rounded_in_turns(self, rounded: list[Served | Paged]) -> None:
        """Offer fewer users at a time beside the rounding that takes the least, where one fits."""
        for found in sorted(rounded, key=needed_bytes):
            if most := found.most_users():
                name = f"{_name(self.each, found.serving)}, {most} of the users at a time"
                self._offer(name, ROUNDING, found.serving.but(users=most), self.gpus)
                return

    def _rounded(self, change: dict[str, str], *, possible: bool) -> Served | Paged | None:
        """Try a change that rounds, then by vLLM; return the last estimate, if one was run."""
        found = self._change(change, ROUNDING, possible=possible)
        if found is None or not found.fits:
            by_vllm = {**change, "cache": "paged"}
            found = self._change(by_vllm, ROUNDING, possible=possible) or found
        return found

    def _change(
        self, change: dict[str, str], changes: str, *, possible: bool = True
    ) -> Served | Paged | None:
        """Try some fields' values; return the estimate, None if there is none to run."""
        asked = vars(self.each)
        new: dict[str, Any] = {k: value for k, value in change.items() if asked[k] != value}
        if asked["padded"] and new.get("cache") == "paged":
            new["padded"] = False  # vLLM pads no prompt
        rounds_already = new.get("quantize") == "int8" and asked["quantize"]
        in_vain = any(new.items() >= known.items() for known in self._helped())
        # Static caches have no FP8, and vLLM rounds to 8 bits only what is stored so.
        serving = {**asked, **new}
        none = serving["cache"] == "static" and (serving["kv_dtype"] or serving["padded"])
        none = none or (serving["cache"] == "paged" and serving["quantize"] == "int8")
        if len(new) < len(change) or rounds_already or in_vain or none:
            return None
        if not possible:
            self.ruled_out += 1
            return None
        changed = self.each.but(**new)
        return self._offer(_name(self.each, changed), changes, changed, self.gpus)

    def _helped(self) -> list[dict[str, Any]]:
        """Return the fields that fitting options change, where they change what `_change` does."""
        asked, found = vars(self.each), []
        for option in self.options:
            if (option.gpu, option.gpus) == (self.gpu.key, self.gpus):
                new = vars(option.serving).items()
                found.append({name: value for name, value in new if asked[name] != value})
        return found

    def _offer(
        self, name: str, changes: str, serving: Serving, gpus: int, gpu: Gpu | None = None
    ) -> Served | Paged | None:
        try:
            found = self.run(serving, gpu)
        except InputError as error:
            self.refused.append(f"{name}: {error}")
            return None
        if found.fits:
            self.options.append(self.option(name, changes, found, gpus))
        return found

    def option(
        self, name: str, changes: str, found: Served | Paged, gpus: int | None = None
    ) -> Answering:
        """Return what was ``found`` as an option."""
        gpus, bound = gpus or self.gpus, found.bound_tokens_per_second
        return Answering(
            name=name,
            changes=changes,
            serving=found.serving,
            gpu=found.gpu.key,
            gpus=gpus,
            needed_bytes=needed_bytes(found),
            fits=found.fits,
            bound_tokens_per_second=bound and bound * gpus,
            code=_code(self.weights, self.each, found, gpus, self.gpu),
        )

    def _room(self, gpu: Gpu) -> int:
        return room_bytes(gpu.budget_bytes, self.margin)

    def _larger_gpu(self, found: Served | Paged) -> None:
        """Try larger GPUs, the smallest first, up to one that holds what was ``found``."""
        paged = isinstance(found, Paged)
        least_bytes = found.weights_bytes if paged else found.peak_allocated_bytes
        for gpu in catalogue.larger_gpus(self.gpu):
            if self._room(gpu) < least_bytes:
                self.ruled_out += 1
                continue
            tried = self._offer(gpu.name, NOTHING, self.each, self.gpus, gpu)
            if tried and tried.fits:
                return


def needed_bytes(found: Served | Paged) -> int:
    return found.needed_bytes if isinstance(found, Paged) else found.peak_reserved_bytes


def _name(asked: Serving, changed: Serving) -> str:
    """Return how people call the fields that were changed."""
    before, now = vars(asked), vars(changed)
    fields = ("precision", "quantize", "kv_dtype", "cache")
    names = [_NAMES[now[field]] for field in fields if now[field] != before[field]]
    text = ", ".join(names)
    return text[:1].upper() + text[1:]


def _code(weights: str, asked: Serving, found: Served | Paged, gpus: int, gpu: Gpu) -> str:
    """Return what a person writes for what differs from what was asked for, a line each."""
    serving, lines = found.serving, []
    if serving.cache == "paged":
        words = [
            # Up to 0.20 vLLM took no memory of the cache for CUDA graphs, nor does our count.
            f"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 vllm serve {weights}",
            f"--max-model-len {serving.prompt_tokens + serving.new_tokens}",
            f"--gpu-memory-utilization {UTILIZATION}",
        ]
        words += [f"--max-num-seqs {serving.users}"]
        words += ["--kv-cache-dtype fp8"] if serving.kv_dtype else []
        words += ["--quantization bitsandbytes"] if serving.quantize else []
        words += [f"--data-parallel-size {gpus}"] if gpus > 1 else []
        lines.append(" ".join(words))
    else:
        lines += _generate_lines(weights, asked, serving)
        if gpus > 1:
            lines.append(f"one process for each of {gpus} GPUs: CUDA_VISIBLE_DEVICES=0 python …")
    if found.gpu.key != gpu.key:
        lines.append(f"the same code, on {found.gpu.name}")
    return "\n".join(lines)


def _generate_lines(weights: str, asked: Serving, serving: Serving) -> list[str]:
    lines = []
    dtype = serving.weights_dtype  # else what is not quantized has the type of the file
    loading = f"dtype={dtype}"
    if serving.quantize == "int8":
        loading += ", quantization_config=BitsAndBytesConfig(load_in_8bit=True)"
    elif serving.quantize:
        kind = f'bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype={dtype}'
        kind += ", bnb_4bit_use_double_quant=True" * (serving.quantize == "nf4-double")
        loading += f", quantization_config=BitsAndBytesConfig(load_in_4bit=True, {kind})"
    if (serving.quantize, serving.precision) != (asked.quantize, asked.precision):
        lines.append(f'AutoModelForCausalLM.from_pretrained("{weights}", {loading})')
    cache = ""
    if serving.kv_dtype:
        cache = ', cache_implementation="quantized", cache_config={"backend": "fp8"}'
    elif serving.cache == "static":
        cache = ', cache_implementation="static"'
    if (serving.cache, serving.kv_dtype) != (asked.cache, asked.kv_dtype):
        lines.append(f"model.generate(**inputs, max_new_tokens={serving.new_tokens}{cache})")
    if serving.users != asked.users:
        lines.append(f"for some in itertools.batched(prompts, {serving.users}):  # and generate")
    if serving.prompt_tokens != asked.prompt_tokens:
        lines.append(f"tokenizer(prompts, truncation=True, max_length={serving.prompt_tokens})")
    return lines

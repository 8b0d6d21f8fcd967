"""Write the page "Will it fit?": ``fit.html`` with its style, its program and its data.

The page asks nothing of a network and opens from a disk, so the data is a program that sets one
variable. `will_it_fit` explains them.
"""

import html
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpumem.allocator.workspaces import DEFAULT_BYTES, workspace_bytes
from gpumem.estimation.model_building import adapter_targets
from gpumem.estimation.paged import BLOCK_TOKENS, LARGE_BATCH, UTILIZATION, batch_of
from gpumem.estimation.recipe import ALL_LINEAR, Recipe
from gpumem.estimation.recipes_to_try import LORA_RANK, changes
from gpumem.estimation.script import script, weights_of
from gpumem.hardware import catalogue
from gpumem.hardware.catalogue import Gpu
from gpumem.models.catalogue import MODELS, image_tokens, model
from gpumem.models.config import find_config
from labkit.recording import accuracy
from will_it_fit.build import LENGTHS, MOST_BYTES, MOST_FP16_BYTES, MOST_LENGTH, RANKS
from will_it_fit.table import (
    MORE_RESERVED,
    MORE_SEEN,
    MORE_UNSURE,
    NEW_TOKENS,
    PAGED_KINDS,
    PAGED_WEIGHTS,
    SERVED_KINDS,
    SHAPES,
    USUAL_LENGTH,
    Point,
    ServedPoint,
    allocated_of,
    name_of_way,
    servings,
    table,
    techniques,
)

HERE = Path(__file__).resolve().parent
FILES = ("fit/fit.html", "fit/fit.css", "fit/answer.js", "fit/fit.js", "static/icon.svg")
#: What fits and takes so many times as long as the fastest that does comes behind the others.
SLOW = 4
#: Stand in scripts for what the page fills in.
PLACEHOLDERS = {
    "model": "{MODEL}",
    "name": "{NAME}",
    "batch": "{ROWS}",
    "length": "{TOKENS}",
    "targets": "{LAYERS}",
}
_MODEL, _ROWS, _TOKENS = "SmolLM2-135M", 61, 7919
_PHANTOM = HERE.parent / "docs" / "PHANTOM.md"
_PUBLISHED = "## Beside a real GPU's published figures"
_PUBLISHED_SOURCE = "https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one"
#: 300 batches that `off_the_grid` of tests/browser/test_fit_page.py draws: docs/LOG.md, 2026-11-28.
_OFF = "between 13 % less and 26 % more than the page says"
#: 30 ways, models and batches that `random.Random(7)` drew: docs/LOG.md, 2026-11-29.
_OLDER = "12 reserved otherwise, between 0.9 % less and 1.2 % more,"
_BETWEEN = (
    "Between the batches that were simulated the page interpolates and says “about”. Peak memory "
    "grows almost evenly with the number of tokens, and where it does not, the page gives a range. "
    "Of 300 random batches, 272 allocated within 1 % of the page's figure. 297 were in the range "
    "that it gives, or within 1 % of it; the worst was 3.8 % outside. What PyTorch reserves beyond "
    f"that depends on where blocks find room: {_OFF}. So a larger batch may reserve less than a "
    "smaller one."
)


def write_fit_page(folder: Path) -> None:
    """Write the page and its files into ``folder``.

    Raises:
        InputError: the table is missing or damaged.
        OSError: something cannot be written.
    """
    for name in FILES:
        shutil.copy(HERE / name, folder)
    if not (folder / "index.html").exists():  # a page by itself, which leads nowhere
        page = folder / "fit.html"
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"<nav.*</nav>", "", text), encoding="utf-8")
    data = json.dumps(page_data(), separators=(",", ":"), ensure_ascii=False)
    (folder / "fit-data.js").write_text(f"window.FIT = {data};\n", encoding="utf-8")


def page_data() -> dict[str, Any]:
    """Return all that the page looks up."""
    known, tried = table(), _tried()
    record = asdict(known)
    return {
        "table": record,
        "serving": _serving(record.pop("serving")),
        "fields": Point._fields,
        "ways": [_way(*pair) for pair in zip(known.recipes, known.ways, strict=True)],
        "ranks": RANKS,
        "most": MOST_BYTES,
        "mostFp16": MOST_FP16_BYTES,
        "off": MORE_RESERVED,
        "seen": MORE_SEEN,
        "unsure": MORE_UNSURE,
        "slow": SLOW,
        "rules": _rules(known.recipes),
        "mostLength": MOST_LENGTH,
        "usualLength": USUAL_LENGTH,
        "gpus": [_gpu(gpu) for gpu in gpus()],
        "models": [_model(name, tried.get(name, {})) for name in known.models],
        "placeholders": PLACEHOLDERS,
        "trusted": _trusted(),
        "between": f"Between two simulated batches. In 300 trials PyTorch reserved {_OFF}.",
        "trust": _trust(tried),
        "made": _made(),
    }


def gpus() -> list[Gpu]:
    """Return the GPUs of the catalogue that the table speaks of."""
    return [gpu for gpu in catalogue.gpus() if gpu.compute_capability]


def more_workspace_bytes(gpu: Gpu) -> int:
    """Return what cuBLAS takes on ``gpu`` beyond the GPUs of the table, for its two threads."""
    return 2 * (workspace_bytes(gpu) - DEFAULT_BYTES)


def paged_kind(gpu: Gpu) -> int:
    """Return the place in ``PAGED_KINDS`` of the GPU that stands for ``gpu``."""
    return 1 + (batch_of(gpu) == LARGE_BATCH) if gpu.bf16_native else 0


def _serving(models: dict[str, Any]) -> dict[str, Any]:
    """Return what the page looks up for answering."""
    ways = [(*kind, None) for kind in SERVED_KINDS]
    ways += [(quantize, "paged", kind) for quantize in PAGED_WEIGHTS for kind in (None, "fp8")]
    simulated = " and ".join(f"{users} × {tokens:,}" for users, tokens in SHAPES)
    return {
        "models": models,
        "ways": [_way_to_answer(*way) for way in ways],
        "fields": ServedPoint._fields,
        "points": len(servings()),
        "shapes": SHAPES,
        "newTokens": NEW_TOKENS,
        "utilization": UTILIZATION,
        "blockTokens": BLOCK_TOKENS,
        "stored": f"transformers' caches were simulated with {simulated} tokens in the prompts and "
        f"{NEW_TOKENS} in each answer, and have no answer for others. vLLM's arithmetic holds for "
        "any.",
        "trusted": "Simulated, not measured on a GPU. What transformers' generate is said to take "
        "is held to PyTorch's own allocator on a phantom GPU, to the byte, in six cases each day.",
    }


def _way_to_answer(quantize: str | None, cache: str, kv_dtype: str | None) -> dict[str, Any]:
    paged = cache == "paged"
    if paged:
        place = len(PAGED_KINDS) * PAGED_WEIGHTS.index(quantize)
    else:
        place = len(SHAPES) * SERVED_KINDS.index((quantize, cache))
    weights = {None: "16-bit weights", "int8": "int8 weights", "nf4": "NF4 weights"}[quantize]
    rounded = {
        "int8": "weights are rounded to 8 bits",
        "nf4": "weights are rounded to 4 bits",
        "fp8": "the cache is rounded to 8 bits",
    }
    options = {"quantize": quantize, "cache": cache, "kv-dtype": kv_dtype}
    return {
        "label": f"{weights}, {cache} cache{', FP8' * bool(kv_dtype)}{' (vLLM)' * paged}",
        "quantize": quantize,
        "cache": cache,
        "kv": kv_dtype,
        "place": place,
        "may": [key for key in (quantize, kv_dtype, "vllm" if paged else None) if key],
        "changes": [rounded[key] for key in (quantize, kv_dtype) if key],
        "options": "".join(f" --{name} {value}" for name, value in options.items() if value),
    }


def _way(recipe: Recipe, changed: dict[str, Any]) -> dict[str, Any]:
    fields = {"precision": recipe.precision, "ranks": recipe.ranks}
    may = {
        "mixed": recipe.precision.startswith("amp") and not recipe.lora,
        "adapters": recipe.lora,
        "four-bit": recipe.quantize,
        "bf16": recipe.precision == "bf16" and not recipe.lora,
        "optimizer": recipe.optimizer not in ("adamw", "fused-adamw"),
        "backward": recipe.optimizer_in_backward,
        "cpu": recipe.offload != "none",
        "eager": recipe.attention == "eager",
    }
    held = recipe.lora or recipe.optimizer_in_backward or recipe.offload in ("optimizer", "weights")
    return {
        "recipe": fields,
        "gradients": 0 if held else recipe.weights_dtype.itemsize / recipe.ranks,
        "label": name_of_way(recipe),
        "may": [key for key, needed in may.items() if needed],
        "changes": changes(recipe),
        "techniques": len(techniques(recipe)),
        "options": _options(changed),
        "script": _script(recipe),
    }


def _options(fields: dict[str, Any]) -> str:
    """Return the options with which `labkit estimate` takes a way, batch and length aside."""
    words = []
    for name, value in fields.items():
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return " ".join(words)


def _rules(recipes: Sequence[Recipe]) -> list[dict[str, Any]]:
    """Return rules of thumb, in bytes per parameter, each with the ways that it is about.

    Rules that leave activations out are held to two: as it is, and with next to no activations.
    Which of BF16 and FP16 is shown depends on the GPU.
    """

    def places(*ways: Recipe) -> list[int]:
        return [recipes.index(way) for way in ways if way in recipes]

    frugal = {"checkpointing": True, "chunked_loss": True}
    least = {"optimizer": "fused-adamw", **frugal}
    lora = {"lora": LORA_RANK, **frugal}
    fp32 = places(Recipe(precision="fp32"), Recipe(precision="fp32", **least))
    bf16 = places(Recipe(precision="bf16"), Recipe(precision="bf16", **least))
    mixed = places(
        Recipe(precision="amp-bf16"),
        Recipe(precision="amp-bf16", **least),
        Recipe(precision="amp-fp16"),
        Recipe(precision="amp-fp16", **least),
    )
    adapters = [Recipe(precision=each, **lora) for each in ("amp-bf16", "amp-fp16")]
    four_bits = [each.but(quantize="nf4-double") for each in adapters]
    accelerate = "accelerate estimate-memory"
    rules = [
        (f"16 bytes a parameter: FP32 weights, gradients, Adam's states ({accelerate})", 16, fp32),
        (f"{accelerate}, bfloat16: twice the FP32 weights", 8, mixed),
        ("8 bytes a parameter: weights, gradients and Adam's states in BF16", 8, bf16),
        ("LoRA: 2 bytes a parameter", 2, places(*adapters)),
        ("QLoRA: half a byte a parameter", 0.5, places(*four_bits)),
    ]
    return [
        {"name": name, "perParameter": size, "ways": ways} for name, size, ways in rules if ways
    ]


def _script(recipe: Recipe) -> str:
    """Return the training script with placeholders for the model, the rows and the tokens."""
    text = script(recipe.but(batch_size=_ROWS, seq_len=_TOKENS), model=_MODEL)
    text = text.replace(weights_of(_MODEL, _MODEL), PLACEHOLDERS["model"])
    text = text.replace(_MODEL, PLACEHOLDERS["name"])
    text = text.replace(
        f'target_modules="{ALL_LINEAR[0]}"', f"target_modules={PLACEHOLDERS['targets']}"
    )
    text = re.sub(rf"\b{_ROWS}\b", PLACEHOLDERS["batch"], text)
    return re.sub(rf"\b{_TOKENS}\b", PLACEHOLDERS["length"], text)


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "key": gpu.key,
        "name": gpu.name,
        "capacity": gpu.budget_bytes,
        "bandwidth": gpu.bandwidth_gb_per_s,
        "link": gpu.link_gb_per_s,
        "peer": gpu.peer_gb_per_s,
        "peerName": "NVLink" if gpu.nvlink_gb_per_s else "PCI Express",
        "workspaces": more_workspace_bytes(gpu),
        "oneWorkspace": more_workspace_bytes(gpu) // 2,
        "usable": gpu.usable_bytes,
        "context": gpu.context_bytes,
        "conversations": batch_of(gpu)[1],
        "kind": paged_kind(gpu),
        "int8": gpu.compute_capability >= (7, 5),
        "fp32": gpu.fp32_tflops,
        "fp16": gpu.fp16_tflops,
        "bf16": gpu.bf16_tflops if gpu.bf16_native else None,
    }


def _tried() -> dict[str, dict[int, str]]:
    """Return for each model and way what PyTorch's allocator said of one row of tokens, beside the
    table's own point.
    """
    known, points = table(), {}
    for name, entry in known.models.items():
        length = min(USUAL_LENGTH, entry.longest)
        for index, (recipe, rows) in enumerate(zip(known.recipes, entry.ways, strict=True)):
            row = next((row for row in rows or () if row.seq_len in (0, length)), None)
            point = row and row.points[known.tokens.index(length)]
            if point:
                setup = f"{name}, {recipe.but(batch_size=1, seq_len=length)}"
                points[setup] = (name, index, point)
    found: dict[str, dict[int, str]] = {}
    records = accuracy.recorded_tables(file=accuracy.FITS_FILE).values()
    for record in sorted(
        records, key=lambda record: not record.phantom
    ):  # last: what a real GPU said
        for row in record.rows:
            name, index, point = points.get(row.setup, ("", 0, None))
            # Another simulation than the table's, by older rules, says nothing about it.
            if point and row.truth_bytes and row.simulated_reserved_bytes == point.reserved:
                allocated = abs(allocated_of(point) / row.truth_bytes - 1)
                off = max(allocated, abs(point.reserved / row.reserved_bytes - 1))
                said = f"within {math.ceil(1000 * off) / 10} %" if off else "equal to the byte"
                found.setdefault(name, {})[index] = f"{record.where}: {said}"
    return found


def _model(name: str, tried: dict[int, str]) -> dict[str, Any]:
    count = MODELS[name].parameters
    size = f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"
    config = find_config(name)[1]
    text = config.get_text_config()
    heads = text.num_attention_heads
    return {
        "name": name,
        "hub": weights_of(name, name),
        "size": size,
        "images": image_tokens(config),
        "sharedHeads": getattr(text, "num_key_value_heads", heads) < heads,
        "shortest": min(length for length in LENGTHS if length > image_tokens(config)),
        "tried": tried,
        "targets": json.dumps(adapter_targets(model(config, device="meta"), Recipe(lora=16))),
    }


# --- how far to trust it --------------------------------------------------------------------------


def _trust(tried: dict[str, dict[int, str]]) -> str:
    """Return the part of the page that says where its numbers come from, as HTML."""
    tables = _checked()
    evidence = [text for ways in tried.values() for text in ways.values()]
    equal = sum("equal" in text for text in evidence)
    rows = [(each.where, *_errors(each)) for each in tables]
    heading, *published = _published_rows()
    parts = [
        "<p>The bytes on this page come from simulated training steps: tensors have sizes and no "
        "content, and a model of PyTorch's caching allocator serves their requests. The seconds "
        "are a lower bound from the GPU's data sheet. We checked the bytes of simulated steps in "
        "three ways: on a GPU, where other recipes than those of this page ran for real; on "
        "phantom GPUs, where PyTorch's own allocator serves a whole program; and against published "
        f"figures. {_models_tried(tables)}The steps are those of the script that this page offers: "
        "other trainers may keep other tensors, and there is no padding. Simulated bytes "
        "came this close:</p>",
        _table("Simulated against PyTorch's allocator", _ERRORS, rows),
        f"<p>{len(evidence)} ways of this table ran on a phantom themselves, with one row of "
        f"tokens; the column “Evidence” names them. {equal} reserved and allocated what is said "
        f"here, to the byte, and none reserved {100 * MORE_SEEN:.1f} % more. The last check is of "
        "the phantom itself: "
        f'<a href="{_PUBLISHED_SOURCE}">transformers\' '
        "documentation of 2022</a> trains BERT-large on a V100 and says what the driver shows. "
        "With checkpointing the phantom is within 2.2 % of that. Without checkpointing, it holds "
        "7 to 16 % less. We do not know what the versions of 2022 kept in addition.</p>",
        _table("Published runs on a V100, in MB", heading, published),
        f"<p>{_BETWEEN}</p>",
        f"<p>With less than {100 * MORE_SEEN:.1f} % to spare the page says “probably”. The table "
        "was simulated for an A100, in FP16 for a T4. Hopper and Blackwell give cuBLAS a larger "
        "workspace, which moves what PyTorch reserves, and so do as many tokens in other rows. "
        f"There the page says “probably” with less than {100 * MORE_UNSURE:.0f} % to spare.</p>",
        "<p>Answering is simulated as training is: transformers' generate runs on tensors without "
        "content, all prompts in one batch, then a token for each user in every pass. Nothing is "
        "said between conversations that were simulated. A paged cache is "
        "vLLM's own arithmetic on simulated weights and activations; its layers may take less.</p>",
    ]
    return "".join(parts)


def _checked() -> list[accuracy.AccuracyTable]:
    """Return what simulations were held to, real GPUs first."""
    return sorted(accuracy.recorded_tables().values(), key=lambda table: table.phantom)


def _models_tried(tables: Sequence[accuracy.AccuracyTable]) -> str:
    """Return a sentence that names them; nothing where nothing is recorded."""
    found = {row.setup.split(",")[0] for table in tables for row in table.rows}
    names = sorted(found, key=lambda name: MODELS[name].parameters)
    return f"The recipes cover {', '.join(names)}. " if names else ""


def _trusted() -> str:
    """Return what stands beside the verdict where the batch itself was simulated."""
    tables = _checked()
    if not tables:
        return ""
    first = tables[0]
    recipes, _, reserved = _errors(first)
    where = first.where if first.phantom else f"an {first.where}"
    setups = [row.setup for row in first.rows if row.truth_bytes]
    small = sum(MODELS[setup.split(",")[0]].parameters < 1e9 for setup in setups)
    shared = sum("sharded over" in setup for setup in setups)
    return (
        f"For {recipes} other recipes run on {where}, {small} of them of models below 1B and "
        f"{shared} as one of several GPUs, reserved memory was within {reserved}."
    )


_ERRORS = ("GPU", "Recipes", "Allocated, largest error", "Reserved, largest error")


def _errors(found: accuracy.AccuracyTable) -> tuple[str, str, str]:
    rows = [row.errors() for row in found.rows if row.truth_bytes]
    largest = []
    for kind in ("simulated", "reserved"):
        errors = [abs(row[kind]) for row in rows if row[kind] is not None]
        largest.append(f"{max(errors):.2f} %")
    return str(len(rows)), *largest


def _published_rows() -> list[list[str]]:
    """Return the table of published runs as the documentation has it, its heading first."""
    text = _PHANTOM.read_text(encoding="utf-8").split(_PUBLISHED, 1)[1]
    lines = re.findall(r"^\|(.+)\|$", text.split("\n## ", 1)[0], re.MULTILINE)
    cells = [
        [cell.strip().replace(" MB", "\N{NO-BREAK SPACE}MB") for cell in line.split("|")]
        for line in lines
    ]
    return [cells[0], *cells[2:]]


def _table(title: str, heading: Any, rows: Any) -> str:
    """Return an HTML table that the keyboard can scroll."""
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heading)
    body = "".join(
        f"<tr><td>{html.escape(first)}</td>"
        + "".join(
            f'<td data-label="{html.escape(name)}">{html.escape(cell)}</td>'
            for name, cell in zip(heading[1:], cells, strict=True)
        )
        + "</tr>"
        for first, *cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{title}"><table class="cards">'
        f"<caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _made() -> str:
    known = table()
    versions = ", ".join(f"{name} {number}" for name, number in known.versions.items())
    return (
        f"Computed {known.date[:10]} with {versions}. Older releases of PyTorch choose among free "
        f"blocks in another way: of 30 random ways {_OLDER} by the rules of 2.11. "
        "`labkit estimate --torch 2.11` follows those."
    )

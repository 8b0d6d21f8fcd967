"""Write the page "Will it fit?": ``fit.html`` with its style, its program and its data.

The page asks nothing of a network and opens from a disk, so the data is a program that sets one
variable. `labkit.fitting` explains them.
"""

import html
import json
import math
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from labkit.fitting.build import MOST_BYTES, MOST_LENGTH, RANKS
from labkit.fitting.lookup import gpus, more_workspace_bytes, name_of_way, table
from labkit.fitting.table import MORE_RESERVED, USUAL_LENGTH, Point, allocated_of
from labkit.hardware.bound import least_seconds
from labkit.hardware.catalogue import Gpu
from labkit.models.catalogue import MODELS, image_tokens, model
from labkit.models.config import find_config
from labkit.plan.candidates import changes
from labkit.plan.model_building import adapter_targets
from labkit.plan.recipe import ALL_LINEAR, Recipe
from labkit.plan.script import script, weights_of
from labkit.recording import accuracy

HERE = Path(__file__).resolve().parent
FILES = ("fit/fit.html", "fit/fit.css", "fit/fit.js", "static/icon.svg")
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


def write_fit_page(folder: Path) -> None:
    """Write the page and its files into ``folder``.

    Raises:
        InputError: the table is missing or damaged.
        OSError: something cannot be written.
    """
    for name in FILES:
        shutil.copy(HERE / name, folder)
    data = json.dumps(page_data(), separators=(",", ":"), ensure_ascii=False)
    (folder / "fit-data.js").write_text(f"window.FIT = {data};\n", encoding="utf-8")


def page_data() -> dict[str, Any]:
    """Return all that the page looks up."""
    known, tried = table(), _tried()
    return {
        "table": asdict(known),
        "fields": Point._fields,
        "ways": [_way(recipe) for recipe in known.recipes],
        "ranks": RANKS,
        "most": MOST_BYTES,
        "off": round(100 * MORE_RESERVED),
        "mostLength": MOST_LENGTH,
        "usualLength": USUAL_LENGTH,
        "gpus": [_gpu(gpu) for gpu in gpus()],
        "models": [_model(name, tried.get(name, {})) for name in known.models],
        "placeholders": PLACEHOLDERS,
        "trust": _trust(),
        "made": _made(),
    }


def _way(recipe: Recipe) -> dict[str, Any]:
    fields = {"precision": recipe.precision, "ranks": recipe.ranks}
    may = {
        "adapters": recipe.lora,
        "four-bit": recipe.quantize,
        "bf16": recipe.precision == "bf16" and not recipe.lora,
        "optimizer": recipe.optimizer != "adamw",
        "cpu": recipe.offload != "none",
        "eager": recipe.attention == "eager",
    }
    return {
        "recipe": fields,
        "label": name_of_way(recipe),
        "may": [key for key, needed in may.items() if needed],
        "changes": changes(recipe),
        "options": _options(recipe),
        "script": _script(recipe),
    }


def _options(recipe: Recipe) -> str:
    """Return the options with which `labkit estimate` takes ``recipe``, batch and length aside."""
    usual, words = Recipe().to_dict(), []
    for name, value in recipe.to_dict().items():
        if value == usual[name] or name in ("batch_size", "seq_len"):
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return " ".join(words)


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
    rates = {}
    for name, precision in (("fp32", "fp32"), ("fp16", "amp-fp16"), ("bf16", "bf16")):
        seconds = least_seconds(gpu, {precision: 10**15}, 0)
        rates[name] = 1000 / seconds
    if not gpu.bf16_native:
        rates["bf16"] = None
    return {
        "key": gpu.key,
        "name": gpu.name,
        "capacity": gpu.budget_bytes,
        "bandwidth": gpu.bandwidth_gb_per_s,
        "link": gpu.link_gb_per_s,
        "workspaces": more_workspace_bytes(gpu),
        **rates,
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
    records = sorted(
        accuracy.recorded(file=accuracy.FITS_FILE).values(),
        key=lambda record: not record.machine.get("phantom"),  # last: what a real GPU said
    )
    for record in records:
        where = f"{'a phantom ' if record.machine.get('phantom') else ''}{record.machine['name']}"
        for row in record.rows:
            if row.truth_bytes and row.setup in points:
                name, index, point = points[row.setup]
                allocated = abs(allocated_of(point) / row.truth_bytes - 1)
                off = max(allocated, abs(point.reserved / row.reserved_bytes - 1))
                said = f"within {math.ceil(1000 * off) / 10} %" if off else "equal to the byte"
                found.setdefault(name, {})[index] = f"{where}: {said}"
    return found


def _model(name: str, tried: dict[int, str]) -> dict[str, Any]:
    count = MODELS[name].parameters
    size = f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"
    config = find_config(name)[1]
    return {
        "name": name,
        "hub": weights_of(name, name),
        "size": f"{size} parameters",
        "images": bool(image_tokens(config)),
        "tried": tried,
        "targets": json.dumps(adapter_targets(model(config, device="meta"), Recipe(lora=16))),
    }


# --- how far to trust it --------------------------------------------------------------------------


def _trust() -> str:
    """Return the part of the page that says where its numbers come from, as HTML."""
    phantoms = [
        (each.machine["name"], each) for gpu, each in accuracy.recorded().items() if "/" in gpu
    ]
    rows = [(name, *_errors(each)) for name, each in phantoms]
    heading, *published = _published_rows()
    parts = [
        "<p>Every number was simulated: the training step runs on tensors without values, and a "
        "model of PyTorch's caching allocator serves each request. On phantom GPUs PyTorch's own "
        "allocator, in C++, serves them. The column “How do we know” names ways that ran there, "
        "too, and how close they came. No GPU has measured this table yet.</p>",
        _table("Simulated against PyTorch's allocator", _ERRORS, rows),
        "<p>A real GPU's published figures, beside what the phantom says of the same runs. They "
        "are of 2022, and the software of today keeps less of each layer where nothing is "
        "checkpointed.</p>",
        _table("Published runs of a V100", heading, published),
        "<p>Between the batches that were simulated it follows the chord, and says “about”. The "
        "peak is nearly a convex function of the number of tokens. What PyTorch reserves beyond it "
        "depends on where blocks find room. Of 90 random batches between the points 80 were within "
        "1 % of what a simulation allocates, and all from 3.2 % below to 5.9 % above; what it "
        "reserves was from 15 % more to 6 % less than the page says.</p>",
    ]
    return "".join(parts)


_ERRORS = ("Phantom GPU", "Recipes", "Allocated, largest error", "Reserved, largest error")


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
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def _table(title: str, heading: Any, rows: Any) -> str:
    """Return an HTML table that the keyboard can scroll."""
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heading)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{title}"><table>'
        f"<caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _made() -> str:
    known = table()
    versions = ", ".join(f"{name} {number}" for name, number in known.versions.items())
    return f"Computed {known.date[:10]} with {versions}."

"""How far simulating and tracking are from what the allocator says, recipe by recipe.

    python benchmarks/accuracy.py                      # on the CPU: a tiny model
    python benchmarks/accuracy.py --gpu --out results  # on a CUDA machine: real sizes
    python -m phantom_gpu t4 benchmarks/accuracy.py --gpu  # the same on a GPU that is not there
    python -m phantom_gpu a100-80gb benchmarks/accuracy.py --headlines --out results
    python -m phantom_gpu a100-80gb benchmarks/accuracy.py --fits --out results
    python benchmarks/accuracy.py --recorded           # what GPUs and phantoms recorded, in short
    python benchmarks/accuracy.py --only LoRA          # what has the text in its name
    python benchmarks/accuracy.py --markdown           # the table as docs/ACCURACY.md shows it

On the CPU the truth is the allocator's own record (the profiler's memory events), and hand-written
set-ups follow the recipes. On CUDA it is ``max_memory_allocated`` above what was allocated before,
and ``max_memory_reserved``, against ``lab.estimate`` for that very GPU. Errors are signed, in per
cent of the truth: negative means that the estimate is too low. Their sizes are summed up by group,
and every error beyond 1 % is listed with its cause where that is known. ``--out`` stores the table
as JSON in ``<out>/<device>/accuracy.json``, with versions and date; that of a phantom goes to
``<out>/phantom/<device>``. Without the tracker, ``--headlines`` runs jobs that people ask for, some
within the memory of a smaller GPU, and stores ``headlines.json``; ``--fits`` tries some ways of
training every model of the table of `will_it_fit`, and stores ``fits.json``.

Limits: the CPU has no caching allocator, so nothing is reserved there. What does not fit the GPU,
what the GPU cannot do, or what fails there is listed, with the reason on standard error, and not
counted.
"""

import argparse
import json
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "site"))  # the table of fits
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import labkit as lab
from benchmarks.setups import (
    CAUSES,
    GPU_RECIPES,
    HEADLINES,
    SETUPS,
    SMALL_RECIPES,
    fits_recipes,
    tiny_config,
)
from gpumem.fake_cuda.process_group import one_of
from gpumem.files import write_atomic
from gpumem.hardware import cuda, this_machine
from gpumem.hardware.catalogue import Gpu
from gpumem.hardware.this_machine import gpu_key, this_gpu
from gpumem.inputs import InputError
from gpumem.units import GIB, format_bytes
from labkit.recording.accuracy import (
    FILE,
    FITS_FILE,
    HEADLINES_FILE,
    RECIPES_GROUP,
    SETUPS_GROUP,
    AccuracyRow,
    AccuracyTable,
    recorded_tables,
)

Experiment = Callable[..., Iterator[torch.Tensor]]
#: Errors larger than this, in per cent, are listed with their cause.
TOLERATED = 1.0
MARKERS = ("<!-- accuracy: begin -->", "<!-- accuracy: end -->")
PHANTOM_MARKERS = ("<!-- phantom: begin -->", "<!-- phantom: end -->")
HEADLINE_MARKERS = ("<!-- headlines: begin -->", "<!-- headlines: end -->")


# --- measuring ------------------------------------------------------------------------------------


def on_cpu(name: str, experiment: Experiment, group: str) -> AccuracyRow:
    """The allocator's record, the tracker and the simulation of something small."""
    truth, tracked = lab.measure(experiment, steps=3, track=False), lab.measure(experiment, steps=3)
    simulated = lab.simulate(experiment, steps=3)
    return AccuracyRow(
        name, truth.peak_bytes, tracked.peak_bytes, simulated.peak_bytes, group=group
    )


def on_gpu(
    name: str,
    model: str,
    recipe: lab.Recipe,
    gpu: Gpu,
    budget_bytes: int | None = None,
    *,
    track: bool = True,
) -> AccuracyRow:
    """What CUDA's allocator, the tracker and the estimate say of a recipe at real size.

    The allocator is asked without the tracker, under which blocks may lie in other places. It may
    take ``budget_bytes``; None: all that the GPU has.
    """
    if budget_bytes is not None:
        gpu = replace(gpu, usable_bytes=budget_bytes + gpu.context_bytes)
    simulated = lab.estimate(model, gpu=gpu, recipe=recipe, loops=False).run
    experiment = lab.training(model, recipe)
    with one_of(recipe.ranks), this_machine.pretend(budget_bytes=budget_bytes):
        run = lab.measure(experiment, track=False)
        if run.oom is not None:
            return AccuracyRow(
                name, None, None, simulated.peak_bytes, None, simulated.reserved_bytes
            )
        tracked = lab.measure(experiment, steps=2).trace.peak_bytes if track else None
    return AccuracyRow(
        name,
        max(run.step_peaks_bytes),
        tracked,
        simulated.peak_bytes,
        run.reserved_bytes,
        simulated.reserved_bytes,
    )


def small_rows(only: str) -> Iterator[AccuracyRow]:
    """The tiny recipes, then the hand-written set-ups, on the CPU."""
    cases = [
        (name, lab.training(tiny_config(), recipe), RECIPES_GROUP)
        for name, (_, recipe) in SMALL_RECIPES.items()
    ]
    cases += [(name, experiment, SETUPS_GROUP) for name, experiment in SETUPS.items()]
    for name, experiment, group in _bar([case for case in cases if only in case[0].lower()]):
        yield on_cpu(name, experiment, group)


def large_rows(only: str, file: str = FILE) -> Iterator[AccuracyRow]:
    """The recipes of ``file``, at real size, on this CUDA machine."""
    gpu = this_gpu()
    recipes: Mapping[str, tuple] = GPU_RECIPES
    if file != FILE:
        recipes = HEADLINES if file == HEADLINES_FILE else fits_recipes(gpu)
    for name in _bar([name for name in recipes if only in name.lower()]):
        model, recipe, *budget = recipes[name]
        try:
            row = on_gpu(name, model, recipe, gpu, *budget, track=file == FILE)
        except InputError as error:  # what this GPU cannot do, or a library that is missing
            tqdm.write(f"{name}: {error}", file=sys.stderr)
            row = AccuracyRow(name, None, None, None)
        except Exception as error:  # one kernel that fails must not cost the other rows
            tqdm.write(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
            cuda.clear_exception(error)
            row = AccuracyRow(name, None, None, None)
        yield row


def _bar(cases: list) -> Iterator:
    for case in tqdm(cases, leave=False, disable=None):
        cuda.free_memory()
        yield case


# --- tables ---------------------------------------------------------------------------------------

COLUMNS = ("truth", "simulated", "tracked", "reserved", "simulated")


def table(rows: list[AccuracyRow]) -> str:
    """Each group's rows one per line, then median, 95th percentile and maximum of the errors."""
    width = max(len(row.setup) for row in rows) + 2
    lines = []
    for group, members in _groups(rows).items():
        lines += [
            f"{'':{width}}{'allocated':>12}{'error of':>12}{'error of':>12}{'reserved':>12}"
            f"{'error of':>12}",
            f"{group:{width}}" + "".join(f"{column:>12}" for column in COLUMNS),
        ]
        for row in members:
            errors = row.errors()
            lines.append(
                f"{row.setup:{width}}{_size(row.truth_bytes):>12}"
                f"{_per_cent(errors['simulated']):>12}{_per_cent(errors['tracked']):>12}"
                f"{_size(row.reserved_bytes, none='–'):>12}{_per_cent(errors['reserved']):>12}"
            )
        for label, figures in summary(members).items():
            cells = [_per_cent(figures[k], sign="") for k in ("simulated", "tracked", "reserved")]
            lines.append(f"{label:{width}}{'':12}{cells[0]:>12}{cells[1]:>12}{'':12}{cells[2]:>12}")
        lines.append("")
    return "\n".join(lines + misses(rows))


def misses(rows: list[AccuracyRow]) -> list[str]:
    """A line for every error beyond what is tolerated, with its cause where that is known."""
    lines = []
    for row in rows:
        beyond = {
            key: error
            for key, error in row.errors().items()
            if error is not None and abs(error) > TOLERATED
        }
        if beyond:
            figures = ", ".join(f"{key} {_per_cent(error)}" for key, error in beyond.items())
            cause = CAUSES.get(row.setup, "cause not known yet")
            if set(beyond) == {"tracked"} and row.reserved_bytes is not None:
                cause = "cuBLAS's workspaces are no tensors"
            lines.append(f"beyond {TOLERATED:g} %: {row.setup} ({figures}): {cause}")
    return lines


def markdown(rows: list[AccuracyRow], machine: str) -> str:
    """The recipes as a table for docs/ACCURACY.md, between its markers, and a summary."""
    groups = _groups(rows)
    recipes = groups.get(RECIPES_GROUP, [])
    reserved = any(row.reserved_bytes is not None for row in recipes)
    heads = ["recipe", "allocated", "simulated"] + ["reserved", "simulated"] * reserved
    lines = [
        MARKERS[0],
        f"{machine}.",
        "",
        _cells(heads),
        _cells(["---"] + ["---:"] * (len(heads) - 1)),
    ]
    for row in recipes:
        errors = row.errors()
        cells = [row.setup, _size(row.truth_bytes), _per_cent(errors["simulated"])]
        if reserved:
            cells += [_size(row.reserved_bytes, none="–"), _per_cent(errors["reserved"])]
        lines.append(_cells(cells))
    lines.append("")
    for group, members in groups.items():
        for key, what in (("simulated", "allocated"), ("reserved", "reserved")):
            figures = {label: line[key] for label, line in summary(members).items()}
            if figures["maximum"] is not None:
                sizes = ", ".join(f"{k} {_per_cent(v, sign='')}" for k, v in figures.items())
                lines.append(f"Size of the errors, {len(members)} {group}, {what}: {sizes}.")
    lines += [line[0].upper() + line[1:] + "." for line in misses(rows)]
    return "\n".join([*lines, MARKERS[1]])


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _groups(rows: list[AccuracyRow]) -> dict[str, list[AccuracyRow]]:
    names = dict.fromkeys(row.group for row in rows)
    return {name: [row for row in rows if row.group == name] for name in names}


def summary(rows: list[AccuracyRow]) -> dict[str, dict[str, float | None]]:
    """Size of the errors, in per cent, for each estimate; None where there is none."""
    errors = [row.errors() for row in rows]
    sizes = {
        key: sorted(abs(each[key]) for each in errors if each[key] is not None)
        for key in ("simulated", "tracked", "reserved")
    }

    def each(figure: Callable[[list[float]], float]) -> dict[str, float | None]:
        return {key: figure(values) if values else None for key, values in sizes.items()}

    return {
        "median": each(statistics.median),
        "95th percentile": each(lambda values: values[math.ceil(0.95 * len(values)) - 1]),
        "maximum": each(max),
    }


def _size(nbytes: int | None, none: str = "no fit") -> str:
    return none if nbytes is None else format_bytes(nbytes)


def _per_cent(value: float | None, sign: str = "+") -> str:
    if value is None:
        return "–"
    return f"{value:{sign}.3f} %" if round(value, 3) else "0.000 %"


# --- files and the command line -------------------------------------------------------------------


def recorded_table() -> str:
    """What GPUs and phantoms recorded: a row each, with the size of the errors."""
    labels = ("median", "95th percentile", "maximum")
    lines = [
        PHANTOM_MARKERS[0],
        _cells(
            ["GPU", "recipes that fit", *(f"allocated, {label}" for label in labels)]
            + [f"reserved, {label}" for label in labels]
        ),
        _cells(["---"] + ["---:"] * 7),
    ]
    versions = {}
    for table in sorted(recorded_tables().values(), key=lambda table: table.phantom):
        fitting = [row for row in table.rows if row.truth_bytes is not None]
        sizes = summary(fitting)
        cells = [table.where, f"{len(fitting)} of {len(table.rows)}"]
        cells += [_per_cent(sizes[label]["simulated"], sign="") for label in labels]
        cells += [_per_cent(sizes[label]["reserved"], sign="") for label in labels]
        lines.append(_cells(cells))
        of = table.machine.versions
        text = f"torch {of['torch']}, transformers {of['transformers']}, {table.date[:10]}"
        versions.setdefault(text, []).append(table.where)
    made = [f"{', '.join(names)}: {text}." for text, names in versions.items()]
    return "\n".join([*lines, "", *made, PHANTOM_MARKERS[1]])


def headlines_table() -> str:
    """What GPUs and phantoms recorded of the headlines: a row for each job, a column each."""
    tables = sorted(recorded_tables(HEADLINES_FILE).values(), key=lambda table: table.phantom)
    rows = [row for table in tables for row in table.rows]
    found = {(table.where, row.setup): _headline(row) for table in tables for row in table.rows}
    names = [table.where for table in tables]
    lines = [
        HEADLINE_MARKERS[0],
        _cells(["job", *names]),
        _cells(["---"] + ["---:"] * len(names)),
    ]
    for setup in sorted({row.setup for row in rows}):
        lines.append(_cells([setup, *(found.get((name, setup), "–") for name in names)]))
    worst = summary(rows)["maximum"]
    allocated, reserved = (_per_cent(worst[key], sign="") for key in ("simulated", "reserved"))
    lines += ["", f"Worst of the estimates: {allocated} allocated, {reserved} reserved."]
    return "\n".join([*lines, HEADLINE_MARKERS[1]])


def _headline(row: AccuracyRow) -> str:
    """What was allocated and reserved at most, in GiB."""
    if row.simulated_bytes is None:  # this GPU cannot run it
        return "–"
    if row.truth_bytes is None:
        return "does not fit"
    return f"{row.truth_bytes / GIB:.3g} / {row.reserved_bytes / GIB:.3g}"


def store(rows: list[AccuracyRow], folder: Path, file: str = FILE) -> Path:
    """Write the rows with the machine's versions; the file is whole or not there."""
    here = this_machine.machine()
    if here.phantom:
        folder = folder / "phantom"
    path = folder / (gpu_key(here.name, here.capacity_bytes) if here.can_measure else "cpu") / file
    date = datetime.now(UTC).isoformat(timespec="seconds")
    record = AccuracyTable(tuple(rows), here, date).to_dict()
    write_atomic(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option, file, what in (
        ("--gpu", FILE, "real sizes, on this CUDA machine"),
        ("--headlines", HEADLINES_FILE, "jobs that people ask for, on it"),
        ("--fits", FITS_FILE, "some ways of every model of the table, on it"),
    ):
        parser.add_argument(option, dest="file", action="store_const", const=file, help=what)
    parser.add_argument("--only", default="", metavar="TEXT", help="what is named like this")
    parser.add_argument("--out", type=Path, metavar="DIR", help="store the table as JSON too")
    parser.add_argument("--markdown", action="store_true", help="print the page's table")
    parser.add_argument("--recorded", action="store_true", help="only show what phantoms recorded")
    options = parser.parse_args(arguments)
    if options.recorded:
        print(recorded_table(), headlines_table(), sep="\n")
        return 0
    here = this_machine.machine()
    if options.file and not here.can_measure:
        print(f"--gpu, --headlines and --fits need a CUDA machine. {here.note}", file=sys.stderr)
        return 2
    # bitsandbytes says at every layer that it computes in half precision, and pages on GPUs only.
    warnings.filterwarnings("ignore", "MatMul8bitLt|Paged optimizers")
    only = options.only.lower()
    rows = list(large_rows(only, options.file) if options.file else small_rows(only))
    if not rows:
        print(f"nothing is named like {options.only!r}", file=sys.stderr)
        return 2
    versions = ", ".join(f"{name} {here.versions[name]}" for name in ("torch", "transformers"))
    machine = f"{here.name}, {versions}, {datetime.now(UTC):%Y-%m-%d}"
    print(markdown(rows, machine) if options.markdown else f"{machine}\n{table(rows)}")
    if options.out is not None:
        path = store(rows, options.out, options.file or FILE)
        print(f"stored in {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The calculator without a frontend: values are set, and what it says is read."""

import asyncio
import dataclasses
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from drawn import assert_fits

import labkit as lab
from labkit.plan.formula import Part, formula_estimate
from labkit.show import calculator as module
from labkit.show.calculator import FIRST, OTHER_MODEL, Calculator, calculator, verdict
from labkit.show.formula_bars import draw_formula_bars, part_table
from labkit.values import GIB, InputError

DEFAULTS = {"quantize": "none", "attention": "sdpa", "other_model": ""}
TINY = {"model": "SmolLM2-tiny", "gpu": "t4", "precision": "fp32", "seq_len": 128}


@pytest.fixture(scope="module")
def traced():
    """Estimates by their arguments: one model, traced once for each."""
    return {}


@pytest.fixture
def quick(monkeypatch, traced):
    """`estimate`, asked once for each recipe; the calls that the calculator makes."""
    calls = []

    def ask(model, *, gpu, recipe):
        calls.append((model, gpu.key, recipe))
        if calls[-1] not in traced:
            traced[calls[-1]] = lab.estimate(model, gpu=gpu, recipe=recipe)
        return traced[calls[-1]]

    monkeypatch.setattr(module, "estimate", ask)
    return calls


@pytest.fixture
def shown(quick):
    return calculator(**TINY)


def test_it_shows_formula_and_trace(shown):
    formula, trace = shown.pair
    assert formula.model == "SmolLM2-tiny"
    assert trace.recipe.seq_len == 128
    assert "It fits" in shown.said
    assert "No schedule of this recipe goes below" in shown.said
    [output] = shown.result.outputs
    assert "data:image/png" in output["data"]["text/html"]
    for part in formula.by_part:
        assert str(part) in output["data"]["text/plain"]


def test_a_change_answers_at_once_where_no_loop_runs(shown, quick):
    before = shown.pair
    shown.controls["batch_size"].value = 16
    assert shown.pair[1].recipe.batch_size == 16
    assert shown.pair[1].peak_allocated_bytes > before[1].peak_allocated_bytes
    shown.controls["batch_size"].value = 1  # known already
    assert [call[2].batch_size for call in quick] == [1, 16]
    assert shown.pair == before


def test_in_a_loop_only_the_last_of_several_changes_is_computed(shown, quick, monkeypatch):
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)
    quick.clear()

    async def drag():
        for value in (2, 4, 8, 16):
            shown.controls["batch_size"].value = value
        assert quick == []
        await asyncio.sleep(0.1)

    asyncio.run(drag())
    assert [call[2].batch_size for call in quick] == [16]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "bf16"}, "no bfloat16 in hardware"),
        ({"quantize": "nf4"}, "give them LoRA adapters"),
        ({"attention": "flash"}, "half precision only"),
        ({"model": OTHER_MODEL}, "name a folder"),
        ({"model": OTHER_MODEL, "other_model": "/no/such/<b>folder</b>"}, "unknown model"),
    ],
)
def test_a_refused_choice_says_why_and_the_next_one_works(shown, changes, reason):
    for name, value in changes.items():
        shown.controls[name].value = value
    assert "This cannot be trained" in shown.said
    assert reason in shown.said
    assert shown.pair is None
    assert shown.result.outputs == ()
    assert "<b>folder" not in shown.message.value
    for name in changes:
        shown.controls[name].value = {**DEFAULTS, **TINY}[name]
    assert "It fits" in shown.said


def test_what_fails_inside_is_said_and_not_raised(shown, monkeypatch):
    monkeypatch.setattr(module, "estimate", Mock(side_effect=ZeroDivisionError("<i>inside")))
    shown.controls["seq_len"].value = 256
    assert "could not be traced" in shown.said
    assert "ZeroDivisionError" in shown.said
    assert "<i>inside" not in shown.message.value


def test_a_folder_with_a_config_is_a_model(quick, tmp_path):
    lab.model("SmolLM2-tiny", device="meta").config.save_pretrained(tmp_path)
    own = calculator(**{**TINY, "model": str(tmp_path)})
    assert own.controls["model"].value == OTHER_MODEL
    assert own.controls["other_model"].layout.display is None
    assert own.pair[0].by_part == formula_estimate("SmolLM2-tiny", seq_len=128).by_part
    own.controls["model"].value = "SmolLM2-tiny"
    assert own.controls["other_model"].layout.display == "none"


def test_bad_first_values_are_refused(quick):
    for first, reason in [
        ({"rank": 3}, "does not offer rank=3"),
        ({"seq_len": 100}, "does not offer seq_len=100"),
        ({"gpu": "nope"}, "unknown GPU"),
    ]:
        with pytest.raises(InputError, match=reason):
            Calculator({**TINY, **first})


def test_a_card_without_bfloat16_begins_with_what_it_can_do(quick):
    assert Calculator({"gpu": "t4"}).setting["precision"] == "amp-fp16"
    assert Calculator({}).setting["precision"] == FIRST["precision"] == "bf16"
    assert Calculator({"gpu": "t4", "precision": "bf16"}).setting["precision"] == "bf16"


def test_without_a_frontend_there_is_a_static_figure(quick, monkeypatch):
    bundles = []
    monkeypatch.setattr(module, "display", lambda bundle, raw: bundles.append(bundle))
    made = calculator(**TINY)
    [bundle] = bundles
    assert '<img alt="Stacked bars' in bundle["text/html"]
    assert "It fits" in bundle["text/plain"]
    view = bundle["application/vnd.jupyter.widget-view+json"]
    assert view["model_id"] == made.widget.model_id


# --- words and pictures ---------------------------------------------------------------------------


def pair(**how):
    how = {"batch_size": 4, "seq_len": 128, **how}
    return formula_estimate("SmolLM2-tiny", **how), lab.estimate("SmolLM2-tiny", gpu="t4", **how)


def with_sizes(formula, trace, *, reserved, capacity, total):
    """The same pair on a card of another size, with a formula that says something else."""
    run = dataclasses.replace(trace.run, reserved_bytes=reserved, capacity_bytes=capacity)
    rest = total - sum(t.nbytes for t in formula.terms[1:])
    terms = (dataclasses.replace(formula.terms[0], nbytes=rest), *formula.terms[1:])
    return dataclasses.replace(formula, terms=terms), dataclasses.replace(trace, run=run)


def test_verdicts():
    found = pair()
    cases = [
        ((4 * GIB, 8 * GIB, 5 * GIB), "✔", "It fits", "same answer"),
        ((9 * GIB, 8 * GIB, 5 * GIB), "✘", "does not fit", "out-of-memory"),
        ((9 * GIB, 8 * GIB, 10 * GIB), "✘", "does not fit", "same answer"),
        ((4 * GIB, 8 * GIB, 10 * GIB), "✔", "It fits", "larger card"),
        ((8 * GIB - 1, 8 * GIB, 5 * GIB), "!", "Too close to call", "same answer"),
    ]
    for (reserved, capacity, total), symbol, head, line in cases:
        changed = with_sizes(*found, reserved=reserved, capacity=capacity, total=total)
        text, look = verdict(*changed)
        assert look.symbol == symbol
        assert head in text.splitlines()[0]
        assert line in text.splitlines()[1]


def test_figure_table_and_text_say_the_same():
    pairs = {"short $x": pair(), "long": pair(batch_size=16)}
    figure = draw_formula_bars(pairs, title="Two")
    assert_fits(figure)
    for name, (formula, trace) in pairs.items():
        assert f"{name}: formula, −" in figure.alt
        for nbytes in (formula.total_bytes, trace.peak_allocated_bytes):
            assert f"together {lab.format_bytes(nbytes)}" in figure.alt
        for row in formula.beside(trace.run):  # a part of its own, not among the activations
            if row.part is Part.LOGITS:
                for nbytes in (row.formula_bytes, row.peak_bytes):
                    assert f"{Part.LOGITS} {lab.format_bytes(nbytes)}" in figure.alt
    [far] = [t for t in figure.axes[0].texts if "can hold" in t.get_text()]
    assert far.get_text().endswith("→")  # named, not drawn
    formula, trace = pairs["long"]
    assert "2 × 4 P" in part_table(formula, trace).text
    assert " 1.00 " in part_table(formula, trace).text
    rows = formula.beside(trace.run)
    missed = max(rows, key=lambda row: row.peak_bytes - (row.formula_bytes or 0))
    assert missed.part in (Part.LOGITS, Part.ACTIVATIONS)
    assert f"misses most at the peak is {missed.part}" in verdict(formula, trace)[0]


# --- the page of its own --------------------------------------------------------------------------

ROOT = Path(lab.__file__).resolve().parents[1]
PAGE = json.loads((ROOT / "page" / "voila.json").read_text(encoding="utf-8"))
NOTEBOOK = ROOT / "notebooks" / "03_memory_calculator.ipynb"


def test_the_page_keeps_the_calculator_and_its_explanation_only():
    removed = set(PAGE["TagRemovePreprocessor"]["remove_cell_tags"])
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    kept = [cell for cell in cells if not removed & set(cell["metadata"]["tags"])]
    assert [cell["cell_type"] for cell in kept] == ["code", "markdown", "code"]
    assert removed | {"parameters", "explore"} >= {t for c in cells for t in c["metadata"]["tags"]}


def test_the_kept_cells_run_without_the_others(quick, monkeypatch):
    monkeypatch.setattr(module, "FIRST", TINY)
    removed = set(PAGE["TagRemovePreprocessor"]["remove_cell_tags"])
    space = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code" and not removed & set(cell["metadata"]["tags"]):
            exec("".join(cell["source"]), space)
    assert isinstance(space["page"], Calculator)
    assert space["page"].pair is not None


def test_the_page_is_for_this_machine_and_fetches_nothing_from_others():
    assert PAGE["Voila"]["ip"] == "127.0.0.1"
    assert PAGE["VoilaConfiguration"]["strip_sources"] is True
    assert PAGE["VoilaConfiguration"]["show_tracebacks"] is False
    name = PAGE["VoilaConfiguration"]["template"]
    template = ROOT / "page" / "voila" / "templates" / name / "index.html.j2"
    assert "http" not in template.read_text(encoding="utf-8")

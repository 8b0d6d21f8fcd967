"""The guide's table of public scripts is made of what was recorded."""

import json
from pathlib import Path

from benchmarks import fit
from benchmarks.scripts import PAGE, RECORD, SCRIPTS, same, table
from gpumem.hardware import catalogue
from gpumem.units import format_bytes


def test_the_guide_shows_what_was_recorded():
    record = json.loads(Path(RECORD).read_text(encoding="utf-8"))
    assert set(record["results"]) == {script.trains for script in SCRIPTS}
    assert not any(result["faults"] for result in record["results"].values())
    for script in SCRIPTS:
        result = record["results"][script.trains]
        if "unwatched" in result:
            assert same(result, "unwatched") is not bool(script.decides)
        if "followed" in result:
            assert same(result, "followed")
    guide = PAGE.read_text(encoding="utf-8")
    assert table(record["results"], record["note"]) in guide
    assert f"runs {len(SCRIPTS)} training scripts" in guide


def test_the_page_of_scripts_made_to_fit_shows_what_was_recorded():
    record = json.loads(fit.RECORD.read_text(encoding="utf-8"))
    assert fit.PAGE.read_text(encoding="utf-8") == fit.page(record)
    assert fit.shown(record)
    for example in fit.shown(record):
        found = record[example.file]
        assert found["answer"].startswith("It does not fit")
        assert format_bytes(found["reserved_bytes"]) in found["answer"]
        assert found["reserved_bytes"] <= 0.95 * catalogue.gpu(example.gpu).budget_bytes

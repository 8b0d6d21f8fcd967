"""The guide's table of public scripts is made of what was recorded."""

import json
from pathlib import Path

from benchmarks.scripts import PAGE, RECORD, SCRIPTS, same, table


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

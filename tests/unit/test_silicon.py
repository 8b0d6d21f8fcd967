"""The page of published measurements shows what was recorded."""

from pathlib import Path

from benchmarks.silicon import HELD, PAGE, beyond, error, page, read

README = Path(__file__).parents[2] / "README.md"


def test_the_page_shows_what_was_recorded():
    assert page(read()) in PAGE.read_text(encoding="utf-8")


def test_every_row_has_an_answer_or_says_why_it_has_none():
    rows = read()
    assert len(rows) == 799 + 2 * 57
    for row in rows:
        assert row["bytes"] or row["reason"] or row["remark"], row


def test_what_is_run_at_night_is_within_its_bounds():
    held = [r for r in read() if HELD.search(r["case"]) and r["torch"] and not r["reason"]]
    assert len({row["source"] for row in held}) == 2
    assert len([row for row in held if error(row) is not None]) >= 60
    assert not [row["case"] for row in held if beyond(row)]


def test_the_readme_says_what_was_recorded():
    ran = [
        row for row in read() if row["torch"] and not row["reason"] and row["kind"] == "allocated"
    ]
    liger = [row for row in ran if row["source"] == "Liger-Kernel"]
    equal = sum(row["bytes"] == row["published_bytes"] for row in liger)
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert f"Of {len(liger)} figures of Liger-Kernel that were compared, {equal} are equal" in text
    fp16 = [r for r in ran if r["source"] == "fitcheck-llm" and " none " in r["case"]]
    assert all(row["bytes"] == row["published_bytes"] for row in fp16)
    assert f"a T4 allocated in {len(fp16)} runs in FP16" in text

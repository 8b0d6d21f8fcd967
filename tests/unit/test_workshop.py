"""The workshop kit: a hub, and slides, which tests/browser/test_slides.py opens."""

import json
import re
from pathlib import Path

import nbformat
import pytest
import yaml
from traitlets.config import PyFileConfigLoader

ROOT = Path(__file__).resolve().parents[2]
WORKSHOP = ROOT / "workshop"


def test_values_for_kubernetes():
    values = yaml.safe_load((WORKSHOP / "jupyterhub-values.yaml").read_text(encoding="utf-8"))
    user = values["singleuser"]
    assert "dummy" not in json.dumps(values), "a class's values must not invite everybody"
    [default] = [profile for profile in user["profileList"] if profile.get("default")]
    assert "kubespawner_override" not in default, "the default takes nobody's GPU"
    assert (ROOT / user["defaultUrl"].removeprefix("/lab/tree/gpu-memory-lab/")).is_file()
    assert user["extraEnv"]["OMP_NUM_THREADS"] == str(user["cpu"]["limit"])


def test_a_hub_of_ones_own_is_closed_until_it_is_opened(monkeypatch, tmp_path):
    def config():
        return PyFileConfigLoader("jupyterhub_config.py", path=str(WORKSHOP)).load_config()

    for name in ("CLASS_FOLDER", "CLASS_GIB", "LABKIT_CACHE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLASS_PASSWORD", "long enough")
    found = config()
    assert found.JupyterHub.ip == "127.0.0.1"
    assert found.JupyterHub.authenticator_class == "shared-password"
    assert found.SharedPasswordAuthenticator.user_password == "long enough"
    assert (tmp_path / "class").stat().st_mode & 0o777 == 0o700
    pattern = re.compile(found.Authenticator.username_pattern)  # asked with `match`
    assert all(map(pattern.match, ("ada", "a" * 31, "ada-l_2")))
    assert not any(map(pattern.match, ("a" * 32, "ada;rm", "ada\n", "2ada", "..", "ada/..")))
    for name, value in (("CLASS_GIB", "2.5"), ("CLASS_PASSWORD", "short")):
        monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit, match=f"Set {name} to"):
            config()


def test_teachers_are_sent_to_headings_figures_and_minutes_that_are_there():
    """A title may be made by the run: what is quoted of it stands in the code."""
    wrong, minutes = [], {}
    for path in sorted(WORKSHOP.glob("*.md")):
        for line in path.read_text(encoding="utf-8").splitlines():
            link = re.match(r"\|.*?\(\.\./(notebooks/\d\d_\w+\.ipynb)\) \|", line)
            if link is None:
                continue
            book = nbformat.read(ROOT / link[1], as_version=4)
            source = "\n".join(cell.source for cell in book.cells)
            quotes = re.findall(r'"(.+?)"', line)
            wrong += [(path.name, link[1], quote) for quote in quotes if quote not in source]
            if path.name == "instructor-notes.md":
                said = re.search(r"^(\d+) min", book.cells[0].source, re.MULTILINE)[1]
                minutes[link[1]] = line.split(" | ")[1], said
    assert not wrong
    assert len(minutes) == len(list((ROOT / "notebooks").glob("*.ipynb")))
    assert {name: said for name, (said, takes) in minutes.items() if said != takes} == {}


# --- slides -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config():
    return PyFileConfigLoader("slides_config.py", path=str(WORKSHOP)).load_config()


def test_every_lesson_that_asks_for_a_number_has_its_question(config):
    """Questions are read from the code, which may be written in several ways."""
    [cut_up] = config.SlidesExporter.preprocessors
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        book = nbformat.read(path, as_version=4)
        asked = sum(
            c.source.count("lab.predict(")
            for c in book.cells
            if c.cell_type == "code" and "predict" in c.metadata.tags
        )
        made, _ = cut_up().preprocess(book, {})
        found = [c.source for c in made.cells if re.match(r"### .+\?$", c.source)]
        assert len(found) == asked, path.name
        nbformat.validate(made)


def test_headings_in_code_are_none(config):
    text = "# a\n\nText.\n\n```\n# b\n\n- c\n```\n\n### c\nmore"
    cell = nbformat.v4.new_markdown_cell(text, metadata={"tags": ["idea"]})
    [cut_up] = config.SlidesExporter.preprocessors
    made, _ = cut_up().preprocess(nbformat.v4.new_notebook(cells=[cell]), {})
    shown = [(part.metadata["slideshow"]["slide_type"], part.source) for part in made.cells]
    assert shown == [
        ("slide", "# a\n\n```\n# b\n\n- c\n```"),
        ("notes", "# a\n\nText.\n\n```\n# b\n\n- c\n```"),
        ("subslide", "### c"),
        ("notes", "### c\nmore"),
    ]


def recorded_runs(lesson):
    record = json.loads((ROOT / f"results/h200/{lesson}.json").read_text(encoding="utf-8"))
    return record["runs"]


def test_lessons_04_and_07_quote_the_seconds_that_lesson_04_recorded():
    seconds = {"fp32": {}, "amp-fp16": {}}
    for run in recorded_runs("04"):
        steps, how = run["step_seconds"], run["parameters"]
        seconds[how["precision"]][how["batch_size"]] = sum(steps) / len(steps)
    fp32, amp = seconds.values()
    numbers = sorted(fp32)
    head = " | ".join(["| rows", *map(str, numbers)])
    text = (ROOT / "notebooks/07_gradient_accumulation.ipynb").read_text(encoding="utf-8")
    assert head in text
    assert " | ".join(["| seconds", *(f"{fp32[n]:.3f}" for n in numbers)]) in text
    assert f"rows take {4 * fp32[2]:.3f} s, one step of eight {fp32[8]:.3f} s" in text
    text = (ROOT / "notebooks/04_mixed_precision.ipynb").read_text(encoding="utf-8")
    assert head in text
    for name, means in (("FP32", fp32), ("AMP", amp)):
        assert " | ".join([f"| {name}, ms", *(f"{1000 * means[n]:.1f}" for n in numbers)]) in text
    gains = [f"{100 * (fp32[n] / amp[n] - 1):.0f} %" for n in numbers]
    assert " | ".join(["| faster by", *gains]) in text
    one_row = recorded_runs("04")[0]
    assert one_row["parameters"]["batch_size"] == 1
    assert "{:.0f} and {:.0f} ms".format(*(1000 * s for s in one_row["step_seconds"])) in text


def test_lesson_06_quotes_what_it_recorded():
    kept, recomputed = recorded_runs("06")[:2]
    assert (kept["name"], recomputed["name"]) == ("keep everything", "recompute every block")
    assert kept["losses"] == recomputed["losses"]
    text = (ROOT / "notebooks/06_gradient_checkpointing.ipynb").read_text(encoding="utf-8")
    for run in (kept, recomputed):
        steps = " | ".join(f"{seconds:.3f} s" for seconds in run["step_seconds"])
        assert f"| {run['name']} | {steps} |" in text
    slower = sum(recomputed["step_seconds"]) / sum(kept["step_seconds"]) - 1
    flops, moved = (recomputed[key] / kept[key] - 1 for key in ("flops", "moved_bytes"))
    sums = ["({:.3f} + {:.3f})".format(*run["step_seconds"]) for run in (recomputed, kept)]
    assert f"{100 * slower:.0f} % slower, {' / '.join(sums)} = {1 + slower:.2f}" in text
    assert f"for {100 * flops:.0f} % more arithmetic" in text
    assert f"{100 * moved:.0f} % more bytes" in text

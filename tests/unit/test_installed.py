"""From the package alone, without a clone, every command works."""

import re
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from installed import ROOT, build, install, run
from lesson_files import write_lesson

#: Folders of the clone -> where the wheel has them.
PACKAGES = ("gpumem", "phantom_gpu", "labkit")
PLACES = {name: name for name in PACKAGES}
PLACES |= {"notebooks": "labkit/notebooks", "results": "labkit/recorded"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_the_wheel_has_all_that_runs_and_the_sdist_builds_the_same(wheel, tmp_path):
    held = contents(wheel)
    for name in run("git", "ls-files", *PLACES, folder=ROOT).splitlines():
        folder, _, rest = name.partition("/")
        assert held[f"{PLACES[folder]}/{rest}"] == (ROOT / name).read_bytes()
    assert not [name for name in held if not name.startswith((*PACKAGES, "gpu_memory_lab-"))]
    with tarfile.open(build("sdist", tmp_path / "sdist")) as file:
        file.extractall(tmp_path, filter="data")
    [source] = tmp_path.glob("gpu_memory_lab-*")
    again = contents(build("wheel", tmp_path / "again", source))
    assert {name: again[name] for name in held} == held


@pytest.fixture(scope="module")
def labkit(wheel, tmp_path_factory):
    """Call labkit's command in a folder away from the clone."""
    binaries = install(wheel, tmp_path_factory.mktemp("environment") / "venv")
    away = tmp_path_factory.mktemp("away")

    def call(*arguments, **options):
        return run(binaries / "labkit", *arguments, folder=away, **options)

    where = run(binaries / "python", "-c", "import labkit; print(labkit.__file__)", folder=away)
    call.folder, call.package = away, Path(where.strip()).parent
    assert call.package.is_relative_to(binaries.parent / "lib")
    return call


SLOW_COMMANDS = {"advise", "cheat-sheet"}


@pytest.mark.slow
def test_every_command_works_away_from_a_clone(labkit):
    tried = set(SLOW_COMMANDS)

    def said(command, *arguments, **options):
        tried.add(command)
        return labkit(command, *arguments, **options)

    assert "problem" not in said("doctor")
    assert "Llama-3.1-8B" in said("models")
    assert "h100" in said("gpus")
    assert "Simulated in" in said("estimate", "SmolLM2-135M", "--gpu", "t4")
    (labkit.folder / "train.py").write_text("import torch\ntorch.ones(1, device='cuda')\n")
    if torch.version.cuda:
        assert "It fits" in said("phantom", "train.py")
    else:
        sentence = said("phantom", "train.py", exit_code=2)
        assert "is not a CUDA build, which the phantom GPU needs" in sentence
        assert sentence.count("\n") == 1
    said("record", "--check", labkit.package / "recorded" / "phantom" / "t4")

    count = len(list((labkit.package / "notebooks").glob("[0-9][0-9]_*.ipynb")))
    assert f"{count} lessons written into" in said("start", "lessons", "--no-open")
    # A lesson in the package that writes where it runs: here, not in the package.
    writes = "import labkit as lab\nlab.start('06')\nopen('written', 'w').close()"
    write_lesson(labkit.package / "notebooks", writes, name="06_writes")
    said("run", "writes")
    assert "Report: " in said("report")
    assert "Participants: 1; results: 1;" in said("report", "build/course", "--anonymous")
    left = {path.name for path in labkit.folder.iterdir()}
    assert left == {"train.py", "lessons", "written", "build", "report.html"}

    listed = re.findall(r"^    ([a-z-]+)\s", labkit("--help"), re.MULTILINE)
    assert tried == set(listed)


@pytest.mark.nightly
@pytest.mark.slow
def test_what_takes_long_works_there_too(labkit):
    labkit("run", "00")
    assert "recipes simulated" in labkit("advise", "SmolLM2-135M", "--gpu", "t4")
    small = ("--model", "SmolLM2-135M", "--batch-size", "1", "--seq-len", "32")
    assert "## Order of adoption" in labkit("cheat-sheet", *small)

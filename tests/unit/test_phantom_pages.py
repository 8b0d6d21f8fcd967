"""Every `labkit phantom` command that a page shows is one that the command line takes."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

import labkit as lab
from labkit.cli import main
from labkit.phantom import kernel, program
from labkit.phantom.program import Verdict
from labkit.values import GIB

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/PHANTOM.md", "docs/CI.md")
COMMAND = re.compile(r"^ {4}(?:\S*/)?labkit phantom ([^#>|\n]+)", re.MULTILINE)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What `run_program` is asked for, which answers that nothing used a GPU."""
    calls = []

    def run_program(command, *, gpu, gpus, **options):
        calls.append({"command": command[1:], "gpu": gpu, "gpus": gpus, **options})
        return Verdict(lab.gpu(gpu), gpus, GIB, [], "", 0)

    monkeypatch.setattr(program, "run_program", run_program)
    monkeypatch.setattr(kernel, "install_kernel", lambda gpu, count: (lab.gpu(gpu).name, "here"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return calls


@pytest.mark.parametrize("page", PAGES)
def test_commands_on_pages_are_taken(page, asked, capsys):
    commands = COMMAND.findall((ROOT / page).read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        assert main.main(["phantom", *shlex.split(command)]) in (0, 2)
        assert capsys.readouterr().err == ""


def test_the_workflow_is_one_of_github_and_its_command_says_what_the_page_says(asked, capsys):
    page = (ROOT / "docs/CI.md").read_text(encoding="utf-8")
    workflow = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    assert workflow["permissions"] == {"contents": "read"}
    [job] = workflow["jobs"].values()
    own = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    pinned = [step["uses"] for step in job["steps"] if "uses" in step]
    assert pinned
    assert all(f"uses: {action} #" in own for action in pinned)
    program, phantom, *words = shlex.split(job["steps"][-1]["run"])
    assert (program, phantom) == ("labkit", "phantom")
    assert main.main([phantom, *words]) == 2  # as nothing ran
    [call] = asked
    assert call["command"] == ["train.py", "--batch-size", "8"]
    assert (call["gpu"], call["steps"], call["budget_bytes"]) == ("rtx-4090", 3, 22 * GIB)

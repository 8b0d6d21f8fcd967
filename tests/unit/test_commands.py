"""A cell whose shell command fails, in a shell of IPython without a notebook."""

from subprocess import CalledProcessError

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from labkit.lesson.shell_commands import let_them_fail


@pytest.fixture(scope="module")
def shell():
    made = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    for _ in range(2):  # two lessons in one kernel
        let_them_fail(made)
    return made


@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("!echo first; echo told >&2; exit 3", 3),
        ("def f(where):\n    !test {where} != local\nf('local')", 1),
        ("%%sh\necho told >&2\nfalse", 1),
    ],
)
def test_a_cell_fails_with_its_command(shell, capfd, cell, status):
    found = shell.run_cell(cell)
    with pytest.raises(CalledProcessError, match=f"exit status {status}"):
        found.raise_error()
    assert ("told" in cell) == ("told" in "".join(capfd.readouterr()))


def test_a_command_that_succeeds_shows_what_it_prints(shell, capsys):
    name = "Ada"  # noqa: F841 (not a variable of the cell)
    shell.run_cell("name = 'Bob'\n!echo $name {name} '{{}}'\n!true").raise_error()
    assert capsys.readouterr().out.split() == ["Bob", "Bob", "{}"]
    shell.run_cell("%%sh --out kept\necho hidden").raise_error()
    assert shell.user_ns["kept"] == "hidden\n"
    assert shell.user_ns["_exit_code"] == 0

"""A cell whose shell command fails, in a shell of IPython without a notebook."""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from labkit.lesson.shell_commands import CommandFailed, let_them_fail


@pytest.fixture(scope="module")
def shell():
    made = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    for _ in range(2):  # two lessons in one kernel
        let_them_fail(made)
    return made


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("!echo first; echo 'no such port' >&2; exit 3", r"^no such port \(.* status is 3\)$"),
        ("!echo 'ValueError: lost'; echo; echo =====; exit 1", r"^ValueError: lost \("),
        ("def f(where):\n    !echo {where}; false\nf('local')", r"^local \("),
        ("%%sh\necho out\necho told >&2\nfalse", r"^told \(.* status is 1\)$"),
        ("%%bash\nexit 2", r"^it printed nothing \(.* status is 2\)$"),
    ],
)
def test_it_fails_with_what_the_command_said_last(shell, capfd, cell, words):
    found = shell.run_cell(cell)
    with pytest.raises(CommandFailed, match=words):
        found.raise_error()
    assert "told" in capfd.readouterr().err if "told" in cell else True


def test_a_command_that_succeeds_shows_what_it_prints(shell, capsys):
    name = "Ada"  # noqa: F841 (not a variable of the cell)
    shell.run_cell("name = 'Bob'\n!echo $name {name} '{{}}'\n!true").raise_error()
    assert capsys.readouterr().out.split() == ["Bob", "Bob", "{}"]
    shell.run_cell("%%sh --out kept\necho hidden").raise_error()
    assert shell.user_ns["kept"] == "hidden\n"
    assert shell.user_ns["_exit_code"] == 0

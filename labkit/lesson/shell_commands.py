"""Shell commands in cells: where ``!command``, ``%%sh`` or ``%%bash`` fails, so does its cell.

Left to itself, IPython goes on after a ``!command`` that failed, and a later cell fails instead.

Limits: ``lines = !command`` hears no status. On Colab, whose ``!`` is its own, nothing changes.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from subprocess import CalledProcessError
from typing import Any

from IPython.utils import process

MOST_CHARACTERS = 20_000  # kept of what a command prints


class CommandFailed(RuntimeError):  # noqa: N818 (a sentence, not a category)
    """A shell command ended with a status that is not 0; the message quotes what it said last."""


class _Ear:
    """A stream that remembers the end of what is written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.heard = stream, ""

    def write(self, text: str) -> int:
        self.heard = (self.heard + text)[-MOST_CHARACTERS:]
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _quoted() -> Iterator[None]:
    """Quote, in place of a status, the last line that names an error; else the last line."""
    out, err = _Ear(sys.stdout), _Ear(sys.stderr)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    except CalledProcessError as error:
        lines = [line for line in f"{out.heard}\n{err.heard}".splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"(Error|Exception): \S", line)]
        said = (errors or lines or ["it printed nothing"])[-1].strip()
        raise CommandFailed(f"{said} (the command's exit status is {error.returncode})") from None


def let_them_fail(shell: Any) -> None:
    """Make the commands of IPython's ``shell`` raise `CommandFailed`; None stands for no shell."""
    if shell is None or "system" in vars(shell):  # done before
        return
    if not type(shell).system.__module__.startswith(("IPython", "ipykernel")):
        return

    def system(command: str) -> None:
        if command.rstrip().endswith("&"):
            raise OSError("IPython runs no command in the background")
        command = shell.var_expand(command, depth=1)  # our caller's variables
        with _quoted():
            status = shell.user_ns["_exit_code"] = process.system(command)
            if status:
                raise CalledProcessError(status, command)

    shell.system = system
    for name in ("bash", "script", "sh"):
        shell.magics_manager.magics["cell"][name] = _quoted()(shell.find_cell_magic(name))

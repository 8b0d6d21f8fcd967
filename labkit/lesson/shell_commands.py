"""Shell commands in cells: where ``!command`` fails, so does its cell, as with ``%%sh``.

Left to itself, IPython goes on after a ``!command`` that failed, and a later cell fails instead.

Limits: ``lines = !command`` hears no status. On Colab, whose ``!`` is its own, nothing changes.
"""

from subprocess import CalledProcessError
from typing import Any

from IPython.utils import process


def let_them_fail(shell: Any) -> None:
    """Make ``!command`` in IPython's ``shell`` raise `CalledProcessError`; None is no shell."""
    if shell is None or "system" in vars(shell):  # done before
        return
    if not type(shell).system.__module__.startswith(("IPython", "ipykernel")):
        return

    def system(command: str) -> None:
        if command.rstrip().endswith("&"):
            raise OSError("IPython runs no command in the background")
        command = shell.var_expand(command, depth=1)  # our caller's variables
        status = shell.user_ns["_exit_code"] = process.system(command)
        if status:
            raise CalledProcessError(status, command)

    shell.system = system

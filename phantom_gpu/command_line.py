"""Read the program to run from its words: ``SCRIPT``, ``-m MODULE`` or ``-- COMMAND``."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from gpumem.files import SOURCE
from gpumem.inputs import InputError

_PROCESSES = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_](?:processes|gpus))(?:=(\d+))?")


def command_line(words: Sequence[str]) -> list[str]:
    """Return the program that ``SCRIPT``, ``-m MODULE`` or ``-- COMMAND`` stands for.

    Raises:
        InputError: there is none, or the script is no file.
    """
    if words[:1] == ["--"] and len(words) > 1:
        return list(words[1:])
    if words[:1] == ["-m"] and len(words) > 1:
        return [sys.executable, *words]
    if not words or words[0].startswith("-"):
        raise InputError("say what to run: SCRIPT, -m MODULE, or -- COMMAND, after the options")
    if not Path(words[0]).is_file():
        raise InputError(f"there is no script {words[0]!r}")
    return [sys.executable, *words]


def processes_of(words: Sequence[str]) -> int:
    """Return how many processes a launcher's options ask for; 1 where they say nothing."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        found = _PROCESSES.fullmatch(word)
        number = (found[1] or following) if found else ""
        if number.isdigit():
            return int(number)
    return 1


def phantom_python() -> str:
    """Return a Python whose PyTorch is the CUDA build: this one, else that of ``make phantom``."""
    import torch  # here: the command itself starts without it

    beside = SOURCE / ".venv-phantom" / "bin" / "python"
    return str(beside) if not torch.version.cuda and beside.exists() else sys.executable

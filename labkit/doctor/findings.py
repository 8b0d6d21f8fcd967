"""What a check of `labkit doctor` found, and how it reads on a terminal.

Limits: text inside backticks, a command or a path, is never broken, so that it can be pasted; a
line may then be longer than the terminal.
"""

import importlib.machinery
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

SYMBOLS = {"ok": "✓", "note": "·", "problem": "✗", "remedy": "→"}
PLAIN = {"ok": "+", "note": "-", "problem": "!", "remedy": ">"}  # where the terminal has no others
SHOWN_CHARACTERS = 300  # of an error that somebody else wrote


class Finding(NamedTuple):
    """``status`` is ``ok``, ``note`` (works, but less) or ``problem``; then there is a remedy."""

    status: str
    subject: str
    text: str
    remedy: str = ""


Check = Callable[[], Iterable[Finding]]


def first_line(error: object) -> str:
    """What an exception says, in short: one line without control characters."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    printable = "".join(letter if letter.isprintable() else " " for letter in line)
    return " ".join(printable.split())[:SHOWN_CHARACTERS]


def pip(arguments: str) -> str:
    """The command that runs this Python's own pip, to be pasted in the current folder.

    Where it has none (`uv venv` brings none), the command installs it first.
    """
    python = Path(sys.executable)
    found = shutil.which("pip")
    if found and Path(found).parent == python.parent:
        return f"`pip {arguments}`"
    here = Path.cwd()
    shown = os.path.relpath(python, here) if python.is_relative_to(here) else str(python)
    # Not `find_spec`: setuptools takes that for a run of pip, and its own import then fails.
    has_pip = importlib.machinery.PathFinder.find_spec("pip")
    first = "" if has_pip else f"{quoted(shown)} -m ensurepip && "
    return f"`{first}{quoted(shown)} -m pip {arguments}`"


def own_pip(sentence: str) -> str:
    """A sentence whose commands begin with a bare ``pip``, with this Python's own instead."""
    return re.sub(r"`pip ([^`]+)`", lambda command: pip(command[1]), sentence)


def quoted(path: object) -> str:
    """A path as any shell takes it: in double quotes where it needs them."""
    text = str(path)
    plain = text and all(letter.isalnum() or letter in "/\\:._-+~" for letter in text)
    return text if plain else f'"{text}"'


def as_text(findings: Iterable[Finding], *, columns: int, encoding: str) -> str:
    """The findings for a terminal: what is well first, problems last, where the eye rests.

    Args:
        columns: of the terminal.
        encoding: what it can show; signs are plain ASCII where it has no others.
    """
    order = ("ok", "note", "problem")
    ordered = sorted(findings, key=lambda finding: order.index(finding.status))
    signs = SYMBOLS if _can_show("".join(SYMBOLS.values()), encoding) else PLAIN
    width = max((len(finding.subject) for finding in ordered), default=0)
    lines = []
    for finding in ordered:
        first = f"{signs[finding.status]} {finding.subject:<{width}}  "
        lines += _wrapped(finding.text, first, columns, quotes="")
        if finding.remedy and finding.status != "ok":
            words = finding.remedy
            # A line that is a command and nothing else is pasted as it stands.
            quotes = "" if words[0] == words[-1] == "`" and words.count("`") == 2 else "`"
            lines += _wrapped(words, f"  {'':<{width}}  {signs['remedy']} ", columns, quotes)
    lines.append(_summary(ordered))
    return "\n".join(lines).encode(encoding, "replace").decode(encoding)


def _can_show(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def _wrapped(text: str, first: str, columns: int, quotes: str) -> list[str]:
    parts = text.split("`")  # every second one stood between backticks
    parts[1::2] = [f"{quotes}{part}{quotes}".replace(" ", "\0") for part in parts[1::2]]
    lines = textwrap.wrap(
        "".join(parts),
        width=max(columns, len(first) + 20),
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines] or [first.rstrip()]


def _summary(findings: list[Finding]) -> str:
    problems = sum(finding.status == "problem" for finding in findings)
    notes = sum(finding.status == "note" for finding in findings)
    if not problems:
        less = " What is noted works, but shows less." if notes else ""
        return f"All is well.{less}"
    return f"{problems} problem{'s' if problems != 1 else ''}."

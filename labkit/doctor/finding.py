"""What a check of `labkit doctor` found."""

import shlex
import sys
from typing import NamedTuple


class Finding(NamedTuple):
    """``status`` is ``ok``, ``note`` (works, but shows less) or ``problem``."""

    status: str
    subject: str
    text: str
    remedy: str = ""


def pip_install(arguments: str) -> str:
    """Return the command that installs packages for this Python."""
    return f"`{shlex.quote(sys.executable)} -m pip install {arguments}`"

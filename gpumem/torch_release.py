"""Which release of PyTorch an answer follows: the installed one, or the one that will train.

    with following("2.10"):
        estimate("SmolLM2-135M", gpu="t4")

What differs between releases: which of several free blocks the allocator takes (2.12, 2.13), the
workspaces of cuBLAS and cuBLASLt (2.9, 2.12, 2.15), and whether the memory-efficient attention
kernel takes grouped heads (2.14). Each place says so and names its source.

Limits: nothing else is followed. PyTorch's Python code, its shapes and its choice of operators are
those of the installed release.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version

from gpumem.inputs import InputError

OLDEST, NEWEST = "2.6", "2.15"  # of the releases whose rules were read
_asked: ContextVar[str | None] = ContextVar("asked", default=None)


def torch_release() -> str:
    """Return the release that answers follow now, as "2.13"; a nightly build counts as its own."""
    # A torch that was copied without its metadata says its version only once it is imported.
    installed = getattr(sys.modules.get("torch"), "__version__", None) or version("torch")
    return _asked.get() or ".".join(str(installed).split(".")[:2])


def follows(release: str) -> bool:
    """Return whether answers follow ``release`` or a newer one now."""
    return _numbers(torch_release()) >= _numbers(release)


@contextmanager
def following(release: str | None) -> Iterator[None]:
    """Let answers follow ``release``, as "2.10" or "2.10.1"; None leaves them as they are.

    Raises:
        InputError: it is no release, or older or newer than those whose rules were read.
    """
    if release is None:
        yield
        return
    if not isinstance(release, str) or not re.fullmatch(r"\d+\.\d+(\.\d+)?", release):
        raise InputError(f"a release of PyTorch is written as 2.10, not {release!r}")
    if not _numbers(OLDEST) <= _numbers(release) <= _numbers(NEWEST):
        raise InputError(f"the rules of PyTorch {OLDEST} to {NEWEST} are known, not of {release}")
    token = _asked.set(".".join(release.split(".")[:2]))
    try:
        yield
    finally:
        _asked.reset(token)


def _numbers(release: str) -> tuple[int, int]:
    major, minor = release.split(".")[:2]
    return int(major), int(minor)

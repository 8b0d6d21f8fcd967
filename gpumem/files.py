"""Write files atomically; read and check JSON records; temporary folders."""

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gpumem.inputs import InputError
from gpumem.units import format_bytes

#: What holds our packages: a clone, or the environment that they are installed in. Symbolic links
#: stay, as they do in the names of files in tracebacks.
SOURCE = Path(__file__).absolute().parents[1]
#: The folders of our packages: code in them is not the user's.
PACKAGES = tuple(SOURCE / name for name in ("gpumem", "phantom_gpu", "labkit"))
#: Where `labkit run` writes unless told otherwise.
RUN_FOLDER = Path("build", "course")
LARGEST_FILE_BYTES = 20 << 20
Read = TypeVar("Read")


def cache_folder() -> Path:
    """Return the folder for what is made once: ``$LABKIT_CACHE``, or ``~/.cache/gpu-memory-lab``.

    It need not exist yet.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("LABKIT_CACHE") or f"{base}/gpu-memory-lab").expanduser()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` so that ``path`` holds either what it held before, or all of it.

    Raises:
        OSError: the folder cannot be written or the disk is full; ``path`` is untouched then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_file(path: Path, read: Callable[[Any], Read], what: str) -> Read:
    """Return what ``read`` makes of the JSON in ``path``, which is packed if it ends in ``.gz``.

    Raises:
        InputError: there is no such file, it is too large, not JSON, or ``read`` refuses it.
    """
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise InputError(f"{path} is larger than {format_bytes(LARGEST_FILE_BYTES)}")
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        return read(json.loads(data.decode("utf-8")))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (
        ValueError,
        RecursionError,
        EOFError,
        zlib.error,
    ) as error:  # InputErrors are ValueErrors
        raise InputError(f"{path} is not {what} we can read: {error}") from error


class TemporaryFolder(tempfile.TemporaryDirectory):
    """A new folder that is removed when it is closed, forgotten, or Python ends.

    A ``with`` block gives its path. ``parent`` is the folder to make it in, by default where
    temporary files go; an `InputError` says that none can be made there.
    """

    def __init__(self, parent: str | os.PathLike | None = None) -> None:
        try:
            super().__init__(prefix="labkit-disk-", dir=parent, ignore_cleanup_errors=True)
        except OSError as error:
            raise InputError(f"no folder can be made in {parent}: {error.strerror}") from None
        self.path = Path(self.name)

    def __enter__(self) -> Path:
        return self.path

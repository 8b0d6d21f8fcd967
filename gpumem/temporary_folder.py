"""Temporary folders."""

import os
import tempfile
from pathlib import Path

from gpumem.inputs import InputError


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

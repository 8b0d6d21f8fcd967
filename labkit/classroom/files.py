"""Files that others sent: each participant's file, folder or zip, read as bytes within limits.

Nothing is trusted: links are not followed, only ordinary files are opened, members of a zip are
read in memory and never unpacked, and every count and size is bounded. What is not read is named
with its reason.

Limits: a zip in a zip stays closed. Encrypted members and those compressed otherwise than by
deflating are left out: other methods may ask for gigabytes before the first byte comes. A folder is
taken as it is listed; one that changes meanwhile may be read in part. A file of the largest size
that is made for it keeps JSON busy for some seconds, in up to 1 GiB.
"""

import io
import itertools
import os
import re
import stat
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from labkit.memory import InputError, format_bytes
from labkit.results import LARGEST_FILE_BYTES

MOST_PARTICIPANTS = 200
MOST_AT_THE_TOP = 2000
MOST_ENTRIES = 1000
"""Files and folders of one participant, those in a zip counted with them."""
MOST_PARTICIPANT_BYTES = 256 << 20
LARGEST_ZIP_BYTES = 64 << 20
DEEPEST = 8
MOST_NOTES = 20
WANTED = (".json", ".ipynb")
ARCHIVE = ".zip"

LINK = "it is a link, and links are not followed"
SPECIAL = "it is neither a file nor a folder"
OTHER = "it ends in none of .json, .ipynb and .zip"
REPORT = "it is a report, not a result: ask for the .ipynb or the folder"
_REPORT = re.compile(r"[^.].*\.html", re.DOTALL | re.IGNORECASE)
#: What `labkit run`, `labkit record` and desktops write beside results.
_COMPANION = re.compile(
    r"\..*|__MACOSX|.*\.(log|html)|Thumbs\.db|desktop\.ini|"
    r"recording\.json|accuracy\.json|headline-.*\.json",
    re.DOTALL | re.IGNORECASE,
)


class LeftOut(NamedTuple):
    """A file that was not taken: its cleaned name, a clause that says why, and what of the file
    itself explains that (which may give its sender away)."""

    file: str
    reason: str
    detail: str = ""


def clean(text: str, most: int = 80) -> str:
    """``text`` on one line of at most ``most`` characters.

    Controls, format characters (those that turn the direction of writing round are among them),
    lone surrogates and characters that no standard defines go; so do marks piled on one letter.
    """
    kept, marks = [], 0
    for character in unicodedata.normalize("NFC", text[: 4 * most]):
        category = unicodedata.category(character)
        marks = marks + 1 if category.startswith("M") else 0
        if category[0] == "Z" or category == "Cc":
            kept.append(" ")
        elif category[0] != "C" and marks <= 2:
            kept.append(character)
    line = " ".join("".join(kept).split())
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 1] + "…"


def senders(folder: Path, page: Path | None = None) -> tuple[list[Path], list[LeftOut]]:
    """What each participant sent, in the order of names, and what at the top is nobody's.

    Args:
        folder: holds what they sent.
        page: a file that nobody sent, wherever it lies.

    Raises:
        InputError: there is no such folder, or it cannot be listed.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; give one with what participants sent")
    try:
        names = _names(folder, MOST_AT_THE_TOP + 1)
    except OSError as error:
        raise InputError(f"cannot read the folder {folder}: {error.strerror}") from error
    ours = page.name if page and page.parent.resolve() == folder.resolve() else ""
    found: list[Path] = []
    left_out: list[LeftOut] = []
    if len(names) > MOST_AT_THE_TOP:
        left_out.append(LeftOut("…", f"of more than {MOST_AT_THE_TOP} files the rest is not read"))
    for name in names[:MOST_AT_THE_TOP]:
        if name == ours or (_COMPANION.fullmatch(name) and not _REPORT.fullmatch(name)):
            continue
        path = folder / name
        if reason := _unusable(path):
            left_out.append(LeftOut(clean(name), reason))
        elif len(found) == MOST_PARTICIPANTS:
            left_out.append(LeftOut(clean(name), f"{MOST_PARTICIPANTS} came before it"))
        else:
            found.append(path)
    return found, shortened(left_out)


def shortened(left_out: list[LeftOut]) -> list[LeftOut]:
    """At most ``MOST_NOTES`` of them, and how many more there are."""
    more = len(left_out) - MOST_NOTES
    if more <= 0:
        return left_out
    return [*left_out[:MOST_NOTES], LeftOut("…", f"{more} more were left out")]


def _unusable(path: Path) -> str:
    """Why nothing at ``path`` will be read; empty if something may be."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if stat.S_ISLNK(mode):
        return LINK
    if stat.S_ISDIR(mode):
        return ""
    if not stat.S_ISREG(mode):
        return SPECIAL
    if _REPORT.fullmatch(path.name):
        return REPORT
    return "" if path.suffix.lower() in (*WANTED, ARCHIVE) else OTHER


def _names(folder: Path, most: int) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in itertools.islice(entries, most))


class Reader:
    """One participant's files.

    Iterating gives ``(name, bytes)`` of each, and afterwards ``left_out`` holds what was not read.
    Names are cleaned, relative to what was sent.

    Args:
        path: the file, folder or zip.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_out: list[LeftOut] = []
        self._entries = self._bytes = 0

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        return self._visit(self.path, self.path.name, 0)

    def leave(self, name: str, reason: str, detail: str = "") -> None:
        """Note that a file is left out."""
        self.left_out.append(LeftOut(clean(name, 120), clean(reason, 200), clean(detail, 300)))

    def _visit(self, path: Path, name: str, depth: int) -> Iterator[tuple[str, bytes]]:
        if not self._counted(name) or (depth and _COMPANION.fullmatch(path.name)):
            return
        if reason := _unusable(path):
            self.leave(name, reason)
        elif path.is_dir():
            yield from self._folder(path, name, depth)
        elif path.suffix.lower() == ARCHIVE:
            yield from self._archive(path, name)
        elif (data := self._content(path, name, LARGEST_FILE_BYTES)) is not None:
            yield clean(name, 120), data

    def _counted(self, name: str) -> bool:
        self._entries += 1
        if self._entries == MOST_ENTRIES + 1:
            self.leave(name, f"more than {MOST_ENTRIES} files came with it; the rest is not read")
        return self._entries <= MOST_ENTRIES and self._bytes <= MOST_PARTICIPANT_BYTES

    def _folder(self, path: Path, name: str, depth: int) -> Iterator[tuple[str, bytes]]:
        if depth >= DEEPEST:
            self.leave(name, f"it lies more than {DEEPEST} folders deep")
            return
        try:
            names = _names(path, MOST_ENTRIES + 1)
        except OSError as error:
            self.leave(name, f"it cannot be read: {error.strerror}")
            return
        for each in names:
            yield from self._visit(path / each, f"{name}/{each}" if depth else each, depth + 1)

    def _content(self, path: Path, name: str, most: int) -> bytes | None:
        """The bytes of an ordinary file; None, and a note, if there are none to be had."""
        # Without blocking: what was a file when we looked may be a pipe when we open it.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        flags |= getattr(os, "O_BINARY", 0)
        try:
            with open(os.open(path, flags), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    self.leave(name, SPECIAL)
                    return None
                return self._bounded(file, name, most)
        except OSError as error:
            self.leave(name, f"it cannot be read: {error.strerror}")
            return None

    def _bounded(self, file: IO[bytes], name: str, most: int) -> bytes | None:
        """Up to ``most`` bytes of ``file``; None, and a note, if there are more."""
        data = file.read(most + 1)
        self._bytes += len(data)
        if len(data) > most:
            self.leave(name, f"it is larger than {format_bytes(most)}")
        elif self._bytes > MOST_PARTICIPANT_BYTES:
            limit = format_bytes(MOST_PARTICIPANT_BYTES)
            self.leave(name, f"with all before it, it is more than {limit}; the rest is not read")
        else:
            return data
        return None

    # --- zips ----------------------------------------------------------------------------------

    def _archive(self, path: Path, name: str) -> Iterator[tuple[str, bytes]]:
        data = self._content(path, name, LARGEST_ZIP_BYTES)
        if data is None:
            return
        # Each entry of the directory begins with this, so it cannot hold more entries than that.
        if data.count(b"PK\x01\x02") > MOST_ENTRIES:
            self.leave(name, f"it holds more than {MOST_ENTRIES} files")
            return
        try:
            archive = zipfile.ZipFile(io.BytesIO(data))
        except Exception as error:  # zipfile has a dozen kinds for a broken archive
            self.leave(name, "it is not a zip that can be read", str(error))
            return
        with archive:
            for member in archive.infolist():
                shown = f"{name}: {member.filename}"
                if member.is_dir():
                    continue
                if not self._counted(shown):
                    return
                yield from self._member(archive, member, shown)

    def _member(
        self, archive: zipfile.ZipFile, member: zipfile.ZipInfo, shown: str
    ) -> Iterator[tuple[str, bytes]]:
        if any(_COMPANION.fullmatch(part) for part in _parts(member) if part != ".."):
            return
        if reason := _closed(member):
            self.leave(shown, reason)
            return
        try:
            with archive.open(member) as file:
                data = self._bounded(file, shown, LARGEST_FILE_BYTES)
        except Exception as error:  # as above
            self.leave(shown, "it is damaged in the zip", str(error))
            return
        if data is not None:
            yield clean(shown, 120), data


def _parts(member: zipfile.ZipInfo) -> list[str]:
    return re.split(r"[/\\]", member.filename)


def _closed(member: zipfile.ZipInfo) -> str:
    """Why a member of a zip is not opened; empty if it may be."""
    kind = stat.S_IFMT(member.external_attr >> 16)
    suffix = Path(member.filename).suffix.lower()
    if ".." in (parts := _parts(member)) or not parts[0] or parts[0].endswith(":"):
        return "its name leads out of the zip"
    if kind == stat.S_IFLNK:
        return LINK
    if kind not in (0, stat.S_IFREG):
        return SPECIAL
    if suffix == ARCHIVE:
        return "a zip in a zip is not opened"
    if suffix not in WANTED:
        return OTHER
    if member.flag_bits & 1:
        return "it is encrypted"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "it is compressed in a way that is not read here"
    return ""

"""Move every address of this repository to another owner/name: `make links REPO=owner/name`.

The address stands in pyproject.toml, `[project.urls]`. What follows from it is rewritten in every
text file of the tree: GitHub's own addresses, those of Colab, Binder, raw files and GitHub Pages,
plain or URL-encoded, and the folder that a clone or an nbgitpuller link makes, which has the
repository's name. The name of the package, and folders that are named on their own, stay.

All files are written beside the old ones first and then put in their place, pyproject.toml last:
where that was interrupted, running it again finishes it.

Limits: GitHub only, branch main. Addresses are told by their host; an owner/name without one is
left alone. The new address must not be that of something else which the tree already links to.
Whether the repository exists is not asked.

Usage: python .ci/links.py OWNER/NAME
Exit status: 0 done, 2 refused, and nothing was changed.
"""

import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GITHUB = "https://github.com/"
SKIPPED = {
    *(".git", ".hypothesis", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".labkit"),
    *("build", "dist", "node_modules", "__pycache__"),
}
# GitHub's rules: letters, digits and single hyphens inside; letters, digits and ._- .
OWNER = re.compile(r"[A-Za-z0-9](?:-?[A-Za-z0-9]){0,38}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9._-]{1,100}", re.ASCII)
HOSTS = (
    r"(?:www\.|gist\.)?github\.com[/:]",
    r"api\.github\.com/repos/",
    r"raw\.githubusercontent\.com/",
    r"colab\.research\.google\.com/github/",
    r"mybinder\.org/v2/gh/",
)
END = r"(?![\w-]|\.(?!git(?![\w-]))[\w-])"  # the name ends here, at most with `.git`


class AddressError(Exception):
    """The address cannot be used; the message is one sentence."""


def parse(text: str) -> tuple[str, str]:
    """Owner and name of `owner/name`, by GitHub's rules for them.

    Raises:
        AddressError: it is none.
    """
    owner, slash, name = text.partition("/")
    good = OWNER.fullmatch(owner) and len(owner) <= 39 and slash and NAME.fullmatch(name)
    if not good or name in (".", "..") or name.lower().endswith((".git", ".wiki")):
        raise AddressError(f"{text[:80]!r} is not the owner/name of a repository on GitHub.")
    return owner, name


def current(root: Path) -> tuple[str, str]:
    """Owner and name that pyproject.toml states.

    Raises:
        AddressError: it states none.
    """
    table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = table.get("urls", {}).get("Repository", "")
    if not address.startswith(GITHUB):
        raise AddressError(f"pyproject.toml states no repository on GitHub, but {address[:80]!r}.")
    return parse(address.removeprefix(GITHUB))


def rules(old: tuple[str, str], new: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    """Patterns of the old address, and what to put there."""
    owner, name = map(re.escape, old)
    before = rf"(?<![\w.-])({'|'.join(HOSTS)})"
    pairs = [
        (rf"{before}{owner}/{name}{END}", rf"\g<1>{new[0]}/{new[1]}"),
        (rf"(github\.com%2F){owner}%2F{name}{END}", rf"\g<1>{new[0]}%2F{new[1]}"),
        (rf"(//|%2F%2F){owner}(\.github\.io)(/|%2F){name}{END}",
         rf"\g<1>{new[0].lower()}\g<2>\g<3>{new[1]}"),
        # the folder of a clone; the addresses before it are rewritten already
        (rf"(git clone [^\n;&]*/{re.escape(new[1])}(?:\.git)?\s*(?:&&|;|\n)\s*cd ){name}{END}",
         rf"\g<1>{new[1]}"),
        (rf"(urlpath=\S*?tree%2F){name}(?=%2F)", rf"\g<1>{new[1]}"),
    ]  # fmt: skip
    return [(re.compile(pattern, re.IGNORECASE), to) for pattern, to in pairs]


def files(root: Path) -> Iterator[Path]:
    """Files of the tree, without what is built, cached or installed; pyproject.toml last."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            each for each in folders if each not in SKIPPED and not each.startswith(".venv")
        )
        for name in sorted(names):
            path = Path(folder, name)
            if not path.is_symlink() and path != root / "pyproject.toml":
                yield path
    yield root / "pyproject.toml"


def rewritten(path: Path, changes: Sequence[tuple[re.Pattern[str], str]]) -> bytes | None:
    """The file's new content; None if it stays as it is, as what is no text does."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    for pattern, to in changes:
        text = pattern.sub(to, text)
    changed = text.encode("utf-8")
    return changed if changed != content else None


def move(root: Path, new: tuple[str, str]) -> list[Path]:
    """Rewrite the tree for the new address; returns the files that changed.

    Raises:
        AddressError: pyproject.toml states no address to start from.
        OSError: a file cannot be read or written; then all are as they were, unless putting them
            in their place had begun.
    """
    changes = rules(current(root), new)
    waiting: list[tuple[Path, Path]] = []
    try:
        for path in files(root):
            content = rewritten(path, changes)
            if content is not None:
                with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                    beside = Path(file.name)
                    waiting.append((beside, path))
                    file.write(content)
                shutil.copymode(path, beside)
        for beside, path in waiting:
            os.replace(beside, path)
    finally:
        for beside, _ in waiting:
            beside.unlink(missing_ok=True)
    return [path for _, path in waiting]


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("Usage: python .ci/links.py OWNER/NAME", file=sys.stderr)
        return 2
    try:
        owner, name = parse(arguments[0])
        changed = move(ROOT, (owner, name))
    except (AddressError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"Files rewritten for {GITHUB}{owner}/{name}: {len(changed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

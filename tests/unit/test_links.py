"""The repository's address: one place, everything that follows from it, and back again."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("links", ROOT / ".ci" / "links.py")
links = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(links)

OLD, NEW, THIRD = ("ada", "course"), ("Bob-2", "my.course_3"), ("c", "d")
PROJECT = '[project.urls]\nRepository = "https://github.com/{}/{}"\n'

# before, after; None where it stays
TEXTS = [
    ("https://github.com/ada/course", "https://github.com/Bob-2/my.course_3"),
    ("see https://github.com/ada/course.", "see https://github.com/Bob-2/my.course_3."),
    ("https://github.com/ada/course.git", "https://github.com/Bob-2/my.course_3.git"),
    ("git@github.com:ada/course.git", "git@github.com:Bob-2/my.course_3.git"),
    ("(https://github.com/Ada/Course/issues/7)", "(https://github.com/Bob-2/my.course_3/issues/7)"),
    (
        '"course @ git+https://github.com/ada/course"',
        '"course @ git+https://github.com/Bob-2/my.course_3"',
    ),
    (
        "https://colab.research.google.com/github/ada/course/blob/main/notebooks/a.ipynb",
        "https://colab.research.google.com/github/Bob-2/my.course_3/blob/main/notebooks/a.ipynb",
    ),
    (
        "https://mybinder.org/v2/gh/ada/course/main?urlpath=lab%2Ftree%2Fnotebooks%2Fa.ipynb",
        "https://mybinder.org/v2/gh/Bob-2/my.course_3/main?urlpath=lab%2Ftree%2Fnotebooks%2Fa.ipynb",
    ),
    (
        "https://raw.githubusercontent.com/ada/course/main/a.png",
        "https://raw.githubusercontent.com/Bob-2/my.course_3/main/a.png",
    ),
    (
        "https://hub/git-pull?repo=https%3A%2F%2Fgithub.com%2Fada%2Fcourse"
        "&branch=main&urlpath=lab%2Ftree%2Fcourse%2Fnotebooks%2Fa.ipynb",
        "https://hub/git-pull?repo=https%3A%2F%2Fgithub.com%2FBob-2%2Fmy.course_3"
        "&branch=main&urlpath=lab%2Ftree%2Fmy.course_3%2Fnotebooks%2Fa.ipynb",
    ),
    ("https://ada.github.io/course/", "https://bob-2.github.io/my.course_3/"),
    (
        "git clone https://github.com/ada/course && cd course",
        "git clone https://github.com/Bob-2/my.course_3 && cd my.course_3",
    ),
    (
        "git clone https://github.com/ada/course.git\n    cd course\n",
        "git clone https://github.com/Bob-2/my.course_3.git\n    cd my.course_3\n",
    ),
    (
        "git clone --depth 1 https://github.com/ada/course && cd course",
        "git clone --depth 1 https://github.com/Bob-2/my.course_3 && cd my.course_3",
    ),
    (
        "git clone https://github.com/ada/course; cd course",
        "git clone https://github.com/Bob-2/my.course_3; cd my.course_3",
    ),
    (
        "git clone https://github.com/ada/course /srv/course\ncd /srv/course",
        "git clone https://github.com/Bob-2/my.course_3 /srv/course\ncd /srv/course",
    ),
    ("https://github.com/ada/course-2", None),
    ("https://github.com/ada/course_", None),
    ("https://github.com/ada/course.github", None),
    ("https://github.com/ada/courses", None),
    ("https://github.com/bada/course", None),
    ("https://github.com/ada/other", None),
    ("https://notgithub.com/ada/course", None),
    ("https://example.org/ada/course", None),
    ("https://ada.github.io/other", None),
    ("pip install course; cd course; notes/ada/course", None),
    ("https://github.com%2Fada%2Fcourse-2", None),
]


def tree(folder: Path, **texts: str) -> Path:
    """A small repository of OLD's, with the script, the Makefile and these files."""
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "links.py", folder / ".ci")
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").write_text("[project]\n" + PROJECT.format(*OLD), encoding="utf-8")
    for name, text in texts.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, folder / ".ci" / "links.py", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)


# --- what is rewritten, and what is not --------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), TEXTS)
def test_address_is_rewritten_and_nothing_else(tmp_path, before, after):
    root = tree(tmp_path / "elsewhere", page=f'A {before}\n\n[b]({before}) "{before}"\n')
    page, first = root / "page.md", contents(root)
    links.move(root, NEW)
    expected = after or before
    assert page.read_text("utf-8") == f'A {expected}\n\n[b]({expected}) "{expected}"\n'
    assert links.current(root) == NEW
    links.move(root, OLD)
    if "Ada" not in before:  # capital letters are GitHub's to ignore
        assert contents(root) == first


def test_what_is_no_text_or_was_built_stays(tmp_path):
    address = b"https://github.com/ada/course"
    root = tree(tmp_path)
    for name in ("build/a.md", ".venv-old/a.md", ".git/config", "picture.png"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(address + (b"\xff\x00" if name.endswith("png") else b""))
    (root / "away.md").symlink_to(root / "build" / "a.md")
    before = contents(root)
    links.move(root, NEW)
    changed = {name for name, content in contents(root).items() if content != before[name]}
    assert changed == {"pyproject.toml"}


def test_line_ends_and_modes_stay(tmp_path):
    root = tree(tmp_path)
    script = root / "start.sh"
    script.write_bytes(b"#!/bin/sh\r\ngit clone https://github.com/ada/course\r\n")
    script.chmod(0o755)
    links.move(root, NEW)
    assert script.read_bytes().endswith(b"git clone https://github.com/Bob-2/my.course_3\r\n")
    assert script.stat().st_mode & 0o777 == 0o755


# --- all or nothing ----------------------------------------------------------------------------


def test_disk_that_fills_up_changes_nothing(tmp_path, monkeypatch):
    root = tree(tmp_path, a="https://github.com/ada/course", b="https://github.com/ada/course")
    before, copied = contents(root), []

    def full(source, target):
        copied.append(source)
        if source.name == "b.md":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copymode", full)
    with pytest.raises(OSError, match="No space"):
        links.move(root, NEW)
    assert len(copied) > 1
    assert contents(root) == before


def test_a_file_of_ones_own_is_not_taken_for_the_scripts(tmp_path):
    root = tree(tmp_path, page="https://github.com/ada/course")
    mine = root / "page.md.tmp"
    mine.write_text("mine")
    links.move(root, NEW)
    assert mine.read_text() == "mine"


def test_what_was_interrupted_is_finished_by_the_next_run(tmp_path, monkeypatch):
    root = tree(tmp_path, a="https://github.com/ada/course", z="https://github.com/ada/course")
    before, replace = set(contents(root)), os.replace

    def stop(source, target):
        if Path(target).name == "z.md":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        links.move(root, NEW)
    assert links.current(root) == OLD
    assert set(contents(root)) == before
    monkeypatch.undo()
    assert [path.name for path in links.move(root, NEW)] == ["z.md", "pyproject.toml"]
    assert "ada" not in (root / "a.md").read_text() + (root / "z.md").read_text()


# --- what is refused ---------------------------------------------------------------------------

HOSTILE = [
    *("", "/", "a", "a/", "/b", "a/b/c", "a/b/", "https://github.com/a/b", "a b/c", "a/b c"),
    *("../b", "a/..", "a/.", "-a/b", "a-/b", "a--b/c", "a/b.git", "a/b.Wiki", "a" * 40 + "/b"),
    *("a/" + "b" * 101, "a/b\n", "\na/b", "ä/b", "a/é", "a/b?x=1", "a/b#c", "a/b%2Fc", "a\\1/b"),
    *("a/b;touch made", "a/$(touch made)", "a/`touch made`", 'a/b" onload="x', "a/b)](x", "--help"),
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_refused(text):
    with pytest.raises(links.AddressError) as caught:
        links.parse(text)
    assert str(caught.value).count("\n") == 0
    assert len(str(caught.value)) < 500


@given(st.one_of(st.text(), st.from_regex(r"[a-z0-9-]{1,42}/[a-z0-9._%$-]{1,5}", fullmatch=True)))
def test_what_is_accepted_needs_no_quoting_anywhere(text):
    try:
        owner, name = links.parse(text)
    except links.AddressError:
        return
    assert f"{owner}/{name}" == text
    assert re.fullmatch(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+", text, re.ASCII)


@pytest.mark.parametrize("text", ["", "a/b;touch made", 'a/b"; touch made; "', "a/`touch made`"])
@pytest.mark.parametrize("through", ["script", "make"])
def test_refusal_is_one_sentence_and_status_2(tmp_path, text, through):
    root = tree(tmp_path)
    before = contents(root)
    if through == "script":
        done = command(root, text)
        assert len(done.stderr.splitlines()) == 1
    else:
        if shutil.which("make") is None:
            assert "CI" not in os.environ, "make is missing"
            pytest.skip("there is no make")
        line = ["make", "--silent", "-C", root, "links", f"REPO={text}", f"PYTHON={sys.executable}"]
        done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "is not the owner/name of a repository" in done.stderr
    assert "Traceback" not in done.stderr
    assert contents(root) == before


def test_tree_that_states_no_address_is_refused(tmp_path):
    root = tree(tmp_path)
    (root / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    done = command(root, "a/b")
    assert done.returncode == 2
    assert "states no repository on GitHub" in done.stderr


def test_usage_names_the_argument(tmp_path):
    done = command(tree(tmp_path))
    assert done.returncode == 2
    assert "OWNER/NAME" in done.stderr


# --- this repository ---------------------------------------------------------------------------

ADDRESSES = re.compile(
    r"(?:colab\.research\.google\.com/github/|mybinder\.org/v2/gh/|@ git\+https://github\.com/"
    r"|git clone https://github\.com/|gitpuller https://github\.com/|repository-code: "
    r"https://github\.com/|repo=https%3A%2F%2Fgithub\.com%2F)"
    r"([A-Za-z0-9-]+)(?:/|%2F)([A-Za-z0-9._-]+)"
)


def texts() -> dict[Path, str]:
    """Every text of this repository but this file, whose addresses are made up."""
    found = {}
    for path in links.files(ROOT):
        try:
            found[path] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    del found[Path(__file__).resolve()]
    return found


def test_no_other_owner_of_ours_is_in_the_tree():
    ours = links.current(ROOT)
    found = {path: ADDRESSES.findall(text) for path, text in texts().items()}
    badges = [pair for path, pairs in found.items() if path.suffix == ".ipynb" for pair in pairs]
    assert len(badges) == 3 * len(list((ROOT / "notebooks").glob("*.ipynb")))
    others = {path.name: set(pairs) - {ours} for path, pairs in found.items()}
    assert {name: pairs for name, pairs in others.items() if pairs} == {}


def test_this_tree_moves_to_a_fork_and_back(tmp_path):
    fork = tmp_path / "any folder"
    for path in texts():
        (fork / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, fork / path.relative_to(ROOT))
    first, (owner, name) = contents(fork), links.current(ROOT)

    done = command(fork, "/".join(NEW))
    assert done.returncode == 0, done.stderr
    assert links.current(fork) == NEW
    moved = contents(fork)
    assert len([each for each in moved if moved[each] != first[each]]) > 24
    left = re.compile(rf"{re.escape(owner)}(?:/|%2F){re.escape(name)}{links.END}".encode())
    assert [each for each, content in moved.items() if left.search(content)] == []
    gate = [sys.executable, fork / "tests" / "notebooks" / "form.py"]
    held = subprocess.run(gate, capture_output=True, text=True, check=False, timeout=300)
    assert held.returncode == 0, held.stdout

    assert links.move(fork, NEW) == []
    links.move(fork, THIRD)
    assert contents(fork) != moved
    links.move(fork, (owner, name))
    assert contents(fork) == first

"""`labkit start`: lessons are copied and kept up to date, and nobody's work is lost."""

import os
import sys
from pathlib import Path

import pytest

from labkit.cli import main
from labkit.lesson import notebooks

LESSONS = ("00_start_here.ipynb", "06_more.ipynb", "07_last.ipynb")


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of three lessons; the working directory is empty."""
    folder = tmp_path / "course"
    folder.mkdir()
    for name in LESSONS:
        (folder / name).write_text("first")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(notebooks, "course_folder", lambda: folder)
    return folder


def held(folder):
    return {path.name: path.read_text() for path in folder.glob("*.ipynb")}


def test_what_is_unchanged_follows_the_course_and_what_is_changed_stays(course, tmp_path):
    mine = tmp_path / "mine"
    assert notebooks.copy_lessons(mine) == (list(LESSONS), [])
    assert notebooks.copy_lessons(mine) == ([], [])

    more, last = LESSONS[1:]
    (mine / more).write_text("my answers")
    (mine / last).unlink()
    assert notebooks.copy_lessons(mine) == ([last], [])  # the course has nothing newer than `more`

    for name in LESSONS:
        (course / name).write_text("second, größer")
    for _ in range(2):  # it is named until it is out of the way
        assert notebooks.copy_lessons(mine)[1] == [more]
    assert held(mine) == dict.fromkeys(LESSONS, "second, größer") | {more: "my answers"}

    (mine / more).rename(mine / "my_06.ipynb")
    assert notebooks.copy_lessons(mine) == ([more], [])
    assert held(mine)["my_06.ipynb"] == "my answers"


def test_a_file_that_start_did_not_write_stays_too(course, tmp_path):
    (tmp_path / LESSONS[1]).write_bytes(b"\xff my own")
    assert notebooks.copy_lessons(tmp_path) == ([LESSONS[0], LESSONS[2]], [LESSONS[1]])
    assert (tmp_path / LESSONS[1]).read_bytes() == b"\xff my own"


@pytest.mark.parametrize("damage", ["{", "[]"])
def test_a_damaged_record_is_one_sentence_and_nothing_is_written(course, tmp_path, capsys, damage):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / notebooks.COPIED).write_text(damage)
    assert main.main(["start", str(mine), "--no-open"]) == 2
    assert "is not a record of lessons we can read" in capsys.readouterr().err
    assert held(mine) == {}


def test_the_first_lesson_is_opened_for_this_machine_only(course, tmp_path, capfd, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda *arguments: started.append(arguments))
    assert main.main(["start"]) == 0
    [(program, command)] = started
    assert program == sys.executable
    assert command[2:5] == ["-m", "jupyterlab", str(tmp_path / "here/gpu-memory-lab" / LESSONS[0])]
    assert "--ServerApp.ip=127.0.0.1" in command
    assert "3 lessons written into" in capfd.readouterr().out

    (tmp_path / "here/gpu-memory-lab" / LESSONS[1]).write_text("my answers")
    (course / LESSONS[1]).write_text("second")
    assert main.main(["start", "--no-open"]) == 0
    assert f"{LESSONS[1]}: you changed it, so it stays" in capfd.readouterr().out
    assert len(started) == 1


def test_without_jupyterlab_the_remedy_is_named_and_lessons_can_be_copied(
    course, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "jupyterlab", None)
    assert main.main(["start"]) == 2
    assert "to open lessons: pip install 'gpu-memory-lab[notebooks] @" in capsys.readouterr().err
    assert not list((tmp_path / "here").iterdir())
    assert main.main(["start", ".", "--no-open"]) == 0
    assert len(held(tmp_path / "here")) == 3


def test_lessons_are_those_of_the_folder_that_start_made_else_the_courses(course, monkeypatch):
    assert notebooks.default_folder() == notebooks.course_folder()
    notebooks.copy_lessons(Path("mine"))
    assert notebooks.default_folder() == notebooks.course_folder()
    monkeypatch.chdir("mine")
    assert [lesson.path.parent for lesson in notebooks.find(["more"])] == [Path.cwd()]

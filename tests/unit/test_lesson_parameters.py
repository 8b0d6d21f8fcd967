"""Lessons on disk: finding them, and the values people pass for their parameters."""

import nbformat
import pytest
from lesson_files import notebook, write_lesson

from gpumem.inputs import InputError
from labkit.lesson import notebooks
from labkit.lesson.notebooks import Parameter, check_value, declared_parameters


@pytest.fixture
def course(tmp_path):
    for name in ("01_where_memory_goes", "06_gradient_checkpointing"):
        write_lesson(tmp_path, name=name)
    return tmp_path


def found(course, *selected):
    return [lesson.name for lesson in notebooks.find(selected, folder=course)]


@pytest.mark.parametrize("name", ["6", "06", "Gradient-Checkpointing", "06_gradient_checkpointing"])
def test_lessons_are_found_in_order_by_many_names(course, name):
    assert found(course) == ["01_where_memory_goes", "06_gradient_checkpointing"]
    assert found(course, name, "06") == ["06_gradient_checkpointing"]  # once


def test_a_lesson_may_be_a_path(course, tmp_path):
    path = write_lesson(tmp_path / "own", name="mine")
    [lesson] = notebooks.find([str(path)], folder=course)
    assert (lesson.number, lesson.name) == ("", "mine")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gradient_chekpointing", "'gradient_chekpointing'. Did you mean '06_gradient_checkp"),
        ("99", "Known: 01_where_memory_goes, 06_gradient_checkpointing"),
        ("", "unknown lesson ''"),
        ("no/such.ipynb", "there is no notebook no/such.ipynb"),
    ],
)
def test_an_unknown_lesson_is_named_with_the_nearest(course, name, words):
    with pytest.raises(InputError) as caught:
        found(course, name)
    assert words in str(caught.value)


def test_no_lessons_and_two_of_one_name(course, tmp_path):
    with pytest.raises(InputError, match="no lessons in"):
        notebooks.find(folder=tmp_path / "empty")
    twin = write_lesson(tmp_path / "twin", name="01_where_memory_goes")
    with pytest.raises(InputError, match="two notebooks of one name"):
        found(course, "01", str(twin))


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": 3}', '{"nbformat": 4}'])
def test_a_damaged_notebook_is_refused_by_name(tmp_path, text):
    (tmp_path / "06_x.ipynb").write_text(text)
    with pytest.raises(InputError, match="06_x"):
        notebooks.read_notebook(tmp_path / "06_x.ipynb")


def test_a_title_is_the_first_heading_without_its_marks(tmp_path):
    lesson = notebooks.lesson_at(write_lesson(tmp_path))
    assert notebooks.title_of(notebook(), lesson) == "What does it save?"
    assert notebooks.title_of(nbformat.v4.new_notebook(), lesson) == "06_saving"


# --- parameters --------------------------------------------------------------------------------


def declared(source):
    book = notebook()
    book.cells[1].source = source
    return declared_parameters(book)


def test_declarations_are_read_with_kind_default_and_choices():
    assert declared(
        'batch_size: int = 8  # any\nsize: str = "auto"  # "auto", "cpu" or "gpu"\n'
        'rate: float = 0.1\nname: str = "x # y"  # such as "y"\nderived: int = 2 * 3\nloose = 1'
    ) == {
        "batch_size": Parameter("int", 8, ()),
        "size": Parameter("str", "auto", ("auto", "cpu", "gpu")),
        "rate": Parameter("float", 0.1, ()),
        "name": Parameter("str", "x # y", ()),
    }
    assert declared("batch_size: int = ") == {}


def test_values_get_the_kind_that_the_lesson_declares():
    assert check_value("x", "16", Parameter("int", 8, ())) == 16
    assert check_value("x", "2", Parameter("float", 0.1, ())) == 2.0
    assert check_value("x", "False", Parameter("bool", True, ())) is False
    assert check_value("x", "007", Parameter("str", "x", ())) == "007"


@pytest.mark.parametrize(
    ("name", "parameter", "text", "words"),
    [
        ("batch_size", Parameter("int", 8, ()), "0", "batch_size must be from 1 to"),
        ("batch_size", Parameter("int", 8, ()), "1.5", "a value such as 8, not '1.5'"),
        ("rate", Parameter("float", 0.1, ()), "1e999", "a value such as 0.1"),
        ("fused", Parameter("bool", True, ()), "yep", "value of fused 'yep'"),
        ("sizes", Parameter("list[int]", None, ()), "[3]", "which -p cannot set"),
        ("size", Parameter("str", "auto", ("auto", "cpu")), "atuo", "Did you mean 'auto'"),
        ("gpu", Parameter("str", "t4", ("t4", "l4")), "rtx-4091", "4090"),
        ("gpu", Parameter("str", "t4", ()), "24GiB:8.9", "nothing is known of the speed of 24GiB"),
    ],
)
def test_a_value_that_will_not_do_is_named_with_what_is_allowed(name, parameter, text, words):
    with pytest.raises(InputError) as caught:
        check_value(name, text, parameter)
    assert words in str(caught.value)


def test_gpus_are_looked_up_where_they_are_defined():
    assert check_value("gpu", "NVIDIA T4", Parameter("str", "x", ())) == "t4"

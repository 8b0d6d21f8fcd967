"""Lessons on disk: finding them, and the values people pass for their parameters."""

import contextlib

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lesson_files import notebook, write_lesson

from labkit import lessons
from labkit.lessons import Parameter, check_value, declared_parameters
from labkit.memory import InputError


@pytest.fixture
def course(tmp_path):
    for name in ("01_where_memory_goes", "06_gradient_checkpointing"):
        write_lesson(tmp_path, name=name)
    return tmp_path


def found(course, *selected):
    return [lesson.name for lesson in lessons.find(selected, folder=course)]


def test_all_lessons_in_order(course):
    assert found(course) == ["01_where_memory_goes", "06_gradient_checkpointing"]


@pytest.mark.parametrize(
    "name",
    ["6", "06", "gradient_checkpointing", "06_gradient_checkpointing", "Gradient-Checkpointing"],
)
def test_a_lesson_has_many_names(course, name):
    assert found(course, name) == ["06_gradient_checkpointing"]
    assert found(course, name, "06") == ["06_gradient_checkpointing"]  # once


def test_a_lesson_may_be_a_path(course, tmp_path):
    path = write_lesson(tmp_path / "own", name="mine")
    [lesson] = lessons.find([str(path)], folder=course)
    assert (lesson.number, lesson.name, lesson.topic) == ("", "mine", "mine")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gradient_chekpointing", "'gradient_chekpointing'. Did you mean '06_gradient_checkp"),
        ("7", "unknown lesson '7'. The nearest is '06_gradient_checkpointing'"),
        ("99", "Known: 01_where_memory_goes, 06_gradient_checkpointing"),
        ("", "unknown lesson ''"),
        ("no/such.ipynb", "there is no notebook no/such.ipynb"),
    ],
)
def test_an_unknown_lesson_is_named_with_the_nearest(course, name, words):
    with pytest.raises(InputError) as caught:
        found(course, name)
    assert words in str(caught.value)


def test_a_misspelt_path_and_a_file_that_is_no_notebook(course):
    with pytest.raises(InputError, match=r"Did you mean .*01_where_memory_goes"):
        found(course, str(course / "01_where_memry_goes.ipynb"))
    (course / "notes.txt").write_text("x")
    with pytest.raises(InputError, match="is not a notebook"):
        found(course, str(course / "notes.txt"))


def test_no_lessons_and_two_of_one_name(course, tmp_path):
    with pytest.raises(InputError, match="no lessons in"):
        lessons.find(folder=tmp_path / "empty")
    twin = write_lesson(tmp_path / "twin", name="01_where_memory_goes")
    with pytest.raises(InputError, match="have one name"):
        found(course, "01", str(twin))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"cells": 3}', '{"nbformat": 4}', "5"])
def test_a_damaged_notebook_is_refused_by_name(tmp_path, text):
    (tmp_path / "06_x.ipynb").write_text(text)
    with pytest.raises(InputError, match="06_x"):
        lessons.read_notebook(tmp_path / "06_x.ipynb")


def test_a_title_is_the_first_heading_without_its_marks(tmp_path):
    lesson = lessons.lesson_at(write_lesson(tmp_path))
    assert lessons.title_of(notebook(), lesson) == "What does it save?"
    assert lessons.title_of(nbformat.v4.new_notebook(), lesson) == "06_saving"


# --- parameters --------------------------------------------------------------------------------


def declared(source):
    book = notebook()
    book.cells[1].source = source
    return declared_parameters(book)


def test_declarations_are_read_with_kind_default_and_choices():
    assert declared(
        'batch_size: int = 8  # any\nsize: str = "auto"  # "auto", "cpu" or "gpu"\nrate = 0.1\n'
        'name: str = "x"  # such as "y"\nsizes: list[int] = [1, 2]\nderived: int = 2 * 3\nprint(1)'
    ) == {
        "batch_size": Parameter("int", 8, ()),
        "size": Parameter("str", "auto", ("auto", "cpu", "gpu")),
        "rate": Parameter("float", 0.1, ()),
        "name": Parameter("str", "x", ()),
        "sizes": Parameter("list[int]", [1, 2], ()),
    }
    assert declared("batch_size: int = ") == {}


@pytest.mark.parametrize(
    ("kind", "default", "text", "value"),
    [
        ("int", 8, "16", 16),
        ("int", 0, "0", 0),
        ("int | None", 8, "none", None),
        ("float", 0.1, "1e-3", 1e-3),
        ("bool", True, "False", False),
        ("list[int]", [1], "[1, 2]", [1, 2]),
        ("str", "x", "007", "007"),
    ],
)
def test_values_get_the_kind_that_the_lesson_declares(kind, default, text, value):
    assert check_value("x", text, Parameter(kind, default, ())) == value


@pytest.mark.parametrize(
    ("name", "parameter", "text", "words"),
    [
        ("batch_size", Parameter("int", 8, ()), "0", "batch_size must be from 1 to"),
        ("batch_size", Parameter("int", 8, ()), "-4", "batch_size must be from 1 to"),
        ("batch_size", Parameter("int", 8, ()), "many", "a whole number such as 8, not 'many'"),
        ("batch_size", Parameter("int", 8, ()), "1.5", "not '1.5'"),
        ("batch_size", Parameter("int", 8, ()), "9" * 5000, "batch_size must be"),
        ("seed", Parameter("int", 0, ()), "-1", "seed must be"),
        ("rate", Parameter("float", 0.1, ()), "nan", "finite"),
        ("rate", Parameter("float", 0.1, ()), "x", "rate must be a number"),
        ("fused", Parameter("bool", True, ()), "yep", "value of fused 'yep'"),
        ("sizes", Parameter("list[int]", [1], ()), "3", "of the kind of [1]"),
        ("sizes", Parameter("list[int]", [1], ()), "open('x')", "a literal such as [1]"),
        ("size", Parameter("str", "auto", ("auto", "cpu")), "atuo", "Did you mean 'auto'"),
        ("gpu", Parameter("str", "t4", ()), "t5", "'t5'"),
        ("gpu", Parameter("str", "t4", ("t4", "l4")), "rtx-4091", "4090"),
    ],
)
def test_a_value_that_will_not_do_is_named_with_what_is_allowed(name, parameter, text, words):
    with pytest.raises(InputError) as caught:
        check_value(name, text, parameter)
    assert words in str(caught.value)


def test_gpus_precisions_and_models_are_looked_up_where_they_are_defined():
    pytest.importorskip("labkit.models")
    text = Parameter("str", "x", ())
    assert check_value("gpu", "NVIDIA T4", text) == "t4"
    assert check_value("precision", "BF16", text) == "bf16"
    with pytest.raises(InputError, match="fp32"):
        check_value("precision", "fp31", text)
    with pytest.raises(InputError, match=r"Llama-3\.2-1B"):
        check_value("model", "Llama-3.2-1C", text)


@given(st.text(max_size=20), st.sampled_from(["int", "float", "bool", "list[int]", "int|None"]))
def test_any_text_is_taken_or_refused_never_a_crash(text, kind):
    default = {"int": 1, "float": 1.0, "bool": True, "list[int]": [1]}.get(kind, 1)
    with contextlib.suppress(InputError):
        check_value("x", text, Parameter(kind, default, ()))

"""Which names of a loop may be None before the model is called again."""

import textwrap

import pytest

from phantom_gpu.kept_outputs import names_to_free


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("for b in data:\n    out = model(b)  # here\n    loss = out.loss", ("out", "loss")),
        ("while True:\n    with amp:\n        out = model(b)  # here", ("out",)),
        ("for e in two:\n    for b in data:\n        a, c = model(b)  # here", ("a", "c")),
        ("for b in data:\n    h = model(b, h)  # here", ()),  # read by the call
        ("for b in data:\n    if b: print(loss)\n    loss = model(b)  # here", ()),
        ("while loss > 1:\n    loss = model(b)  # here", ()),
        ("for b in data: loss = model(b)  # here", ()),  # no line before it
        ("for b in data:\n    x = 1; loss = model(b)  # here", ("x", "loss")),
        ("for b in data:\n    loss = model(b)  # here\n    total = total + loss", ("loss",)),
        ("for b in data:\n    loss = model(b)  # here\n    total += loss", ("loss",)),
        ("for b in data:\n    loss = model(b)  # here\n    if b: best = loss", ("loss",)),
        ("for b in data:\n    if b:\n        loss = model(b)  # here", ()),
        ("for b in data:\n    loss = 1\nelse:\n    loss = model(b)  # here", ()),
        ("for b in data:\n    out = model(\n        b,  # here\n    )", ("out",)),
        ("loss = model(b)  # here", ()),
        ("for b in data:\n    out.append(model(b))  # here", ()),
        ("for b in data:\n    model(b)  # here\n    def", ()),  # another text than what ran
        ("", ()),
    ],
)
def test_names_that_nothing_reads_first(text, names):
    lines = textwrap.dedent(text).splitlines()
    [line] = [number for number, each in enumerate(lines, 1) if "here" in each] or [1]
    assert names_to_free(text, line) == names

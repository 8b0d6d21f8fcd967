"""Which names of a loop may be None before ``backward()``, or before the model is called again."""

import textwrap

import pytest

from phantom_gpu.kept_outputs import names_to_drop, names_to_free


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
        ("for b in data:\n    x = model(b)  # here\n    if b: break\n    y = x\nprint(y)", ("x",)),
        ("loss = model(b)  # here", ()),
        ("for b in data:\n    out.append(model(b))  # here", ()),
        ("for b in data:\n    model(b)  # here\n    def", ()),  # another text than what ran
        ("", ()),
    ],
)
def test_names_that_nothing_reads_first(text, names):
    assert names_to_free(text, marked(text)) == names


PASS = "for b in data:\n    out = model(b)\n    loss = out.loss\n    loss.backward()  # here\n"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (PASS, ("out",)),
        (PASS.replace("out =", "out, h =").replace("model(b)", "model(b, h)"), ("out",)),
        (PASS.replace("    loss", "    with amp:\n        loss", 1), ("out",)),
        (PASS + "    print(out)", ()),
        (PASS + "    total += loss\n    out += 1", ()),
        (PASS + "print(out)", ()),  # of the last turn
        (PASS.replace("    out", "    use(out)\n    out", 1), ()),  # of the one before
        (PASS.replace("    out", "    if b: out = 1\n    out", 1), ("out",)),
        (PASS.replace("loss.backward", "(loss + f(out)).backward"), ()),
        (PASS.replace("    loss.b", "    if b: loss.b"), ("out",)),  # the line of the whole branch
        (PASS.replace("    loss.b", "    if b:\n        loss.b"), ("out",)),
        (PASS.replace("    loss.b", "    loss = 2 * loss; loss.b"), ("out",)),
        (PASS.replace("    loss = out.loss\n    ", "    loss = out.loss; "), ()),
        (PASS + "def last():\n    return out", ()),
        ("def last():\n    out = 1\n    return out\n" + PASS, ()),  # nobody looks whose it is
        ("def train():\n" + textwrap.indent(PASS, "    ") + "print(out)", ("out",)),
        ("def train():\n    global out\n" + textwrap.indent(PASS, "    ") + "print(out)", ()),
        ("for b in data:\n    out = 1\n    def closure():\n        loss.backward()  # here", ()),
        ("for out in data:\n    loss = out.loss\n    loss.backward()  # here", ()),
        ("out = 1\nout.backward()  # here", ()),
        ("for b in data:\n    out.backward()  # here\n    def", ()),
    ],
)
def test_names_that_nothing_reads_any_more(text, names):
    assert names_to_drop(text, marked(text)) == names


def marked(text):
    lines = textwrap.dedent(text).splitlines()
    return next((number for number, each in enumerate(lines, 1) if "here" in each), 1)

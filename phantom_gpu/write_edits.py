"""Write what remedies say into a script's text, as a person would.

Limits: one file. A call that is made under another name than its own is not found.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpumem.inputs import InputError
from phantom_gpu.report_records import (
    ACCELERATOR,
    ARGUMENTS,
    CUDA,
    DDP,
    LIGHTNING,
    LOADED,
    LOADER,
    MOVED,
    OPTIMIZER,
    TRL,
    Edit,
    Offer,
)

#: What is called at the kinds of places.
_CALLED = {
    ARGUMENTS: ("TrainingArguments", "SFTConfig"),
    LOADED: ("from_pretrained",),
    MOVED: ("to",),
    CUDA: ("cuda",),
    OPTIMIZER: (
        *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    ),
    LOADER: ("DataLoader",),
    DDP: ("DistributedDataParallel", "DDP"),
    TRL: ("SFTTrainer",),
    ACCELERATOR: ("Accelerator",),
    LIGHTNING: ("Trainer",),
}
#: Methods that return what they are called on.
_SAME = ("to", "cuda", "train", "eval", "float", "half", "bfloat16", "requires_grad_")
#: Names that the code of edits begins with.
_PACKAGES = {"bitsandbytes", "peft", "torch", "transformers"}


class _Change(NamedTuple):
    """Bytes of a text, and what takes their place."""

    start: int
    end: int
    new: str


class _Text:
    """A script's text, and where its parts are."""

    def __init__(self, text: str) -> None:
        text = text.rstrip("\n") + "\n"
        self.code = text.encode()
        self.tree = ast.parse(text)
        self.starts = [0]
        for line in self.code.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def statement(self, line: int) -> ast.stmt:
        """Return the innermost statement at a line, or what it is in the head of."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno
        ]
        return max(found, key=lambda node: (node.lineno, -node.end_lineno))

    def call(self, edit: Edit, line: int) -> ast.Call:
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
            and node.lineno <= line <= node.end_lineno
            and ast.unparse(node.func).rpartition(".")[2] in _CALLED[edit.place.kind]
        ]
        if len(found) != 1:
            raise InputError(f"{edit.line} has {len(found)} calls to which {edit.code} may belong")
        return found[0]


def written(text: str, offers: Iterable[Offer]) -> str:
    """Return a script's text with all that ``offers`` say to write, but variables.

    Raises:
        InputError: a line is not known, or not which of its calls is meant.
    """
    script = _Text(text)
    edits = [edit for offer in offers for edit in offer.edits if edit.how != "variable"]
    changes = _imports(script, edits)
    for edit in edits:
        changes += _changes(script, edit)
    code = script.code
    # Of changes at one place the first that was made comes first.
    for _, change in sorted(enumerate(changes), key=lambda c: (-c[1].start, -c[0])):
        code = code[: change.start] + change.new.encode() + code[change.end :]
    return code.decode()


def variable(text: str, line: int, kind: str) -> str:
    """Return the variable that holds what the call of this kind of place at a line has made or
    moved; empty if none does, or if the text is not what runs."""
    try:
        statement = _Text(text).statement(line)
    except (SyntaxError, ValueError):  # a notebook's cell; a file that has changed since
        return ""
    value, called = getattr(statement, "value", None), []
    while isinstance(value, ast.Call):
        called.append(ast.unparse(value.func).rpartition(".")[2])
        if called[-1] not in _SAME:
            break
        value = value.func.value
    if not set(called) & set(_CALLED[kind]):
        return ""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        value = statement.targets[0]
    elif not isinstance(statement, ast.Expr):
        return ""
    return ast.unparse(value) if isinstance(value, ast.Name | ast.Attribute) else ""


def missing_imports(text: str, edits: Iterable[Edit]) -> list[str]:
    """Return the packages that edits name and the script does not import."""
    return _missing(_Text(text), edits)


def _missing(script: _Text, edits: Iterable[Edit]) -> list[str]:
    nodes = [node for node in ast.walk(script.tree) if isinstance(node, ast.Import)]
    there = {alias.asname or alias.name for node in nodes for alias in node.names}
    codes = (re.sub(r"(?m)^ *from .*$", "", edit.code) for edit in edits)
    used = {name for code in codes for name in re.findall(r"\b(\w+)\.", code)}
    return sorted((used & _PACKAGES) - there)


def _imports(script: _Text, edits: Sequence[Edit]) -> list[_Change]:
    later = [node for node in script.tree.body if not _is_first(node)]
    start = script.start(later[0])
    return [_Change(start, start, f"import {name}\n") for name in _missing(script, edits)]


def _is_first(node: ast.stmt) -> bool:
    """Return whether a statement must come before all imports."""
    says = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return says or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _changes(script: _Text, edit: Edit) -> Sequence[_Change]:
    number = edit.line.rpartition(":")[2]
    if not number.isdigit():
        raise InputError(f"nobody knows where this belongs: {edit.code}")
    if edit.how in ("before", "after"):
        statement = script.statement(int(number))
        first_line = statement.lineno - 1 if edit.how == "before" else statement.end_lineno
        start, margin = script.starts[first_line], " " * statement.col_offset
        return [_Change(start, start, textwrap.indent(edit.code, margin) + "\n")]
    call = script.call(edit, int(number))
    if edit.how == "class":
        return [_Change(script.start(call.func), script.end(call.func), edit.code)]
    old = {keyword.arg: keyword for keyword in call.keywords}
    if edit.how == "without":
        return [_left_out(script, call, old, name) for name in edit.code.split(", ")]
    changes, new = [], []
    for keyword in ast.parse(f"f({edit.code})", mode="eval").body.keywords:
        value = ast.unparse(keyword.value)
        if keyword.arg in old:
            kept = old[keyword.arg].value
            changes.append(_Change(script.start(kept), script.end(kept), value))
        else:
            new.append(f"{keyword.arg}={value}")
    if new:
        parts = [*call.args, *(keyword.value for keyword in call.keywords)]
        last, end = max(map(script.end, parts), default=0), script.end(call) - 1
        if parts:  # behind parentheses of the last one's own
            end = last + re.match(rb"(?:\s*\))*", script.code[last:end]).end()
        changes.append(_Change(end, end, ", " * bool(parts) + ", ".join(new)))
    return changes


def _left_out(script: _Text, call: ast.Call, named: dict[str, ast.keyword], name: str) -> _Change:
    if name not in named:
        raise InputError(f"{ast.unparse(call)} has no argument {name} by name to leave out")
    keyword = named[name]
    end = script.end(keyword)
    behind = re.match(rb"\s*,\s*", script.code[end:])
    if behind:
        return _Change(script.start(keyword), end + behind.end(), "")
    before = re.search(rb"(?:,\s*)?$", script.code[: script.start(keyword)])
    return _Change(before.start(), end, "")

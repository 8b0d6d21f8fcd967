"""What a loop keeps of one forward pass until the next has returned: ``outputs = model(...)``.

Such a name holds the logits, and ``loss`` what its graph still has, while the next pass makes its
own. Setting both to None in the line before the call frees them at no cost.

Limits: a loop in a file whose text is there; names of the frame that calls the model.
"""

import ast
import ctypes
import linecache
from collections.abc import Sequence
from types import FrameType
from typing import Any

from gpumem.costs import tensors_in

#: A loss and the like, which nobody needs to free.
SMALL_BYTES = 1 << 20


def names_to_free(text: str, line: int) -> tuple[str, ...]:
    """Return the names that a loop's body assigns at the statement at ``line``, or below it, and
    that nothing reads before: they may be None when that statement begins.

    Empty where the line is in no loop, shares it with other code, or cannot be parsed.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ()
    found: tuple[str, ...] = ()
    for loop in ast.walk(tree):  # inner ones come later
        if not isinstance(loop, ast.For | ast.While) or not _has(loop, line):
            continue
        statements = [node for part in loop.body for node in ast.walk(part)]
        statements = [node for node in statements if isinstance(node, ast.stmt)]
        here = [node for node in statements if _has(node, line)]
        if not here:
            continue
        begin = max(here, key=lambda node: (node.lineno, -node.end_lineno))
        before = text.splitlines()[begin.lineno - 1].encode()[: begin.col_offset]
        names = [node for node in ast.walk(loop) if isinstance(node, ast.Name)]
        read = {
            node.id
            for node in names
            if isinstance(node.ctx, ast.Load) and node.lineno <= begin.end_lineno
        }
        made = [
            target.id
            for node in statements
            if isinstance(node, ast.Assign) and node.lineno >= begin.lineno
            for target in _targets(node)
        ]
        found = () if before.strip() else tuple(dict.fromkeys(n for n in made if n not in read))
    return found


def _has(node: ast.AST, line: int) -> bool:
    return node.lineno <= line <= node.end_lineno


def _targets(node: ast.Assign) -> list[ast.Name]:
    targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
    return [target for target in targets if isinstance(target, ast.Name)]


def kept_names(frame: FrameType, *, least_bytes: int = SMALL_BYTES) -> tuple[str, ...]:
    """Return those of `names_to_free` at a frame's line that hold results of an earlier pass on a
    GPU; none if these have fewer than ``least_bytes``."""
    text = "".join(linecache.getlines(frame.f_code.co_filename))
    variables = frame.f_locals
    held: dict[str, int] = {}
    for name in names_to_free(text, frame.f_lineno):
        results = [
            t for t in tensors_in(variables.get(name)) if t.is_cuda and t.grad_fn is not None
        ]
        if results:
            held[name] = sum(tensor.untyped_storage().nbytes() for tensor in results)
    _forget_copy(frame, variables)
    return tuple(held) if sum(held.values()) >= least_bytes else ()


def free(frame: FrameType, names: Sequence[str]) -> None:
    """Set a frame's ``names`` to None, as a line before the one that the frame is at would."""
    variables = frame.f_locals
    variables.update(dict.fromkeys(names))
    if _is_copy(frame, variables):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    _forget_copy(frame, variables)


def _is_copy(frame: FrameType, variables: Any) -> bool:
    """Return whether ``variables`` is a copy of a function's, as up to Python 3.12."""
    return variables is not frame.f_globals and isinstance(variables, dict)


def _forget_copy(frame: FrameType, variables: Any) -> None:
    """Empty the copy that a frame has, which would keep tensors alive."""
    if _is_copy(frame, variables):
        variables.clear()

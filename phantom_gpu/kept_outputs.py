"""What a loop keeps of one forward pass until the next has returned: ``outputs = model(...)``.

Such a name holds the logits, and ``loss`` what its graph still has, while the next pass makes its
own. Setting both to None in the line before the call frees them at no cost.

Limits: a loop in a file whose text is there; names of the frame that calls the model.
"""

import ast
import ctypes
import linecache
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from gpumem.costs import tensors_in

#: A loss and the like, which nobody needs to free.
SMALL_BYTES = 1 << 20


def names_to_free(text: str, line: int) -> tuple[str, ...]:
    """Return the names that a loop's body assigns in any case at the statement at ``line``, or
    below it, and that nothing reads before: they may be None when that statement begins.

    Empty where the line is in no loop, in a branch of one, shares it with other code, or cannot be
    parsed.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ()
    found: tuple[str, ...] = ()
    for loop in ast.walk(tree):  # inner ones come later
        if isinstance(loop, ast.For | ast.While) and _has(loop, line):
            found = _assigned_first(loop, text, line)
    return found


def _assigned_first(loop: ast.For | ast.While, text: str, line: int) -> tuple[str, ...]:
    statements = list(_in_any_case(loop.body))
    begin = next((node for node in statements if _has(node, line)), None)
    if begin is None or text.splitlines()[begin.lineno - 1].encode()[: begin.col_offset].strip():
        return ()
    names = [node for node in ast.walk(loop) if isinstance(node, ast.Name)]
    loads = [(node.id, node.lineno) for node in names if isinstance(node.ctx, ast.Load)]
    found: dict[str, bool] = {}
    for node in statements:
        if not isinstance(node, ast.Assign) or node.lineno < begin.lineno:
            continue
        for target in _targets(node):
            read = any(name == target.id and at <= node.end_lineno for name, at in loads)
            found.setdefault(target.id, not read)
    return tuple(name for name, may_be_none in found.items() if may_be_none)


def _in_any_case(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that each turn of a loop runs, those in a ``with`` among them."""
    for node in body:
        if isinstance(node, ast.With):
            yield from _in_any_case(node.body)
        else:
            yield node


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

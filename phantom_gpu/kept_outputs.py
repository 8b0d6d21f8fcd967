"""What a loop keeps of one forward pass until the next has returned: ``outputs = model(...)``.

Such a name holds the logits through backward and while the next pass makes its own, and ``loss``
what its graph still has then. Set to None in the line before ``backward()``, or before the call of
the model, they are freed at no cost.

Limits: a loop in a file whose text is there; names of the frame that calls the model.
"""

import ast
import ctypes
import linecache
from collections.abc import Callable, Container, Iterator, Sequence
from types import FrameType
from typing import Any

from gpumem.costs import tensors_in

#: A loss and the like, which nobody needs to free.
SMALL_BYTES = 1 << 20


def names_to_free(text: str, line: int) -> tuple[str, ...]:
    """Return the names that a loop's body assigns in any case at the statement at ``line``, or
    below it, and that nothing reads before: they may be None when that statement begins. A loop
    that may end in between leaves them for what comes after it.

    Empty where the line is in no loop, in a branch of one, shares it with other code, or cannot be
    parsed.
    """
    _, loop, begin = _parsed(text, line)
    if begin is None:
        return ()
    loads = list(_loads(loop))
    ends = [n.lineno for n in ast.walk(loop) if isinstance(n, ast.Break | ast.Return)]
    found: dict[str, bool] = {}
    for node, target in _assigned(loop):
        if node.lineno >= begin.lineno:
            read = any(name == target and at <= node.end_lineno for name, at in loads)
            left = any(begin.lineno <= at < node.lineno for at in ends)
            found.setdefault(target, not (read or left))
    return tuple(name for name, may_be_none in found.items() if may_be_none)


def names_to_drop(text: str, line: int) -> tuple[str, ...]:
    """Return the names that a loop's body assigns in any case above the statement at ``line``, and
    that nothing reads from there on: they may be None when that statement begins.

    Empty in the cases of `names_to_free`, and where another function may read them.
    """
    tree, loop, begin = _parsed(text, line)
    if begin is None:
        return ()
    loads = list(_loads(_scope(tree, loop)))
    shared = {name for node in ast.walk(tree) for name in _shared(node)}
    found: dict[str, int] = {}
    for node, target in _assigned(loop):
        if node.lineno < begin.lineno:
            found.setdefault(target, node.end_lineno)

    def is_read_elsewhere(name: str) -> bool:
        return any(not found[name] < at < begin.lineno for each, at in loads if each == name)

    return tuple(name for name in found if name not in shared and not is_read_elsewhere(name))


def _parsed(text: str, line: int) -> tuple[ast.AST, ast.stmt | None, ast.stmt | None]:
    """Return a text's tree, the innermost loop at ``line`` and the statement there that it runs in
    any case, if that has its line for itself."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], []), None, None
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While) and _has(n, line)]
    if not loops:
        return tree, None, None
    loop = loops[-1]  # inner ones come later
    begin = next((node for node in _in_any_case(loop.body) if _has(node, line)), None)
    if isinstance(begin, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        begin = None  # its own names are others
    if begin and text.splitlines()[begin.lineno - 1].encode()[: begin.col_offset].strip():
        begin = None
    return tree, loop, begin


def _assigned(loop: ast.For | ast.While) -> Iterator[tuple[ast.Assign, str]]:
    """Yield each name that a turn of a loop assigns in any case, with the statement."""
    for node in _in_any_case(loop.body):
        if isinstance(node, ast.Assign):
            parts = [part for each in node.targets for part in getattr(each, "elts", [each])]
            yield from ((node, part.id) for part in parts if isinstance(part, ast.Name))


def _loads(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that is read, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id, node.lineno
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno


def _scope(tree: ast.AST, loop: ast.stmt) -> ast.AST:
    """Return the innermost function that has a loop, or all there is."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return next((n for n in reversed(functions) if _has(n, loop.lineno)), tree)


def _shared(node: ast.AST) -> list[str]:
    return node.names if isinstance(node, ast.Global | ast.Nonlocal) else []


def _in_any_case(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that each turn of a loop runs, those in a ``with`` among them."""
    for node in body:
        if isinstance(node, ast.With):
            yield from _in_any_case(node.body)
        else:
            yield node


def _has(node: ast.AST, line: int) -> bool:
    return node.lineno <= line <= node.end_lineno


def kept_names(
    frame: FrameType,
    names: Callable[[str, int], tuple[str, ...]],
    *,
    but: Container[str] = (),
    least_bytes: int = SMALL_BYTES,
) -> tuple[str, ...]:
    """Return those of ``names`` at a frame's line, but some, that hold results of a pass on a GPU;
    none if these have fewer than ``least_bytes``."""
    text = "".join(linecache.getlines(frame.f_code.co_filename))
    variables = frame.f_locals
    held: dict[str, int] = {}
    for name in names(text, frame.f_lineno):
        results = [
            t for t in tensors_in(variables.get(name)) if t.is_cuda and t.grad_fn is not None
        ]
        if results and name not in but:
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

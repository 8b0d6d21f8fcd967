"""Read from a lesson's notebook the code that its exercises refer to.

What a check compares with is what the learner reads, and not a second copy of it. The notebook is
the course's, so whatever a learner changes in a copy changes no check.
"""

import ast
import functools
import json
import linecache
import re
from typing import Any

from labkit.lesson.notebooks import course_folder


def from_notebook(lesson: str, name: str, space: dict[str, Any]) -> Any:
    """Return the function or class that the notebook of ``lesson`` defines, once, as ``name``.

    ``space`` are names for its code, as in ``globals()``. Added to them are ``name``, and what the
    code uses of the notebook's imports.
    """
    definitions, imports = _contents(lesson)
    [source] = definitions[name]
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    for missing in sorted(used & imports.keys() - space.keys()):
        exec(imports[missing], space)
    file = f"<lesson {lesson}, {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), space)
    return space[name]


@functools.cache
def _contents(lesson: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the sources of all definitions by their name, and the imports by what they import."""
    [path] = course_folder().glob(f"{lesson}_*.ipynb")
    definitions: dict[str, list[str]] = {}
    imports: dict[str, str] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = re.sub(r"^\s*%.*$", "", "".join(cell["source"]), flags=re.MULTILINE)
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = ast.get_source_segment(source, node) + "\n"
                definitions.setdefault(node.name, []).append(text)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    imports[alias.asname or alias.name] = ast.unparse(node)
    return definitions, imports

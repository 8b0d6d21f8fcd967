"""The page of public names, from their docstrings."""

import inspect
import re
from importlib import import_module
from types import ModuleType

import gpumem
import labkit

HEAD = """# Public names

    import labkit as lab

`lab` offers these {count} names, and `gpumem` the {engine} of the first {groups} groups. A lesson
imports what it alone needs from its module, in the cell that uses it.
"""
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
EXPERIMENT = re.compile(r"collections\.abc\.Callable\[\.\.\., collections\.abc\.Iterator\[\S+?\]\]")
PREFIX = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])")
FUNCTION = re.compile(r"<function (\w+) at \w+>")
ITEM = re.compile(r"    (\S[^:]*): (.*)")


def page() -> str:
    """Return the whole page, as Markdown."""
    counts = {"count": len(labkit.__all__), "engine": len(gpumem.__all__)}
    parts = [HEAD.format(groups=len(gpumem.GROUPS), **counts)]
    for group, modules in labkit.GROUPS.items():
        parts.append(f"## {group}\n")
        for module, names in modules.items():
            parts += [entry(import_module(module), name) for name in names]
    return "\n".join(parts)


def entry(module: ModuleType, name: str) -> str:
    """Return the section of one name: signature, where it is defined, docstring."""
    value = getattr(module, name)
    try:
        signature = EXPERIMENT.sub("Experiment", str(inspect.signature(value)))
        signature = FUNCTION.sub(r"\1", PREFIX.sub("", signature))
    except ValueError:  # an exception class has none
        signature = ""
    keyword = "class " if inspect.isclass(value) else ""
    text = as_markdown(inspect.getdoc(value) or "")
    code = f"{keyword}{name}{signature}"
    return f"### {name}\n\n`{code}`\n\nFrom `{module.__name__}`.\n\n{text}\n"


def as_markdown(docstring: str) -> str:
    """Turn a docstring's sections (Args, Raises, ...) into lists."""
    lines, in_section = [], False
    for line in docstring.splitlines():
        if heading := SECTION.fullmatch(line.strip()):
            lines += [f"**{heading[1]}**", ""]
            in_section = True
        elif in_section and (item := ITEM.fullmatch(line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif in_section and line and not line.startswith("    "):
            in_section = False
            lines.append(line)
        elif in_section:
            lines.append(line.removeprefix("    ").strip() and f"  {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines).replace("``", "`").rstrip()

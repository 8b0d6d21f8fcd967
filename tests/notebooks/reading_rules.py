"""How a lesson reads: code at first sight, plain English, one surprise, minutes that are true.

The rules are those of CONTRIBUTING.md. Each message says what to write instead.
Limits: code is read, not executed, and whether a name says what it holds, a reader decides.
"""

import ast
import re
from collections.abc import Iterator

from lesson_rules import Lesson, Problem, tags
from nbformat import NotebookNode

#: Cells of which a learner reads little: the first two are equal in every lesson.
NOT_READ = (["setup"], ["parameters"], ["result"])
LONG_CELL, MOST_LINES = 12, 150  # of code; most cells are shorter than a long one
MOST_PARENTHESES, MOST_MINUTES = 12, 30
#: Set by what six readers needed: for prose, for code, and for an exercise.
WORDS_A_MINUTE, LINES_A_MINUTE, MINUTES_AN_EXERCISE = 200, 8, 4
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
TABLES = (ast.Dict, ast.List, ast.Tuple, ast.Set)
#: What is correct, and yet nobody says.
ODD_ENGLISH = {
    r"\bbut for (?:the|rounding)\b": "except for",
    r"\bdear(?:er)?\b": "expensive, costs more",
    r"\bthrice\b": "three times",
    r"\bof (?:its|their|our|your) own\b": "separate, or leave it out",
    r"\bso many\b|\bso much\b": "the number",
    r"\bshall\b": "will, or the imperative",
    r"\bwho(?:ever)? (?:compares|looks|wants|reads)\b": "anyone who",
    r"\bwhat we take along\b": "Key points",
    r"\bthe cards?\b": "the GPU",
    r"\bgoes on\b": "continues",
    r"\bthe host\b": "the CPU, or CPU memory",
    r"\b(?:has|have) \d[\d.,]* [KMG]i?B\b": "is",
}


def check_code(lesson: Lesson) -> Iterator[Problem]:
    """What makes a learner read a line twice."""
    for cell in read_code(lesson):
        code = re.sub(r"^[%!].*$", "pass", cell.source, flags=re.MULTILINE)
        for node in ast.walk(ast.parse(code)):
            if message := packed(node):
                where = ast.unparse(node).splitlines()[0][:50]
                yield lesson.problem("code", f"{message}: {where}", cell)


def packed(node: ast.AST) -> str:
    """Return what to write instead of ``node``; nothing if it reads at first sight."""
    inner = list(ast.walk(node))[1:]
    if isinstance(node, ast.NamedExpr):
        return "assign on a line before"
    if isinstance(node, TABLES) and any(isinstance(each, ast.Lambda) for each in inner):
        return "a table of lambdas; define functions with names"
    if isinstance(node, COMPREHENSIONS):
        nested = any(isinstance(each, COMPREHENSIONS) for each in inner)
        if nested or len(node.generators) > 1:
            return "a comprehension within another; write a loop"
    if isinstance(node, ast.Assign):
        tuples = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        if tuples or len(node.targets) > 1:
            return "several assignments in one; a line for each"
    if isinstance(node, ast.IfExp) and any(isinstance(each, ast.IfExp) for each in inner):
        return "a choice within a choice; write if and elif"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        lists = [side for side in (node.left, node.right) if isinstance(side, ast.List)]
        if lists and not any(isinstance(s, ast.Constant) for s in (node.left, node.right)):
            return "a list times a condition; write an if"
    if isinstance(node, ast.Subscript) and unpacks(node.value):
        return "an order of keys that means something; name the key"
    return ""


def unpacks(node: ast.AST) -> bool:
    """Whether this is ``[*mapping]`` or ``list(mapping)``."""
    if isinstance(node, ast.List):
        return any(isinstance(each, ast.Starred) for each in node.elts)
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "list"


def check_length(lesson: Lesson) -> Iterator[Problem]:
    counts = [lines_of(cell) for cell in read_code(lesson)]
    if sum(counts) > MOST_LINES:
        message = f"{sum(counts)} lines of code; at most {MOST_LINES}: what is not the subject?"
        yield lesson.problem("length", message)
    long = sum(count > LONG_CELL for count in counts)
    if 2 * long > len(counts):
        message = f"{long} of {len(counts)} cells are longer than {LONG_CELL} lines; most must not"
        yield lesson.problem("length", message)


def check_prose(lesson: Lesson) -> Iterator[Problem]:
    brackets = 0
    for cell in lesson.cells:
        text = prose(cell)
        brackets += text.count("(")
        for bold in re.findall(r"\*\*(.+?)\*\*", text, re.DOTALL):
            if "(" in bold:
                yield lesson.problem("prose", f"brackets in a key sentence: {bold[:50]}", cell)
        for odd, better in ODD_ENGLISH.items():
            for found in re.findall(odd, text, re.IGNORECASE):
                yield lesson.problem("prose", f"{found!r}: write {better}", cell)
    if brackets > MOST_PARENTHESES:
        message = f"{brackets} parentheses; at most {MOST_PARENTHESES}: a sentence or nothing"
        yield lesson.problem("prose", message)


def check_surprise(lesson: Lesson) -> Iterator[Problem]:
    """One sentence to tell a colleague: it stands in bold, once, word for word."""
    surprise = lesson.notebook.metadata.get("surprise", "")
    text = "\n".join(cell.source for cell in lesson.tagged("reading", "markdown"))
    bold = [" ".join(each.split()) for each in re.findall(r"\*\*(.+?)\*\*", text, re.DOTALL)]
    if bold.count(surprise) != 1:
        yield lesson.problem("surprise", f"no reading says in bold, once: {surprise}")


def check_minutes(lesson: Lesson) -> Iterator[Problem]:
    """The minutes in the title are what it takes, within a sixth, and at most half an hour."""
    written = re.search(r"(\d+)\s*min", lesson.cells[0].source)
    if not written:
        return  # the rule on headings asks for them
    said, found = int(written[1]), minutes(lesson)
    if said > MOST_MINUTES or found > said + said / 6:
        message = f"says {said} minutes and takes {found:.0f}; {MOST_MINUTES} are the most"
        yield lesson.problem("minutes", message)


def minutes(lesson: Lesson) -> float:
    """Return how long a reader takes for the prose, the code and the exercises."""
    words = sum(len(prose(cell).split()) for cell in lesson.cells)
    lines = sum(map(lines_of, read_code(lesson)))
    exercises = len(lesson.tagged("exercise", "code"))
    return words / WORDS_A_MINUTE + lines / LINES_A_MINUTE + exercises * MINUTES_AN_EXERCISE


def read_code(lesson: Lesson) -> list[NotebookNode]:
    """Return the cells of code that a learner reads, exercises left out."""
    return [
        cell
        for cell in lesson.cells
        if cell.cell_type == "code" and tags(cell) not in (*NOT_READ, ["exercise"])
    ]


def lines_of(cell: NotebookNode) -> int:
    lines = (line.strip() for line in cell.source.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def prose(cell: NotebookNode) -> str:
    """Return a Markdown cell's sentences, without code, formulas, pictures and links' addresses."""
    if cell.cell_type != "markdown":
        return ""
    hidden = r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\[!\[.*?\n|\]\([^)]*\)"
    return re.sub(hidden, "", cell.source, flags=re.DOTALL)


READING_RULES = (check_code, check_length, check_prose, check_minutes)


def check_plain(lesson: Lesson) -> Iterator[Problem]:
    """All of these rules; only a capstone has no surprise."""
    for rule in READING_RULES:
        yield from rule(lesson)
    if not lesson.is_capstone:
        yield from check_surprise(lesson)

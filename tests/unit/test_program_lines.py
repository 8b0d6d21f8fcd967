"""Whose line a call is."""

import sys

from phantom_gpu.allocator_history import LIBRARIES, line_of

LIBRARYS = """
from dataclasses import dataclass

@dataclass
class Base:
    rows: int = 1

    def __post_init__(self):
        self.line = line_of(sys._getframe())

@dataclass
class Arguments(Base):
    def __post_init__(self):
        super().__post_init__()
"""


def test_an_init_that_dataclasses_wrote_is_nobodys_line():
    library = {"line_of": line_of, "sys": sys, "__name__": "library"}
    exec(compile(LIBRARYS, f"{LIBRARIES[0]}/library.py", "exec"), library)
    made = library["Arguments"](rows=2)
    assert made.line == f"{__file__}:{sys._getframe().f_lineno - 1}"

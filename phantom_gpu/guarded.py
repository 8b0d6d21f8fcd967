"""Keep a fault of ours from reaching the program that is watched."""

import functools
from collections.abc import Callable
from typing import Any


def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method's error noted by its object's ``note_fault``; the method returns None then.

    What ends the program on purpose (`SystemExit`, Ctrl-C) passes.
    """

    @functools.wraps(hook)
    def safe(owner: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return safe.__wrapped__(owner, *arguments, **options)
        except Exception as error:
            owner.note_fault(hook.__name__, error)

    return safe

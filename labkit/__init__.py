"""labkit: what the lessons of GPU Memory Lab call; `import labkit as lab`.

The public names are gpumem's and those below; the course's site documents them. A name loads its
module, and the libraries that module needs, when it is first used: `labkit doctor` must start where
PyTorch cannot be imported.
"""

import gpumem
from gpumem.lazy import public_names

#: The public names by group and by the module that defines them.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    **gpumem.GROUPS,
    "In a lesson": {
        "labkit.lesson.session": (
            "start",
            "claim",
            "claim_seconds",
            "claim_table",
            "expect",
            "recorded",
            "result",
            "folder",
        ),
        "labkit.exercises.engine": ("exercise",),
        "labkit.widgets.predictions": ("predict",),
        "labkit.widgets.knobs": ("explore",),
    },
    "Compare and draw": {
        "labkit.loss_comparison": ("losses", "relative_error"),
        "gpumem.figures.bars": ("bars",),
        "gpumem.figures.timelines": ("timeline",),
        "labkit.figures": ("lines", "loss_curves", "savings"),
    },
}

__all__, __getattr__, __dir__ = public_names(__name__, GROUPS)

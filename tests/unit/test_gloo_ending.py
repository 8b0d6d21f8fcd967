"""Scripts that torchrun starts end without an abort, though gloo's threads outlive their group.

Collectives that nobody waits for still hold tensors when such a script ends, and a mesh keeps the
group alive: with Python's own ending three launches of four aborted.
"""

import re
from pathlib import Path

import nbformat

from gpumem.estimation.recipe import Recipe
from gpumem.estimation.script import script as training_script
from labkit.exercises.lesson_27 import script as capstone

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
ENDING = (
    "dist.barrier()  # nobody leaves while another still talks\n"
    "dist.destroy_process_group()\n"
    "sys.stdout.flush()\n"
    "os._exit(0)  # gloo's threads outlive the group, and can abort a Python that ends\n"
)


def written(notebook):
    """Return the files that a lesson writes, whole, by name."""
    files = {}
    for cell in nbformat.read(NOTEBOOKS / notebook, 4).cells:
        if begun := re.match(r"%%writefile (?:-a )?\{.*\}/(\S+)\n", cell.source):
            files[begun[1]] = files.get(begun[1], "") + cell.source[begun.end() :] + "\n"
    return files


def test_every_script_for_torchrun_has_the_ending_that_cannot_abort():
    scripts = {
        "lesson 19": written("19_fsdp.ipynb")["sharded.py"],
        "capstone, given": written("27_capstone_8x80gb.ipynb")["given_job.py"],
        "capstone, solved": capstone(),
        "template": training_script(Recipe(ranks=2), model="SmolLM2-135M"),
    }
    for name, text in scripts.items():
        ending = re.sub(
            r"^    ", "", text[text.rindex("\n", 0, text.rindex("dist.barrier")) + 1 :], flags=re.M
        )
        assert ending.rstrip() + "\n" == ENDING, name

"""`labkit doctor` on Jupyter: the kernel, the buttons and sliders, who may start it.

Limits: Jupyter is looked at as this Python has it. Where JupyterLab runs in an environment of its
own, its side of the widgets is there.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

from labkit.doctor.findings import Finding, pip, quoted

#: JupyterLab's half of ipywidgets, and its major version for ipywidgets 7 and 8, as the packages
#: jupyterlab_widgets 1 and 3 bring it.
WIDGETS_EXTENSION = "@jupyter-widgets/jupyterlab-manager"
_EXTENSION_MAJOR = {7: 3, 8: 5}
_THIS_PYTHON = (
    "python",
    f"python{sys.version_info.major}",
    f"python{sys.version_info.major}.{sys.version_info.minor}",
)  # jupyter_client starts this Python for these


def check_kernel() -> list[Finding]:
    """Whether notebooks can start this Python."""
    if importlib.util.find_spec("ipykernel") is None:
        text = "ipykernel is not installed: no notebook can run"
        return [Finding("problem", "kernel", text, pip("install ipykernel"))]
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    make = f"`{quoted(sys.executable)} -m ipykernel install --sys-prefix`"
    specs = KernelSpecManager()
    try:
        spec = specs.get_kernel_spec("python3")
    except NoSuchKernel:
        return [Finding("problem", "kernel", "Jupyter knows no kernel python3", make)]
    except (ValueError, OSError, TypeError) as error:  # unreadable, or no JSON
        folder = specs.find_kernel_specs().get("python3", "")
        text = f"what describes the kernel python3 cannot be read: {error}"
        return [Finding("problem", "kernel", text, f"remove the folder `{folder}`, then {make}")]
    command = spec.argv[0] if spec.argv else ""
    if command in _THIS_PYTHON or _is_this_python(Path(command)):
        return [Finding("ok", "kernel", "Jupyter's python3 is this Python")]
    # A new one beside it might come after it in Jupyter's order.
    remedy = f"remove the folder `{spec.resource_dir}`, then {make}"
    if shutil.which(command) is None:
        text = f"Jupyter's python3 is `{command}`, which is not there: no notebook can start"
        return [Finding("problem", "kernel", text, remedy)]
    text = f"Jupyter's python3 is `{command}`, another Python (`labkit run` uses this one)"
    return [Finding("note", "kernel", text, remedy)]


def _is_this_python(command: Path) -> bool:
    """Whether it is this Python by any of its names: an environment links python3 to python."""
    here = Path(sys.executable)
    return command.parent == here.parent and command.exists() and command.samefile(here)


def check_widgets() -> list[Finding]:
    """Whether JupyterLab here can draw ipywidgets: without its half there are no buttons."""
    try:
        importlib.metadata.version("jupyterlab")
        major = int(importlib.metadata.version("ipywidgets").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return []  # said already, or no JupyterLab in this environment
    from jupyter_core.paths import jupyter_path

    wanted = _EXTENSION_MAJOR.get(major)
    remedy = pip("install --force-reinstall --no-deps ipywidgets jupyterlab_widgets")
    for folder in jupyter_path("labextensions"):
        file = Path(folder, WIDGETS_EXTENSION, "package.json")
        if file.is_file():
            found = str(json.loads(file.read_text(encoding="utf-8"))["version"])
            if wanted is None or int(found.partition(".")[0]) == wanted:
                return [Finding("ok", "widgets", f"ipywidgets {major}, with JupyterLab's half")]
            text = (
                f"ipywidgets {major} needs {WIDGETS_EXTENSION} {wanted}, and `{file.parent}` is "
                f"{found}: lessons have no buttons"
            )
            if not file.is_relative_to(sys.prefix):  # pip does not change it there
                remedy = f"remove the folder `{file.parent}`"
            return [Finding("problem", "widgets", text, remedy)]
    text = f"JupyterLab lacks its half of ipywidgets ({WIDGETS_EXTENSION}): lessons have no buttons"
    return [Finding("problem", "widgets", text, remedy)]


def check_jupyter() -> list[Finding]:
    """Where Jupyter keeps what kernels and it say to each other; whether it starts for root."""
    if importlib.util.find_spec("jupyter_core") is None:
        return []
    from jupyter_core.paths import jupyter_runtime_dir

    from labkit.doctor.machine import nearest, unwritable

    findings = []
    folder = Path(jupyter_runtime_dir())
    if reason := unwritable(nearest(folder)):
        text = f"`{folder}` cannot be written ({reason}): no kernel can start"
        remedy = "set JUPYTER_RUNTIME_DIR to a folder that you may write to"
        findings.append(Finding("problem", "jupyter", text, remedy))
    if getattr(os, "geteuid", lambda: 1)() == 0 and importlib.util.find_spec("jupyterlab"):
        text = "you are root, for whom JupyterLab does not start by itself"
        remedy = "start it with `make lab`, or with `jupyter lab --allow-root`"
        findings.append(Finding("note", "jupyter", text, remedy))
    return findings

"""A kernel for Jupyter whose GPU is not there."""

import importlib.util
import json
import sys

from gpumem.files import TemporaryFolder
from gpumem.hardware import catalogue
from gpumem.inputs import InputError
from phantom_gpu.environment import environment


def install_kernel(gpu: str, count: int = 1) -> tuple[str, str]:
    """Add a kernel with ``count`` phantom GPUs to the user's; return its title and its folder.

    The kernel runs this Python. One of the same name is replaced; ``jupyter kernelspec remove``
    takes it away. ``JUPYTER_DATA_DIR`` names another place than the user's, such as the
    ``share/jupyter`` of an environment, whose kernels everybody sees.

    Raises:
        InputError: no such GPU, no phantom can be made of it here, or a kernel cannot run here.
        OSError: the folder of kernels cannot be written.
    """
    if importlib.util.find_spec("ipykernel") is None:
        raise InputError("a kernel needs Jupyter: pip install 'gpu-memory-lab[notebooks]'")
    from jupyter_client.kernelspec import KernelSpecManager

    card = catalogue.gpu(gpu)
    environment(card, count)  # builds what it needs, or says why it cannot
    title = f"Python (phantom {f'{count} × ' if count > 1 else ''}{card.name})"
    start = [sys.executable, "-m", __package__, f"{card.key}x{count}", "-m"]
    spec = {
        "argv": [*start, "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": title,
        "language": "python",
        "metadata": {"debugger": True},
        "env": {"TORCH_CPP_LOG_LEVEL": "ERROR"},
    }
    with TemporaryFolder() as folder:
        (folder / "kernel.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")
        name = f"phantom-{card.key.replace(':', '-')}" + (f"x{count}" if count > 1 else "")
        return title, KernelSpecManager().install_kernel_spec(str(folder), name, user=True)

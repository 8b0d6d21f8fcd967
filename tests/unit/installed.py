"""The package as others have it: built, and installed where there is no clone."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from gpumem.hardware import PHANTOM_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
#: What would lead to the clone, or to a phantom GPU.
NOT_OURS = ("PYTHONPATH", "LD_PRELOAD", PHANTOM_VARIABLE)


def pins(name: str) -> dict[str, str]:
    """The versions of a constraints file."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def build(kind: str, folder: Path, source: Path = ROOT) -> Path:
    """Build the ``wheel`` or the ``sdist`` of ``source`` into ``folder``, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


def empty_environment(folder: Path) -> tuple[Path, Path]:
    """Python and the site-packages of a new environment with nothing in it, not even pip."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=120)
    [packages] = folder.glob("lib/python*/site-packages")
    return folder / "bin" / "python", packages


def packages_here() -> list[Path]:
    """The site-packages of the environment that runs this, in order."""
    return [Path(path) for path in sys.path if path.endswith("site-packages")]


def put_below(packages: Path, paths: Iterable[Path]) -> None:
    """Have an environment with these site-packages import from ``paths`` what it lacks itself."""
    (packages / "below.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")


def install(wheel: Path, folder: Path) -> Path:
    """Return the commands' folder of a new environment with ``wheel`` over this one's packages."""
    python, packages = empty_environment(folder)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True, timeout=120)
    put_below(packages, packages_here())  # only now, or pip would see the clone's own
    (folder / "share").symlink_to(Path(sys.prefix, "share"))  # Jupyter's templates
    return python.parent


def run(*command: str | Path, folder: Path, exit_code: int = 0, **variables: str) -> str:
    """Run a command in ``folder``, and return what it printed."""
    environment = {name: text for name, text in os.environ.items() if name not in NOT_OURS}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout + done.stderr

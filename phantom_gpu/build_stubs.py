"""Build stub libraries for the CUDA build of PyTorch that is installed.

Every symbol that PyTorch's libraries leave undefined gets a stub that says "success"; those with a
meaning are written in ``native``. They go into a folder of the cache whose name holds the versions
and a hash of the sources, so that another torch or another labkit builds its own.

Limits: Linux on x86-64, with g++ and nm. No device code is built, and no header of NVIDIA's is
kept: those of the package nvidia-cuda-runtime are used.
"""

import hashlib
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import filelock

from gpumem.files import cache_folder
from gpumem.inputs import InputError

NATIVE = Path(__file__).parent / "native"
#: Library without its version -> which symbols are its own, and the file that has some of them.
LIBRARIES = {
    "libcudart.so": (r"__cuda|cuda", "cuda.cpp"),
    "libcuda.so": (r"cu[A-Z](?!ile)", None),
    "libcublas.so": (r"cublas(?!Lt)", "cublas.c"),
    "libcublasLt.so": (r"cublasLt", "cublasLt.c"),
    "libcudnn.so": (r"cudnn", "cudnn.c"),
    "libnccl.so": (r"nccl", "nccl.c"),
    "libcufft.so": (r"cufft", None),
    "libcurand.so": (r"curand", None),
    "libcusparse.so": (r"cusparse(?!Lt)", None),
    "libcusparseLt.so": (r"cusparseLt", None),
    "libcusolver.so": (r"cusolver", None),
    "libnvrtc.so": (r"nvrtc", "nvrtc.c"),
    "libcufile.so": (r"cuFile", None),
    "libcupti.so": (r"cupti", None),
    "libnvshmem_host.so": (r"_?nvshm", None),
    "libnvidia-ml.so": (r"nvml", "nvml.c"),
}
#: Opened by name only, so that no library of PyTorch's says their version.
OPENED_BY_NAME = {"libcuda.so": "libcuda.so.1", "libnvidia-ml.so": "libnvidia-ml.so.1"}


#: Functions that write sizes, and the positions of the pointers to these: NVIDIA's references of
#: cuSOLVER, cuSPARSE, cuFFT and cuDNN. Nobody but the libraries knows the sizes.
SIZES = {
    r"cusolverDn[SDCZ]ge(?:qrf|trf)_bufferSize": ("int", 5),
    r"cusolverDn[SDCZ]gesvd_bufferSize": ("int", 3),
    r"cusolverDn[SDCZ]gesvdaStridedBatched_bufferSize": ("int", 16),
    r"cusolverDn[SDCZ]gesvdj_bufferSize": ("int", 12),
    r"cusolverDn[SDCZ]gesvdjBatched_bufferSize": ("int", 11),
    r"cusolverDn[SDCZ](?:sy|he)evd_bufferSize": ("int", 7),
    r"cusolverDn[SDCZ](?:sy|he)evj(?:Batched)?_bufferSize": ("int", 7),
    r"cusolverDn[SDCZ]potrf_bufferSize": ("int", 5),
    r"cusolverDn[SDCZ]sytrf_bufferSize": ("int", 4),
    r"cusolverDn[SDCZ](?:or|un)gqr_bufferSize": ("int", 7),
    r"cusolverDn[SDCZ](?:or|un)mqr_bufferSize": ("int", 11),
    r"cusolverDnXgeev_bufferSize": ("size_t", 17, 18),
    r"cusolverDnXgeqrf_bufferSize": ("size_t", 10, 11),
    r"cusolverDnXpotrf_bufferSize": ("size_t", 8, 9),
    r"cusolverDnXsyevd_bufferSize": ("size_t", 11, 12),
    r"cusolverDnXsyevBatched_bufferSize": ("size_t", 11, 12),
    r"cusolverDnXsytrs_bufferSize": ("size_t", 11, 12),
    r"cusparse[SDCZ]bsrsm2_bufferSize": ("int", 13),
    r"cusparse[SDCZ]bsrsv2_bufferSize": ("int", 11),
    r"cusparse[SDCZ]csrgeam2_bufferSizeExt": ("size_t", 19),
    r"cusparse(?:SDDMM|SpMM|SpSM)_bufferSize": ("size_t", 10),
    r"cusparse(?:SpMV|SpSV)_bufferSize": ("size_t", 9),
    r"cusparseSpGEMM_(?:workEstimation|compute)": ("size_t", 11),
    r"cusparseSpMatGetSize": ("int64_t", 1, 2, 3),
    r"cusparseX\w+sort_bufferSizeExt": ("size_t", 6),
    r"cusparseLtMatmulGetWorkspace": ("size_t", 2),
    r"cufftXtMakePlanMany": ("size_t", 12),
    r"cudnnDropoutGetStatesSize": ("size_t", 1),
    r"cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize": ("size_t", 8),
    r"cudnnGetBatchNormalizationBackwardExWorkspaceSize": ("size_t", 10),
    r"cudnnGetBatchNormalizationTrainingExReserveSpaceSize": ("size_t", 5),
    r"cudnnGetCTCLossWorkspaceSize": ("size_t", 8),
    r"cudnnGetCTCLossWorkspaceSize_v8": ("size_t", 5),
    r"cudnnGetRNNTempSpaceSizes": ("size_t", 4, 5),
    r"cudnnGetRNNWeightSpaceSize": ("size_t", 2),
}


@dataclass(frozen=True)
class Wheel:
    """The CUDA build of PyTorch, and NVIDIA's headers for it.

    Attributes:
        torch: the folder of the package.
        headers: the folder with ``cuda.h`` and ``cuda_runtime_api.h``.
        version: of torch, as ``2.13.0+cu130``.
        cuda: of CUDA, as ``13.0``.
    """

    torch: Path
    headers: Path
    version: str
    cuda: str

    @property
    def libraries(self) -> list[Path]:
        """Those that ask for CUDA's: torch's, and bitsandbytes' for the same major version."""
        found = sorted((self.torch / "lib").glob("*.so*"))
        spec = importlib.util.find_spec("bitsandbytes")
        if spec is not None:
            major = self.cuda.partition(".")[0]
            found += sorted(Path(spec.origin).parent.glob(f"libbitsandbytes_cuda{major}*.so"))
        return found


def find_wheel() -> Wheel:
    """Return the CUDA build of PyTorch that this interpreter would import.

    Raises:
        InputError: this is not Linux on x86-64, or torch, its CUDA build, the headers or a compiler
            is missing; the message names the remedy.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise InputError("the phantom GPU needs Linux on x86-64")
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise InputError("the phantom GPU needs PyTorch: make phantom")
    folder = Path(spec.origin).parent
    said = (folder / "version.py").read_text()
    version = re.search(r"__version__ = '(.+)'", said)[1]
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise InputError(
            f"torch {version} is not a CUDA build, which the phantom GPU needs: "
            "`pip install torch` on Linux brings one, and `make phantom` in a clone"
        )
    for program in ("g++", "nm"):
        if shutil.which(program) is None:
            raise InputError(
                f"the phantom GPU is built with {program}, which is missing: install g++"
            )
    headers = _headers(folder.parent)
    if headers is None:
        raise InputError("CUDA's headers are missing: pip install nvidia-cuda-runtime")
    cuda = re.search(r"cuda: .* = '(.+)'", said)[1]
    return Wheel(folder, headers, version, cuda)


def _headers(packages: Path) -> Path | None:
    """Return NVIDIA's headers: beside torch, else from wherever their package is."""
    places = [packages, *map(Path, sys.path)]
    for place in places:
        for pattern in ("nvidia/cu*/include", "nvidia/cuda_runtime/include"):
            for found in sorted(place.glob(pattern), reverse=True):
                if (found / "cuda_runtime_api.h").exists() and (found / "cuda.h").exists():
                    return found
    return None


def stub_libraries(wheel: Wheel) -> list[Path]:
    """Return the stub libraries for ``wheel``, building them first where the cache has none.

    Two processes that build at once wait for each other; a build that is killed leaves nothing that
    a later one takes for whole.

    Raises:
        InputError: the cache cannot be written, or the compiler fails.
    """
    folder = cache_folder() / "phantom" / _key(wheel)
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{folder}.lock"):
                if not folder.exists():
                    _build_into(folder, wheel)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(
                f"the phantom GPU's libraries cannot be written to {folder.parent}: {reason}; "
                "set LABKIT_CACHE to a folder that can"
            ) from None
    return sorted(folder.glob("*.so*"))


def _key(wheel: Wheel) -> str:
    """Name the build by all that it depends on."""
    hashed = hashlib.sha256()
    for source in sorted([*NATIVE.iterdir(), Path(__file__)]):
        hashed.update(source.name.encode())
        hashed.update(source.read_bytes())
    for library in wheel.libraries:
        stat = library.stat()
        hashed.update(f"{library} {stat.st_size} {stat.st_mtime_ns}".encode())
    return f"{wheel.version}-{hashed.hexdigest()[:12]}"


def _build_into(folder: Path, wheel: Wheel) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as temporary:
        scratch, out = Path(temporary) / "scratch", Path(temporary) / "out"
        (scratch / "crt").mkdir(parents=True)
        out.mkdir()
        shutil.copy(NATIVE / "host_defines.h", scratch / "crt" / "host_defines.h")
        needed = _undefined_symbols(wheel)
        sonames = _sonames(wheel)
        for library, (pattern, source) in LIBRARIES.items():
            soname = OPENED_BY_NAME.get(library) or sonames.get(library)
            if soname is None:
                continue  # this build of torch does not use it
            symbols = {name: node for name, node in needed.items() if re.match(pattern, name)}
            if library == "libcuda.so":  # Triton's launcher asks for more of the driver than torch
                header = (wheel.headers / "cuda.h").read_text()
                declared = re.findall(r"CUDAAPI (cu[A-Z]\w+)\(", header)
                symbols = dict.fromkeys(declared, "") | symbols
            _build_library(out / soname, symbols, source, wheel, scratch)
        out.rename(folder)


def _undefined_symbols(wheel: Wheel) -> dict[str, str]:
    """Return every symbol that is asked for, with the node of its version, or ``""``."""
    needed = {}
    for library in wheel.libraries:
        for symbol in _symbols(library, "-D", "--undefined-only"):
            name, _, node = symbol.partition("@")
            needed[name] = node or needed.get(name, "")
    return needed


def _sonames(wheel: Wheel) -> dict[str, str]:
    """Return the versioned name under which torch loads each library."""
    sonames = {}
    for library in (wheel.torch / "lib").glob("lib*.so"):  # NVRTC's may be libcaffe2_nvrtc's alone
        for soname in re.findall(rb"lib[\w-]+\.so\.\d+", library.read_bytes()):
            name = soname.decode()
            sonames[name[: name.index(".so") + 3]] = name
    return sonames


def _symbols(library: Path, *options: str) -> list[str]:
    listed = _run("nm", *options, library).splitlines()
    return [line.split()[-1] for line in listed if line.strip()]


def _build_library(
    target: Path, symbols: dict[str, str], source: str | None, wheel: Wheel, scratch: Path
) -> None:
    objects = []
    if source is not None:
        compiled = scratch / f"{source}.o"
        language = ["-x", "c++", "-std=c++17"] if source.endswith(".cpp") else ["-x", "c"]
        include = [f"-I{wheel.headers}", f"-I{scratch}"]
        _run(
            "g++", *language, "-O1", "-fPIC", "-w", *include, "-c", NATIVE / source, "-o", compiled
        )
        objects.append(compiled)
    written = set()
    for file in objects or scratch.glob("cuda.cpp.o"):  # the driver's functions are the runtime's
        written |= set(_symbols(file, "--defined-only", "-g"))
    stubs = scratch / "stubs.c"
    lines = ["#include <stdint.h>", "#include <stdlib.h>"]
    lines += [_stub(name) for name in sorted(symbols.keys() - written)]
    stubs.write_text("\n".join(lines) + "\n")
    command = ["g++", "-shared", "-fPIC", "-w", "-O1", "-x", "c", stubs, "-x", "none", *objects]
    command += ["-o", target, f"-Wl,-soname,{target.name}", "-ldl"]
    nodes = sorted(set(symbols.values()) - {""})
    if nodes:
        script = scratch / "versions.map"
        script.write_text("".join(f"{node} {{ global: *; }};\n" for node in nodes))
        command.append(f"-Wl,--version-script={script}")
    if target.name.startswith("libcuda.so"):
        command += ["-Wl,--no-as-needed", next(target.parent.glob("libcudart.so*"))]
    _run(*command)


def _stub(name: str) -> str:
    """Write a function that succeeds; one that creates something hands out a pointer to zeros, one
    that says how large a workspace must be says that none is needed, which the report tells."""
    for pattern, (kind, *places) in SIZES.items():
        if re.fullmatch(pattern, name):
            parameters = ", ".join(f"void *a{n}" for n in range(max(places) + 1))
            written = " ".join(f"if (a{n}) *({kind} *)a{n} = 0;" for n in places)
            said = f'phantom_unsized("{name}");'
            return (
                f"void phantom_unsized(const char *); "
                f"int {name}({parameters}) {{ {written} {said} return 0; }}"
            )
    if re.search(
        r"bufferSize|WorkspaceSize|SpaceSize|MakePlan|workEstimation|GetWorkspace"
        r"|Convolution\w*Algorithm",  # of an API that only TORCH_CUDNN_V8_API_DISABLED chooses
        name,
    ):
        return f"int {name}(void) {{ return 7; }}"  # an error, not a size by chance
    creates = re.search(r"Create|ModuleLoad|GetFunction|CommInit|CommSplit", name)
    hands_out = "*made = calloc(1, 256); " if creates and "Backend" not in name else ""
    return f"int {name}(void **made) {{ {hands_out}return 0; }}"


def _run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InputError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout

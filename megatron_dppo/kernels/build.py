"""Compiles the CUDA source of the loss: into the wheel if nvcc is available, else on first use into a cache.

setup.py loads this file by its path, without torch installed. At import time it therefore imports only
the standard library and the package's errors, which need nothing else either.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from megatron_dppo.errors import KernelBuildError
from megatron_dppo.runtime.files import cache_folder

logger = logging.getLogger(__name__)

CSRC = Path(__file__).with_name("csrc")
PACKAGED = Path(__file__).with_name("lib")
LIBRARY = "libdppo_kernels.so"
ARCHITECTURES = ("80", "90", "100")
NVCC_FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-Xptxas", "-v")
HOST_FLAGS = ("-O2", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")
OLDEST_HOST_COMPILER = 9
OLDEST_CAPABILITY = (8, 0)

_SOURCE_SUFFIXES = {".cu", ".cuh", ".cpp", ".h"}
# Files that nvcc needs, in site-packages/nvidia/cu13, with the PyPI package that contains each.
_PYPI_PARTS = {
    "nvvm/bin/cicc": "nvidia-nvvm",
    "include/crt/host_config.h": "nvidia-cuda-crt",
    "include/cuda_runtime.h": "nvidia-cuda-runtime",
    "include/nv/target": "nvidia-cuda-cccl",
}
_HOW_TO_GET_NVCC = (
    "Install the CUDA toolkit and put its bin on PATH or set CUDA_HOME to it, or install the compiler from "
    "PyPI: pip install 'megatron_dppo[nvcc]' (some 100 MB)."
)


def find_nvcc() -> Path:
    """The compiler in $CUDA_HOME/bin, else on PATH, else among this Python's packages."""
    home = os.environ.get("CUDA_HOME")
    if home and (found := shutil.which("nvcc", path=Path(home) / "bin")):
        return Path(found)
    if found := shutil.which("nvcc"):
        return Path(found)
    for toolkit in _pypi_toolkits():
        missing = [package for part, package in _PYPI_PARTS.items() if not (toolkit / part).exists()]
        if missing:
            raise KernelBuildError(
                f"{toolkit}: found nvcc without {', '.join(missing)}, expected them in the same folder. "
                f"Install them, with nvcc's version: pip install {' '.join(missing)}"
            )
        return toolkit / "bin" / "nvcc"
    in_home = f"{home}/bin" if home else "$CUDA_HOME/bin (CUDA_HOME is not set)"
    raise KernelBuildError(
        f"found no nvcc in {in_home}, on PATH or among this Python's packages; the kernels of the loss are "
        f"compiled with it. {_HOW_TO_GET_NVCC}"
    )


def _pypi_toolkits() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [path for folder in folders for path in sorted(Path(folder).glob("cu*"), reverse=True)]
    return [path for path in found if os.access(path / "bin" / "nvcc", os.X_OK)]


def find_host_compiler() -> Path:
    """The C++ compiler that $CXX names, else g++."""
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found is None:
        where = f"the program {name!r} that CXX names" if "CXX" in os.environ else "g++ on PATH"
        raise KernelBuildError(
            f"found no C++ compiler, expected {where}. Install g++ (Debian: apt-get install g++), or set CXX "
            "to the path of one."
        )
    version = _run([found, "-dumpfullversion", "-dumpversion"]).stdout.strip()
    major = re.match(r"\d+", version)
    if major is None or int(major[0]) < OLDEST_HOST_COMPILER:
        raise KernelBuildError(
            f"{found}: found version {version or 'unknown'}, expected {OLDEST_HOST_COMPILER} or newer, for "
            "C++17. Install a newer g++, or set CXX to the path of one."
        )
    return Path(found)


def build_cuda_library(
    destination: Path, architectures: Sequence[str] = ARCHITECTURES, *, sources: Path = CSRC
) -> Path:
    """Compile the kernels for each architecture, and PTX of the last for GPUs that come after it.

    The compilers' output (registers and spills of each kernel) is kept next to the library. The library is
    moved into place last, and atomically.

    Args:
        destination: The library's path.
        architectures: Compute capabilities without their dot, ascending.
        sources: The folder with capi.cu.
    """
    nvcc, host_compiler = find_nvcc(), find_host_compiler()
    targets = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in architectures]
    targets.append(f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}")
    command = [str(nvcc), "-ccbin", str(host_compiler), *NVCC_FLAGS, *targets, *_runtime_folder(nvcc)]
    hint = "CUDA_HOME chooses another toolkit; sm_100 needs nvcc 12.8 or newer."
    return _compile(command, sources / "capi.cu", destination, hint)


def _runtime_folder(nvcc: Path) -> list[str]:
    """The option for PyPI's CUDA runtime: its package has lib where nvcc looks in lib64."""
    folder = nvcc.resolve().parents[1] / "lib"
    return ["-L", str(folder)] if (folder / "libcudart_static.a").exists() else []


def build_host_library(destination: Path, *, sources: Path = CSRC) -> Path:
    """Compile the same kernels for the CPU, as the tests run them."""
    command = [str(find_host_compiler()), *HOST_FLAGS]
    return _compile(command, sources / "host.cpp", destination, "CXX chooses another compiler.")


def _compile(command: list[str], source: Path, destination: Path, hint: str) -> Path:
    """Run the compiler in a temporary folder, then move its output, and last the library, into place."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".compiling-") as scratch:
        made = Path(scratch) / destination.name
        done = _run([*command, str(source), "-o", str(made)])
        if done.returncode != 0 or not made.exists():
            errors = [line for line in done.stdout.splitlines() if not _REPORT_LINE.match(line)]
            raise KernelBuildError(
                f"{source}: found that it does not compile (exit status {done.returncode}). {hint}\n"
                f"{shlex.join(done.args)}\n" + "\n".join(errors)
            )
        _report_path(made).write_text(done.stdout, encoding="utf-8")
        _report_path(made).replace(_report_path(destination))
        made.replace(destination)
    return destination


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `stdout` of the result also has its standard error."""
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise KernelBuildError(
            f"{command[0]}: found that it does not start ({error.strerror}), expected a compiler. Reinstall "
            "it, or name another: CUDA_HOME or PATH for nvcc, CXX for the host's."
        ) from error


def _report_path(library: Path) -> Path:
    return library.with_suffix(".compiler.txt")


_REPORT_LINE = re.compile(r"\s*(ptxas info\s*:|\d+ bytes stack frame)")


def source_hash(architectures: Sequence[str] = ARCHITECTURES, *, sources: Path = CSRC) -> str:
    """Return the hash of the library's inputs: names and contents of sources, flags, architectures, CPU."""
    digest = hashlib.sha256()
    for part in (*NVCC_FLAGS, *architectures, platform.machine()):
        digest.update(part.encode() + b"\0")
    for path in sorted(path for path in sources.iterdir() if path.suffix in _SOURCE_SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:24]


def build_packaged_library(folder: Path, *, sources: Path = CSRC) -> Path:
    """Compile the wheel's library, and write its hash next to it, which `cuda_library` compares.

    An existing library of the same hash is kept; any other is removed first.
    """
    expected = source_hash(sources=sources)
    if library := _packaged_library(folder, expected):
        return library
    shutil.rmtree(folder, ignore_errors=True)
    library = build_cuda_library(folder / LIBRARY, sources=sources)
    library.with_suffix(".hash").write_text(expected + "\n", encoding="utf-8")
    return library


def _packaged_library(folder: Path, expected_hash: str) -> Path | None:
    library = folder / LIBRARY
    try:
        is_ours = library.with_suffix(".hash").read_text(encoding="utf-8").strip() == expected_hash
    except OSError:
        return None
    return library if is_ours and library.exists() else None


def cuda_library(
    architectures: Sequence[str] | None = None, *, sources: Path = CSRC, packaged: Path = PACKAGED
) -> Path:
    """The compiled kernels: the wheel's, else those in the user's cache, else compiled now.

    If several processes call this at the same time, one compiles and the others wait.

    Args:
        architectures: Architectures to compile for, if compiling is needed; by default the present GPU, or all
            architectures of a wheel without a GPU.
        sources: The folder with capi.cu.
        packaged: The folder in which a wheel has the library.
    """
    architectures = tuple(architectures or _present_architectures())
    if library := _packaged_library(packaged, source_hash(sources=sources)):
        return library
    library = cache_folder() / source_hash(architectures, sources=sources) / LIBRARY
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with (library.parent / "lock").open("a") as lock, _locked(lock):
            if not library.exists():
                started = time.monotonic()
                build_cuda_library(library, architectures, sources=sources)
                targets = ", ".join(f"sm_{each}" for each in architectures)
                seconds = time.monotonic() - started
                logger.info("compiled the kernels for %s in %.1f s: %s", targets, seconds, library)
    except OSError as error:
        raise KernelBuildError(
            f"{error.filename or library}: found that it cannot be written ({error.strerror}), expected a "
            "cache for the compiled kernels. Set XDG_CACHE_HOME to a folder that can."
        ) from error
    return library


def _present_architectures() -> tuple[str, ...]:
    import torch  # not needed to compile, and absent when a wheel is built

    if not torch.cuda.is_available():
        return ARCHITECTURES
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        raise KernelBuildError(
            f"{torch.cuda.get_device_name()}: found compute capability {capability[0]}.{capability[1]}, "
            f"expected {OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or newer. Use an A100 or a later GPU."
        )
    return (f"{capability[0]}{capability[1]}",)


@contextlib.contextmanager
def _locked(stream: TextIO) -> Iterator[None]:
    """Hold the lock, which any end of the process releases; do nothing on file systems without locks."""
    try:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s: waiting for another process to compile the kernels", stream.name)
            fcntl.flock(stream, fcntl.LOCK_EX)
    except OSError as error:
        logger.warning("%s: the file system has no locks (%s); compiling all the same", stream.name, error)
    yield

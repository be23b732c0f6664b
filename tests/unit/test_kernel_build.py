"""Building the kernels: which compiler, when, how often, and what the wheel holds."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_dppo.errors import KernelBuildError
from megatron_dppo.kernels import build
from tests.support.kernel_usage import kernel_usage
from tests.support.processes import wait_until

ROOT = Path(__file__).resolve().parents[2]

# Writes its arguments to calls.txt and a file in the library's place, once the file `go` is there.
FAKE_NVCC = """#!/bin/sh
echo "$@" >>"{folder}/calls.txt"
until [ -e "{folder}/go" ]; do sleep 0.1; done
while [ $# -gt 1 ]; do
  if [ "$1" = -o ]; then echo library >"$2"; fi
  shift
done
echo "{output}" >&2
exit {status}
"""


@dataclass(frozen=True)
class Toolchain:
    """A folder of programs that is all of PATH, its nvcc a script."""

    folder: Path

    def write_nvcc(self, status: int = 0, output: str = "") -> None:
        self.write_program("nvcc", FAKE_NVCC.format(folder=self.folder, status=status, output=output))
        self.go.touch()

    def write_program(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    @property
    def go(self) -> Path:
        """While it is away, nvcc does not end."""
        return self.folder / "go"

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "sleep", "g++"):
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    made = Toolchain(folder)
    made.write_nvcc()
    return made


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "capi.cu").write_text("the C ABI")
    (folder / "combine.cuh").write_text("a kernel")
    return folder


def test_the_hash_follows_names_contents_and_architectures(sources: Path) -> None:
    before = build.source_hash(sources=sources)
    os.utime(sources / "capi.cu", (0, 0))
    (sources / "capi.cu~").write_text("an editor's copy")
    assert build.source_hash(sources=sources) == before
    (sources / "combine.cuh").write_text("a Kernel")
    changed = build.source_hash(sources=sources)
    (sources / "combine.cuh").rename(sources / "renamed.cuh")
    renamed = build.source_hash(sources=sources)
    assert len({before, changed, renamed, build.source_hash(("90",), sources=sources)}) == 4


def test_the_cache_is_used(toolchain: Toolchain, sources: Path, tmp_path: Path) -> None:
    first = build.cuda_library(("90",), sources=sources)
    assert first.read_text() == "library\n"
    assert first.is_relative_to(tmp_path / "cache" / "megatron_dppo")
    assert build.cuda_library(("90",), sources=sources) == first
    assert len(toolchain.calls) == 1
    assert "code=sm_90" in toolchain.calls[0]
    assert "code=compute_90" in toolchain.calls[0]
    assert "sm_80" not in toolchain.calls[0]
    (sources / "combine.cuh").write_text("another kernel")
    assert build.cuda_library(("90",), sources=sources) != first
    assert build.cuda_library(("100",), sources=sources) != first
    assert len(toolchain.calls) == 3


def _start_compiling(sources: Path, log: Path) -> subprocess.Popen[bytes]:
    program = f"""
import logging
from pathlib import Path
from megatron_dppo.kernels import build
logging.basicConfig(level=logging.INFO)
build.cuda_library(("90",), sources=Path({str(sources)!r}))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("w") as stream:
        return subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=stream)


def test_processes_that_ask_at_once_compile_once(toolchain: Toolchain, sources: Path, tmp_path: Path) -> None:
    toolchain.go.unlink()
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    processes = [_start_compiling(sources, log) for log in logs]
    waits = "waiting for another process to compile the kernels"
    wait_until(lambda: any(waits in log.read_text() for log in logs), 300)
    toolchain.go.touch()
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    assert len(toolchain.calls) == 1
    (compiler,) = (log.read_text() for log in logs if waits not in log.read_text())
    assert re.search(r"compiled the kernels for sm_90 in \d+\.\d s", compiler)


def test_lock_of_a_killed_process_blocks_nobody(toolchain: Toolchain, sources: Path, tmp_path: Path) -> None:
    toolchain.go.unlink()
    process = _start_compiling(sources, tmp_path / "log")
    wait_until(lambda: bool(toolchain.calls), 300)
    process.kill()
    process.wait()
    toolchain.go.touch()
    assert build.cuda_library(("90",), sources=sources).exists()
    assert len(toolchain.calls) == 2


def test_a_compiler_that_fails_is_quoted(toolchain: Toolchain, sources: Path) -> None:
    toolchain.write_nvcc(status=2, output="capi.cu(7): error: expected a ;\nptxas info    : 0 bytes gmem")
    with pytest.raises(KernelBuildError) as raised:
        build.cuda_library(("90",), sources=sources)
    message = str(raised.value)
    assert message.startswith(f"{sources / 'capi.cu'}: found that it does not compile (exit status 2)")
    assert str(toolchain.folder / "nvcc") in message
    assert message.endswith("capi.cu(7): error: expected a ;")
    toolchain.write_nvcc()
    assert build.cuda_library(("90",), sources=sources).exists()


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        (None, "found no C\\+\\+ compiler, expected g\\+\\+ on PATH. Install"),
        ("#!/bin/sh\necho 7.5.0", "g\\+\\+: found version 7.5.0, expected 9 or newer"),
        ("#!/no/such/shell", "g\\+\\+: found that it does not start .* expected a compiler"),
    ],
)
def test_unsuitable_host_compiler_is_refused(
    toolchain: Toolchain, sources: Path, program: str | None, fault: str
) -> None:
    (toolchain.folder / "g++").unlink()
    if program is not None:
        toolchain.write_program("g++", program)
    with pytest.raises(KernelBuildError, match=fault):
        build.cuda_library(("90",), sources=sources)
    assert toolchain.calls == []


def test_a_cache_that_cannot_be_written(
    toolchain: Toolchain, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KernelBuildError, match="XDG_CACHE_HOME"):
        build.cuda_library(("90",), sources=sources)


def test_cuda_home_comes_before_path(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.find_nvcc() == toolchain.folder / "nvcc"
    home = toolchain.folder / "toolkit"
    (home / "bin").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert build.find_nvcc() == toolchain.folder / "nvcc"
    Toolchain(home / "bin").write_nvcc()
    assert build.find_nvcc() == home / "bin" / "nvcc"


def _find_nvcc_without_site_packages(*packages: Path) -> str:
    """What a Python finds that has nothing but the standard library, this package, and `packages`."""
    program = (
        "from megatron_dppo.errors import KernelBuildError\n"
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('kernel_build', {str(build.__file__)!r})\n"
        "build = sys.modules['kernel_build'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(build)\n"
        "try: print(build.find_nvcc())\n"
        "except KernelBuildError as error: print(error)\n"
    )
    path = os.pathsep.join(map(str, (ROOT, *packages)))
    command = [sys.executable, "-S", "-c", program]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_error_without_nvcc_explains_how_to_get_it(toolchain: Toolchain) -> None:
    (toolchain.folder / "nvcc").unlink()
    message = _find_nvcc_without_site_packages()
    assert message.startswith("found no nvcc in $CUDA_HOME/bin (CUDA_HOME is not set), on PATH or among")
    assert "pip install 'megatron_dppo[nvcc]'" in message


def test_the_compiler_of_pypi_comes_last_and_must_be_whole(toolchain: Toolchain, tmp_path: Path) -> None:
    toolkit = tmp_path / "site-packages" / "nvidia" / "cu13"
    (toolkit / "bin").mkdir(parents=True)
    Toolchain(toolkit / "bin").write_nvcc()
    assert _find_nvcc_without_site_packages(tmp_path / "site-packages") == str(toolchain.folder / "nvcc")
    (toolchain.folder / "nvcc").unlink()
    message = _find_nvcc_without_site_packages(tmp_path / "site-packages")
    assert "found nvcc without nvidia-nvvm, nvidia-cuda-crt, nvidia-cuda-runtime, nvidia-cuda-cccl" in message
    for part in ("nvvm/bin/cicc", "include/crt/host_config.h", "include/cuda_runtime.h", "include/nv/target"):
        (toolkit / part).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / part).touch()
    assert _find_nvcc_without_site_packages(tmp_path / "site-packages") == str(toolkit / "bin" / "nvcc")


def test_the_library_of_the_wheel_is_used_when_its_hash_fits(
    toolchain: Toolchain, sources: Path, tmp_path: Path
) -> None:
    packaged = tmp_path / "lib"
    library = build.build_packaged_library(packaged, sources=sources)
    assert build.cuda_library(("90",), sources=sources, packaged=packaged) == library
    assert build.build_packaged_library(packaged, sources=sources) == library
    assert len(toolchain.calls) == 1
    (sources / "combine.cuh").write_text("another kernel")
    assert build.cuda_library(("90",), sources=sources, packaged=packaged) != library
    assert len(toolchain.calls) == 2


def _wheel(tmp_path: Path) -> zipfile.ZipFile:
    """Of a copy of this repository, as pip makes it."""
    copy = tmp_path / "repository"
    ignored = shutil.ignore_patterns("__pycache__", "lib", "*.egg-info")
    shutil.copytree(ROOT / "megatron_dppo", copy / "megatron_dppo", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "-w", str(tmp_path / "wheels"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "wheels").iterdir()
    return zipfile.ZipFile(path)


def _kernel_files(wheel: zipfile.ZipFile) -> set[str]:
    return {name.partition("megatron_dppo/kernels/")[2] for name in wheel.namelist()}


def test_a_wheel_holds_the_library_and_the_sources(toolchain: Toolchain, tmp_path: Path) -> None:
    with _wheel(tmp_path) as wheel:
        files = _kernel_files(wheel)
        assert {f"lib/{build.LIBRARY}", "lib/libdppo_kernels.hash"} <= files
        assert {f"csrc/{path.name}" for path in build.CSRC.iterdir()} <= files
        assert re.search(r"-py3-none-(?!any)\w+\.whl$", str(wheel.filename))
    assert len(toolchain.calls) == 1
    assert all(f"code=sm_{each}" in toolchain.calls[0] for each in build.ARCHITECTURES)
    assert "code=compute_100" in toolchain.calls[0]


def test_a_wheel_is_made_where_nvcc_fails(toolchain: Toolchain, tmp_path: Path) -> None:
    toolchain.write_nvcc(status=1)
    with _wheel(tmp_path) as wheel:
        files = _kernel_files(wheel)
        assert not [name for name in files if name.startswith("lib/")]
        assert "csrc/capi.cu" in files
        assert str(wheel.filename).endswith("-py3-none-any.whl")


@pytest.mark.slow
def test_nvcc_compiles_every_architecture_without_spills(tmp_path: Path) -> None:
    library = build.build_cuda_library(tmp_path / build.LIBRARY)
    usages = kernel_usage(library)
    kernels = {architecture: set[str]() for architecture in build.ARCHITECTURES}
    for usage in usages:
        kernels[usage.architecture].add(usage.kernel)
        assert usage.keeps_the_promise, usage
    assert kernels["80"]
    assert kernels["80"] == kernels["90"] == kernels["100"]

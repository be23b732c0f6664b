"""How the package installs. Tool settings are in pyproject.toml, exact versions in constraints.txt.

Two dependencies cannot be named below:

- NVIDIA apex (optional, on GPUs: fused multi-tensor optimizer kernels) is built from source, from the
  repository NVIDIA/apex. PyPI's `apex` is another project; never install that one.
- SGLang pins its own torch, so its servers live in a Python environment of their own.
"""

from setuptools import find_packages, setup

setup(
    name="megatron_dppo",
    version="0.1.0",
    description="Reinforcement-learning post-training of MoE language models with Divergence PPO",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_dppo", "megatron_dppo.*"]),
    package_data={"megatron_dppo.diagnostics": ["templates/*"]},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.13.0",
        # The versions that actor/mcore_fixes.py was tested with; it refuses others. Those after 0.16 need 3.12.
        "megatron-core>=0.16.1,<0.17; python_version < '3.12'",
        "megatron-core>=0.16.1,<=0.19.2,!=0.17.*,!=0.18.*,!=0.19.0,!=0.19.1; python_version >= '3.12'",
        "transformers>=5.23,<6",
        # Megatron-Core's checkpoint writer needs psutil without declaring it.
        "psutil>=5.9",
        "pydantic>=2.14,<3",
        "safetensors>=0.8",
        "numpy>=2.4",
        "packaging>=24",
        "pyarrow>=26",
        "tqdm>=4.67",
        "typer>=0.29",
        "tomli-w>=1.2",
        "jinja2>=3.1",
        "plotly>=7.1",
    ],
    extras_require={
        "dev": [
            "hypothesis>=6.170",
            "import-linter>=2.16",
            # What LoRA is compared with.
            "peft>=0.21",
            "pyright>=1.1.414",
            "pytest>=9.2",
            "pytest-xdist>=3.8",
            "ruff>=0.17",
        ],
        "track": ["tensorboard>=2.20", "wandb>=0.21"],
        # modelopt imports requests without declaring it.
        "quantize": ["nvidia-modelopt>=0.47", "requests>=2.32"],
        # Only where CUDA and cuDNN are: without them its import raises instead of being absent.
        "te": ["transformer-engine[pytorch]>=2.9"],
    },
    entry_points={"console_scripts": ["megatron-dppo = megatron_dppo.cli:main"]},
)

"""Checks the `[sglang]` table against the arguments of SGLang's server, and builds the command line from it.

The interpreter that SGLang is installed in lists the arguments, which are cached per version of SGLang. If
SGLang is not installed, the arguments of a tested version are used, which ship with this package.
"""

import functools
import inspect
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_dppo.config.schema import Config
from megatron_dppo.engines import sglang
from megatron_dppo.engines.sglang.records import NCCL, TORCH, one_nccl
from megatron_dppo.engines.sglang.sampling_settings import SET, SET_VARIABLES, variable_problems
from megatron_dppo.errors import Problem, did_you_mean
from megatron_dppo.runtime.files import cache_folder, write_json
from megatron_dppo.runtime.libraries import nccl_version

PYTHON = "python"
"""The only key of [sglang] that is not a server argument: the interpreter that SGLang is installed in."""
DEFAULT_PYTHON = ".venv-sglang/bin/python"
logger = logging.getLogger(__name__)
_PRINT_VERSION = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
_PRINT_OPTIONS = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps({action.dest: dict(
    flag=action.option_strings[0],
    kind="switch" if "StoreTrue" in type(action).__name__ else
         "either" if "Boolean" in type(action).__name__ else
         "many" if action.nargs in ("*", "+") else "one",
    type=getattr(action.type, "__name__", "str"),
    choices=None if action.choices is None else [str(choice) for choice in action.choices],
) for action in parser._actions if action.dest != "help"}))
"""
_PRINT_NCCL = (
    inspect.getsource(nccl_version)
    + """
import torch
print(nccl_version() or "none", torch.__version__)
"""
)
CUMEM, NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"


@dataclass(frozen=True)
class Option:
    """One argument of the server."""

    flag: str  # "--tp-size"
    kind: str  # "switch": --x or nothing; "either": --x or --no-x; "many": several values; "one"
    type: str  # parser of the value: "int", "float", "str", or the name of an SGLang function
    choices: list[str] | None


def interpreter(config: Config) -> Path:
    """Return the Python interpreter that SGLang is installed in."""
    named = str(config.sglang.get(PYTHON, DEFAULT_PYTHON))
    return Path(shutil.which(named) or named).absolute()  # not resolved: in a virtual environment it is a link


def installed_version(python: Path) -> str | None:
    """Return SGLang's version, or None if the interpreter or SGLang is missing."""
    lines = _run(python, _PRINT_VERSION, timeout_s=60)
    return lines[-1] if lines else None


@functools.cache  # importing torch takes seconds
def installed_nccl(python: Path) -> Mapping[str, str]:
    """Return the versions of NCCL and torch of an interpreter, by the names NCCL and TORCH.

    It is empty, and nothing is compared, if that torch is for CPUs or does not import within five minutes.
    """
    lines = _run(python, _PRINT_NCCL, timeout_s=300)
    versions = lines[-1].split() if lines else []
    return {} if versions[:1] in ([], ["none"]) else dict(zip((NCCL, TORCH), versions, strict=False))


def is_for_cpu(python: Path) -> bool:
    """Return whether the interpreter's environment was made for CPUs; it lacks most kernels."""
    return any(python.parents[1].glob("lib/python3*/site-packages/sglang_on_cpu.pth"))


def read_options(python: Path, cache: Path | None = None) -> dict[str, Option] | None:
    """Read the server's arguments by their Python names; return None if SGLang is missing or does not import.

    Args:
        python: The interpreter that SGLang is installed in.
        cache: Folder of cached argument lists. [default: the user's cache]
    """
    version = installed_version(python)
    if version is None:
        return None
    file = (cache or cache_folder()) / f"sglang-{version}-arguments.json"
    try:
        return {name: Option(**option) for name, option in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        lines = _run(python, _PRINT_OPTIONS, timeout_s=300)
    if not lines:
        return None
    options = {name: Option(**option) for name, option in json.loads(lines[-1]).items()}
    write_json(file, {name: asdict(option) for name, option in options.items()})
    return options


def shipped_options(version: str) -> dict[str, Option]:
    """Return the arguments of a supported SGLang version, for machines without SGLang.

    The file is the result of `read_options` for this version; tests/sglang compares them.
    """
    text = resources.files(sglang).joinpath(f"arguments_{version}.json").read_text(encoding="utf-8")
    return {name: Option(**option) for name, option in json.loads(text).items()}


def option_problems(table: Mapping[str, Any], options: Mapping[str, Option]) -> Iterator[Problem]:
    """Yield the problems of an `[sglang]` table: names, types and choices; see also `argument_problems`."""
    for name, value in table.items():
        where = f"sglang.{name}"
        if name == PYTHON or name in SET:
            continue
        if name not in options:
            action = did_you_mean(name, sorted(options.keys() - SET.keys()), "Remove it.", "sglang.{}".format)
            yield Problem(where, name, "an argument of SGLang's server", action)
        elif (expected := _expected_value(value, options[name])) is not None:
            yield Problem(where, repr(value), expected, f"It becomes {options[name].flag} of the server.")


def arguments(table: Mapping[str, Any], options: Mapping[str, Option]) -> list[str]:
    """Build the command-line arguments of a table without problems."""
    line: list[str] = []
    for name, value in table.items():
        if name == PYTHON:
            continue
        option = options[name]
        if option.kind == "switch":
            line += [option.flag] if value else []
        elif option.kind == "either":
            line.append(option.flag if value else "--no-" + option.flag.removeprefix("--"))
        elif option.kind == "many":
            line += [option.flag, *(_text(item) for item in value)]
        else:
            line += [option.flag, _text(value)]
    return line


def server_environment(*, is_on_cpu: bool) -> dict[str, str]:
    """Return this process's environment without PYTHONPATH and the launcher's variables."""
    launcher = (
        "PYTHONPATH",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in launcher and not name.startswith(("TORCHELASTIC_", "GROUP_"))
    }
    return inherited | dict(SET_VARIABLES) | ({"SGLANG_USE_CPU_ENGINE": "1"} if is_on_cpu else {})


def environment_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each variable of this process that must not reach the servers of a config.

    They inherit all others. The library that releases a colocated server's memory does not work with segments
    of PyTorch's allocator that grow: by the allocator's older variable a server ends at its start, and by the
    newer one nothing would be released.
    """
    yield from variable_problems(os.environ)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        settings = os.environ.get(name, "").lower().replace(" ", "").split(",")
        if config.rollout.sglang.colocated and "expandable_segments:true" in settings:
            found = f"{name}={os.environ[name]} with rollout.sglang.colocated"
            action = f"Remove expandable_segments from {name}, or set rollout.sglang.colocated = false."
            yield Problem("the environment", found, "no expandable segments: they are not released", action)


def nccl_settings(config: Config) -> dict[str, str]:
    """Return environment variables for trainer and servers; empty unless NCCL transfers the weights.

    SGLang turns both off in its own process unless the environment or its arguments set them
    (`_set_envs_and_config`). NCCL's own default is on. If ranks of one group allocate buffers differently, the
    first broadcast on a common node fails with an invalid-usage error, or hangs.
    """
    if config.rollout.engine != "sglang" or config.rollout.sglang.weight_sync != "distributed":
        return {}
    has_symmetric_memory = bool(config.sglang.get("enable_symm_mem", False))
    has_nvls = has_symmetric_memory or bool(config.sglang.get("enable_nccl_nvls", False))
    arguments = {CUMEM: has_symmetric_memory, NVLS: has_nvls}
    return {name: "1" if is_on else os.environ.get(name, "0") for name, is_on in arguments.items()}


def nccl_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem if NCCL transfers the weights, and this interpreter has another version than SGLang's."""
    if not nccl_settings(config) or config.sglang.get("device") == "cpu":
        return
    served = installed_nccl(interpreter(config))
    own = trainer_nccl() if served else dict[str, str]()
    if own and own[NCCL] != served[NCCL]:
        found = f"'distributed' with NCCL {own[NCCL]} here and {served[NCCL]} in {interpreter(config)}"
        found += f" (torch {served[TORCH]})" if TORCH in served else ""
        action = f"To have one version, {one_nccl(served[NCCL])}."
        yield Problem("rollout.sglang.weight_sync", found, "one version: NCCL refuses to connect two", action)


def trainer_nccl() -> Mapping[str, str]:
    """Return the versions of NCCL and torch in this interpreter, as `installed_nccl` does."""
    return installed_nccl(Path(sys.executable))


def _expected_value(value: Any, option: Option) -> str | None:
    """Describe the expected value, or return None if the value is valid."""
    if option.kind in ("switch", "either"):
        return None if isinstance(value, bool) else "true or false"
    if option.kind == "many":
        return None if isinstance(value, list) else "a list"
    if isinstance(value, bool | list):
        return "one value"
    if option.choices is not None and str(value) not in option.choices:
        return "one of " + ", ".join(option.choices)
    if option.type == "int" and not isinstance(value, int):
        return "a whole number"
    if option.type == "float" and not isinstance(value, int | float):
        return "a number"
    return None


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _run(python: Path, program: str, timeout_s: float) -> list[str]:
    """Run a program, and return the lines that it prints; an empty list if it fails."""
    environment = server_environment(is_on_cpu=True)
    try:
        result = subprocess.run(
            [str(python), "-W", "ignore", "-c", program],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        text = "%s: found no reply within %.0f s, so the versions there are not checked. Is its disk slow?"
        logger.warning(text, python, timeout_s)
        return []
    except (subprocess.SubprocessError, OSError):
        return []
    return result.stdout.splitlines()

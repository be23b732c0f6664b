"""Errors from an unusable Transformer Engine or apex are caught, and Megatron does not see these packages."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.runtime.libraries import NO_GPU

ENGINE, APEX = "transformer_engine", "apex"
GOOD_APEX = {
    "amp_C.py": "",
    "apex/__init__.py": "",
    "apex/multi_tensor_apply/__init__.py": "",
    "apex/optimizers/__init__.py": "",
}
GOOD_ENGINE = {
    "transformer_engine/__init__.py": "__version__ = '2.9.0+1a2b3c'",
    "transformer_engine/pytorch/__init__.py": "",
}

GOOD_DEEP_EP = {"deep_ep/__init__.py": "class Buffer: ...", "deep_ep/utils.py": ""}

# What the packages do. Seen: Transformer Engine 2.8 without cuDNN, 2.11 without its core, PyPI's apex without
# what it imports. Read in their source: binaries that are missing, of another torch, or of different versions.
ENGINES = {
    "no cuDNN": "import subprocess; subprocess.check_output('false', shell=True)",
    "no core": "raise RuntimeError('Found empty `transformer-engine` meta package installed.')",
    "no library": "import ctypes; ctypes.CDLL('libcudnn_none.so')",
    "no binary": "raise FileNotFoundError('Could not find shared object file for core lib.')",
    "other torch": "raise ImportError('undefined symbol: _ZN3c104cuda')",
    "versions": "assert False, 'TransformerEngine package version mismatch'",
}
FOREIGN_APEXES = {
    "without what it imports": "from pyramid_mailer.interfaces import IMailer",
    "that imports": "velruse = True",
    "for another Python": "print 'hello'",
}


def _look(folder: Path, files: dict[str, str], code: str = "", *, is_on_gpu: bool = True) -> dict[str, Any]:
    """Faults of the libraries in a fresh process that has these files, and what `code` leaves in `seen`."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    program = f"""
import json, sys
sys.path.insert(0, {str(folder)!r})
from megatron_dppo.runtime.libraries import usable_libraries
found, seen = usable_libraries(is_on_gpu={is_on_gpu}), None
{code}
names = "transformer_engine", "apex", "fused_weight_gradient", "deep_ep"
print(json.dumps({{name: getattr(found, name).fault for name in names}} | {{"seen": seen}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ENGINES)
def test_a_broken_transformer_engine_is_a_reason_and_no_traceback(tmp_path: Path, case: str) -> None:
    code = "import importlib.util; seen = importlib.util.find_spec('transformer_engine') is not None"
    found = _look(tmp_path, {"transformer_engine/__init__.py": ENGINES[case]}, code)
    assert found[ENGINE] and ":" in found[ENGINE]
    assert found["seen"] is False


def test_error_of_a_broken_import_is_kept(tmp_path: Path) -> None:
    found = _look(tmp_path, {"transformer_engine/__init__.py": ENGINES["no core"]})
    assert found[ENGINE] == "RuntimeError: Found empty `transformer-engine` meta package installed."


def test_half_of_transformer_engine_is_none_of_it(tmp_path: Path) -> None:
    files = {"transformer_engine/__init__.py": "__version__ = '2.9'", "transformer_engine/common.py": ""}
    code = "seen = [name for name, module in sys.modules.items() if module and 'transformer_e' in name]"
    found = _look(tmp_path, files, code)
    assert "transformer_engine.pytorch" in found[ENGINE]
    assert found["seen"] == []


@pytest.mark.parametrize(("version", "is_usable"), [("2.8.0", False), ("2.9.0", True), ("2.11.0+abc", True)])
def test_an_old_transformer_engine_does_not_count(tmp_path: Path, version: str, is_usable: bool) -> None:
    files = GOOD_ENGINE | {"transformer_engine/__init__.py": f"__version__ = {version!r}"}
    fault = _look(tmp_path, files)[ENGINE]
    assert fault is None if is_usable else fault == f"version {version}; expected 2.9 or newer"


@pytest.mark.parametrize("case", FOREIGN_APEXES)
def test_a_foreign_apex_does_not_count(tmp_path: Path, case: str) -> None:
    found = _look(tmp_path, {"apex/__init__.py": FOREIGN_APEXES[case]}, "seen = sys.modules['apex'] is None")
    assert found[APEX] and found["seen"] is True


def test_nvidias_apex_counts_and_each_kernel_for_itself(tmp_path: Path) -> None:
    found = _look(tmp_path, GOOD_APEX)
    assert found[APEX] is None
    assert found["fused_weight_gradient"].startswith("ModuleNotFoundError")
    assert _look(tmp_path, {"fused_weight_gradient_mlp_cuda.py": ""})["fused_weight_gradient"] is None


def test_deep_ep_counts_whole(tmp_path: Path) -> None:
    assert _look(tmp_path, GOOD_DEEP_EP)["deep_ep"] is None
    broken = {"deep_ep/__init__.py": "import ctypes; ctypes.CDLL('libnvshmem_host_none.so')"}
    assert _look(tmp_path, GOOD_DEEP_EP | broken)["deep_ep"].startswith("OSError")


def test_nothing_is_imported_for_a_cpu(tmp_path: Path) -> None:
    files = GOOD_ENGINE | GOOD_APEX | GOOD_DEEP_EP | {"fused_weight_gradient_mlp_cuda.py": ""}
    found = _look(tmp_path, files, "seen = sys.modules['transformer_engine'] is None", is_on_gpu=False)
    names = (ENGINE, APEX, "fused_weight_gradient", "deep_ep")
    assert found == dict.fromkeys(names, NO_GPU) | {"seen": True}


def test_megatron_imports_with_broken_optional_packages(tmp_path: Path) -> None:
    files = {"transformer_engine/__init__.py": ENGINES["no cuDNN"], "apex/__init__.py": "1 / None"}
    code = """
import warnings; warnings.simplefilter("ignore")
from megatron_dppo.mcore import cpu
cpu.install()
from megatron.core.models.gpt import gpt_layer_specs
seen = [gpt_layer_specs.HAVE_TE, gpt_layer_specs.HAVE_APEX]
"""
    assert _look(tmp_path, files, code)["seen"] == [False, False]

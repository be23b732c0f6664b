"""Test the guards of the repository: skips fail, hangs end, and size limits are enforced."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.lint.setting_places import keys_in

TESTS = Path(__file__).resolve().parents[1]


def _pytest(folder: Path, files: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n    slow: slow\n")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"import pytest\n{text}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_skip_fails_unless_it_needs_a_gpu(tmp_path: Path, workers: tuple[str, ...]) -> None:
    files = {
        "test_a.py": "def test_body(): pytest.skip('why')\n@pytest.mark.skip\ndef test_mark(): ...\n"
        "@pytest.mark.gpu\ndef test_gpu(): pytest.skip('why')\ndef test_passes(): ...",
        "test_b.py": "pytest.importorskip('no_such_module')",
        "gpu/test_c.py": "pytest.skip('why', allow_module_level=True)",
    }
    result = _pytest(tmp_path, files, "-rA", "--continue-on-collection-errors", *workers)
    assert result.returncode == 1
    found = set(re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE))
    names = {("FAILED", "test_a.py::test_body"), ("ERROR", "test_a.py::test_mark"), ("ERROR", "test_b.py")}
    assert found == {*names, ("PASSED", "test_a.py::test_passes")}


def test_every_test_has_a_time_limit(pytestconfig: pytest.Config) -> None:
    """The limit also holds when one file is run alone."""
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 0 < settings["timeout"] <= 1800
    assert pytestconfig.pluginmanager.hasplugin("timeout")


@pytest.mark.parametrize("marks", ["", "@pytest.mark.slow\n"])
def test_a_hanging_test_fails(tmp_path: Path, marks: str) -> None:
    """A test marked slow gets the longer limit of the conftest."""
    files = {"test_a.py": marks + "def test_a():\n    import time\n    time.sleep(3)"}
    result = _pytest(tmp_path, files, "-o", "timeout=1", "-o", "timeout_method=thread")
    assert (result.returncode == 0) == bool(marks)


def test_make_runs_all_suites_and_names_those_that_failed(tmp_path: Path) -> None:
    """Of `make test`, the define that runs its parts."""
    (keep_going,) = re.findall(
        r"^define keep_going\n.*?^endef\n", (TESTS.parent / "Makefile").read_text(), re.DOTALL | re.MULTILINE
    )
    parts = "run one false; run two touch 'a b'; run three sh -c 'exit 3'"
    targets = f"some:\n\t@$(call keep_going,{parts})\nnone:\n\t@$(call keep_going,run one true; run two true)\n"
    (tmp_path / "Makefile").write_text(keep_going + targets)
    some, none = (
        subprocess.run(["make", target], cwd=tmp_path, capture_output=True, text=True, check=False)
        for target in ("some", "none")
    )
    assert (some.returncode, none.returncode) == (2, 0)
    assert "FAILED: one three\n" in some.stderr and "FAILED" not in none.stderr
    assert (tmp_path / "a b").exists()


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.py", "x = 1\n" * 401, "a.py"),
        ("a.py", "def f():\n" + "    x = 1\n" * 80, "a.py:1 f"),
        ("train.py", "x = 1\n" * 121, "train.py"),
        ("a.py", "import torch\ntorch.cuda.synchronize()\n", "a.py:2"),
        ("a.py", "from torch import cuda\n", "a.py:1"),
        ("a.py", "from torch.cuda import Event\n", "a.py:1"),
        ("a.py", "import torch.cuda\n", "a.py:1"),
        ("a.py", "print(1)\n", "a.py:1"),
        ("a.py", '"""Not torch.cuda, not print(1)."""\n' + "x = 1\n" * 399, ""),
        ("runtime/process.py", "import torch\ntorch.cuda.synchronize()\n", ""),
    ],
)
def test_a_broken_limit_is_reported(tmp_path: Path, name: str, text: str, place: str) -> None:
    file = tmp_path / "megatron_dppo" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    command = [sys.executable, str(TESTS / "lint" / "size_limits.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == bool(place)
    assert re.findall(r"^megatron_dppo/(.+?): ", result.stdout, re.MULTILINE) == [place] * bool(place)


_PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
_LOADERS = {"load", "loads", "Unpickler", "_Unpickler"}
_RUN_CODE = {"eval", "exec", "torch.jit.load", "torch.hub.load", "pd.read_pickle", "pandas.read_pickle"}
# Their own unpickler; Megatron's loading, after `refuse_code`.
_EXCEPTIONS = {
    # The pipes and shared memory of a process that this module starts; both ends are this package.
    "megatron_dppo/engines/sglang/decoding_process.py": {"pickle.loads"},
    # After `refuse_code` on the same folder.
    "megatron_dppo/checkpoints/convert/stored_tensors.py": {"FileSystemReader"},
    "megatron_dppo/checkpoints/metadata_pickle.py": {"pickle.Unpickler"},
    "megatron_dppo/checkpoints/megatron_folder.py": {
        "dist_checkpointing.load",
        "dist_checkpointing.load_tensors_metadata",
    },
}


def _unsafe(source: str) -> list[tuple[int, str]]:
    """(line, name) of what could run code from a file: pickles, torch.load as it comes, a model's own code."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [
                a.name for a in node.names if a.name in _PICKLE_MODULES and (a.name != "pickle" or a.asname)
            ]
        elif isinstance(node, ast.ImportFrom):
            is_loader = node.module in _PICKLE_MODULES | {"torch", "torch.serialization"}
            names = [f"{node.module}.{a.name}" for a in node.names if is_loader and a.name in _LOADERS]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in {f"pickle.{name}" for name in _LOADERS}:
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Call):
            names = _unsafe_call(node)
        found += [(getattr(node, "lineno", 0), name) for name in names]
    return found


def _unsafe_call(call: ast.Call) -> list[str]:
    name = ast.unparse(call.func)
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    is_torch = name in {"torch.load", "torch.serialization.load"} and options.get("weights_only") != "True"
    is_numpy = options.get("allow_pickle", "False") != "False"
    is_remote = options.get("trust_remote_code", "False") != "False"
    is_auto = re.search(r"\bAuto\w+\.from_(pretrained|config)$", name) is not None
    is_remote |= is_auto and "trust_remote_code" not in options
    is_megatron = name.startswith("dist_checkpointing.load") or name.endswith("FileSystemReader")
    return [name] if is_torch or is_numpy or is_remote or is_megatron or name in _RUN_CODE else []


def _is_own_copy(source: str, line: int) -> bool:
    """Whether a line unpickles what it has just pickled itself."""
    return "pickle.loads(pickle.dumps(" in source.splitlines()[line - 1]


def test_no_module_loads_code_from_files() -> None:
    root = TESTS.parent
    files = [file for room in ("megatron_dppo", "tools", "examples") for file in (root / room).rglob("*.py")]
    assert files
    found: set[str] = set()
    for file in files:
        source, name = file.read_text(), str(file.relative_to(root))
        unsafe = [(line, what) for line, what in _unsafe(source) if not _is_own_copy(source, line)]
        found |= {f"{name}:{line}: {what}" for line, what in unsafe if what not in _EXCEPTIONS.get(name, ())}
    assert found == set()


_UNSAFE = """
pickle.load(f)
pickle.Unpickler(f).load()
load = pickle.load
from pickle import loads
import pickle as p
import joblib
torch.load(f)
torch.load(f, weights_only=flag)
from torch import load
torch.jit.load(f)
dist_checkpointing.load({}, f)
np.load(f, allow_pickle=True)
A.from_pretrained(x, trust_remote_code=flag)
AutoTokenizer.from_pretrained(x)
transformers.AutoModel.from_config(x)
"""
_SAFE = """
from pickle import UnpicklingError
torch.load(f, weights_only=True)
A.from_pretrained(x, trust_remote_code=False)
Qwen3MoeForCausalLM.from_pretrained(x)
"""


def test_the_guard_against_loading_code_knows_its_forms() -> None:
    assert [source for source in _UNSAFE.split("\n")[1:-1] if not _unsafe(source)] == []
    assert [source for source in _SAFE.split("\n")[1:-1] if _unsafe(source)] == []


@pytest.mark.parametrize(
    ("source", "is_place"),
    [
        ("config.rollout.top_p", True),
        ("x = self._config.rollout\nx.top_p", True),
        ("def f(x: RolloutConfig): return x.top_p", True),
        ("RolloutConfig(top_p=0.5)", True),
        ("class RolloutConfig:\n    top_p: float = 1.0", True),
        ("x = {'rollout': X | {'lag': 1, 'top_p': 0.5}}", True),
        ("make(rollout=dict(lag=1, **{'top_p': 0.5}))", True),
        ("config.rollout.model_copy(update={'top_p': 0.5})", True),
        ("x = 'Set rollout.top_p = 1.'", True),
        ("x = '[data]\\nshuffle = true\\n[rollout]\\nlag = 1\\ntop_p = 0.5'", True),
        ("'rollout.top_p'  # rollout.top_p", False),
        ("top_p = sample(top_p=1.0, lag=x.top_p)", False),
        ("config.evaluation.top_p, config.rollout.lag", False),
        ("x = '[rollout]\\nlag = 1\\n[evaluation]\\ntop_p = 0.5'", False),
    ],
)
def test_a_key_is_counted_with_its_section(source: str, is_place: bool) -> None:
    assert ("rollout.top_p" in keys_in(source)) == is_place

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


def _pytest(folder: Path, test_file: str, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n    slow: slow\n")
    path = folder / test_file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import pytest\n{text}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_skip_fails(tmp_path: Path, workers: tuple[str, ...]) -> None:
    result = _pytest(tmp_path, "test_a.py", "def test_a(): pytest.skip('no reason')", *workers)
    assert result.returncode == 1
    assert "skipped without the gpu marker" in result.stdout
    assert "no reason" in result.stdout


def test_a_skipping_decorator_fails(tmp_path: Path) -> None:
    assert _pytest(tmp_path, "test_a.py", "@pytest.mark.skip\ndef test_a(): ...").returncode == 1


def test_a_file_that_skips_itself_fails(tmp_path: Path) -> None:
    result = _pytest(tmp_path, "test_a.py", "pytest.importorskip('no_such_module')")
    assert result.returncode != 0
    assert "skipped as a whole" in result.stdout


def test_a_gpu_test_may_skip(tmp_path: Path) -> None:
    text = "@pytest.mark.gpu\ndef test_a(): pytest.skip('no GPU')\ndef test_b(): ..."
    assert _pytest(tmp_path, "test_a.py", text).returncode == 0
    whole_file = "pytest.skip('no GPU', allow_module_level=True)"
    assert _pytest(tmp_path, "gpu/test_gpu.py", whole_file).returncode == 0


def test_every_test_has_a_time_limit(pytestconfig: pytest.Config) -> None:
    """The limit also holds when one file is run alone."""
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 0 < settings["timeout"] <= 1800
    assert pytestconfig.pluginmanager.hasplugin("timeout")


@pytest.mark.parametrize("marks", ["", "@pytest.mark.slow\n"])
def test_a_hanging_test_fails(tmp_path: Path, marks: str) -> None:
    """A test marked slow gets the longer limit of the conftest."""
    body = "def test_a():\n    import time\n    time.sleep(3)"
    result = _pytest(tmp_path, "test_a.py", marks + body, "-o", "timeout=1", "-o", "timeout_method=thread")
    assert (result.returncode == 0) == bool(marks)
    assert ("Timeout" in result.stdout + result.stderr) != bool(marks)


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


def _size_limits(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS / "lint" / "size_limits.py"), str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("a.py", "x = 1\n" * 401, "401 lines, limit 400"),
        ("a.py", "def f():\n" + "    x = 1\n" * 80, "a.py:1 f: 81 lines, limit 80"),
        ("train.py", "x = 1\n" * 121, "121 lines, limit 120"),
        ("a.py", "import torch\ntorch.cuda.synchronize()\n", "a.py:2: torch.cuda outside"),
        ("a.py", "from torch import cuda\n", "a.py:1: torch.cuda outside"),
        ("a.py", "from torch.cuda import Event\n", "a.py:1: torch.cuda outside"),
        ("a.py", "import torch.cuda\n", "a.py:1: torch.cuda outside"),
        ("a.py", "print(1)\n", "a.py:1: print"),
    ],
)
def test_a_broken_limit_is_reported(tmp_path: Path, name: str, text: str, fault: str) -> None:
    package = tmp_path / "megatron_dppo"
    package.mkdir()
    (package / name).write_text(text)
    result = _size_limits(tmp_path)
    assert result.returncode == 1
    assert fault in result.stdout


def test_code_within_the_limits_passes(tmp_path: Path) -> None:
    package = tmp_path / "megatron_dppo"
    package.mkdir()
    (package / "a.py").write_text('"""Not torch.cuda, not print(1)."""\n' + "x = 1\n" * 399)
    (package / "runtime").mkdir()
    (package / "runtime" / "process.py").write_text("import torch\ntorch.cuda.synchronize()\n")
    result = _size_limits(tmp_path)
    assert result.returncode == 0
    assert "files:     2, median" in result.stdout


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


@pytest.mark.parametrize(
    "source",
    [
        "pickle.load(f)",
        "pickle.loads(b)",
        "pickle.Unpickler(f).load()",
        "class A(pickle.Unpickler): ...",
        "load = pickle.load",
        "from pickle import loads",
        "import pickle as p",
        "import joblib",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=flag)",
        "from torch import load",
        "torch.jit.load(f)",
        "dist_checkpointing.load({}, f)",
        "np.load(f, allow_pickle=True)",
        "A.from_pretrained(x, trust_remote_code=True)",
        "A.from_pretrained(x, trust_remote_code=flag)",
        "AutoTokenizer.from_pretrained(x)",
        "transformers.AutoModel.from_config(x)",
    ],
)
def test_the_guard_against_loading_code_bites(source: str) -> None:
    assert _unsafe(source)


@pytest.mark.parametrize(
    "source",
    [
        "from pickle import UnpicklingError",
        "torch.load(f, weights_only=True)",
        "A.from_pretrained(x, trust_remote_code=False)",
        "Qwen3MoeForCausalLM.from_pretrained(x)",
    ],
)
def test_the_guard_lets_plain_loading_pass(source: str) -> None:
    assert not _unsafe(source)


def test_prose_counts_docstrings_comments_and_markdown(tmp_path: Path) -> None:
    python, page = tmp_path / "a.py", tmp_path / "a.md"
    python.write_text('"""Return those of the group."""\n\nx = 1  # the share where there is one\ntold = 2\n')
    page.write_text("The server says so and goes on.\nA plain short sentence.\n")
    command = [sys.executable, str(TESTS / "lint" / "prose.py"), str(python), str(page)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [line.removeprefix(f"{tmp_path}/").split("  ")[0] for line in result.stdout.splitlines()]
    assert found[:4] == [
        "a.py:1: those of: Return those of the group.",
        "a.py:3: where: the share where there is one",
        "a.md:1: told, asked: The server says so and goes on.",
        "a.md:1: says: The server says so and goes on.",
    ]
    assert "4 habits in 4 lines" in result.stdout


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

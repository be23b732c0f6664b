"""A custom kind of worker, added as in the package's README, and the frames on the wire."""

import importlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.environments.base import Response, Trajectory
from megatron_dppo.environments.pool import EnvironmentPool
from megatron_dppo.errors import DataError, RewardError
from megatron_dppo.rewards import RewardFault, RewardPool, RewardRequest, RewardResult
from megatron_dppo.runtime import user_code
from megatron_dppo.runtime.framing import FrameReader, frame_of, json_frame, read_message
from megatron_dppo.runtime.user_code import digest_of
from megatron_dppo.types import Prompt
from megatron_dppo.workers.service import WorkerFault, read_reply

README = Path(__file__).parents[2] / "megatron_dppo" / "workers" / "README.md"
MY_FILTERS = """
import time


def is_short(text: str) -> bool:
    if text == "hang":
        time.sleep(600)
    if text == "raise":
        raise KeyError("lost")
    return len(text) < 100
"""


@pytest.fixture
def filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the README's recipe, next to the user's code."""
    _, _, section = README.read_text().partition("\n## Adding a kind of worker\n")
    for module in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
        (name,) = re.findall(r'^"""(\w+\.py)"""', module)
        Path(tmp_path, name).write_text(module)
    Path(tmp_path, "my_filters.py").write_text(MY_FILTERS)
    monkeypatch.chdir(tmp_path)  # where workers find modules
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("filter_pool")


def test_the_recipe_adds_a_kind_of_worker(filters: Any) -> None:
    assert filters.answers == [True, False]
    with pytest.raises(DataError, match=r"data\.filter: found 'my_filters:absent', and 'absent' is not there"):
        filters.WorkerPool(filters.FILTER, "my_filters:absent", num_workers=1, timeout_s=1, memory_mb=0).start()


def test_fault_names_the_request_and_the_services_options(filters: Any) -> None:
    try:
        short, late, failed, last = filters.pool.ask(["short", "hang", "raise", "short"])
    finally:
        filters.pool.close()
    assert short is last is True
    action = "Correct the filter, or raise data.filter_timeout_s."
    assert late == WorkerFault("timed_out", f"text 'hang': found no reply within 10 s. {action}")
    assert isinstance(failed, WorkerFault) and failed.kind == "failed"
    assert failed.message.startswith("text 'raise': its worker exited with code 1. Correct the filter.")
    assert failed.message.endswith("KeyError: 'lost'")


SECRETS = {
    "MEGATRON_DPPO_SGLANG_API_KEY": "s0 first",
    "WANDB_API_KEY": "s2",
    "HF_TOKEN": "s3",
    "JUDGE_API_KEY": "s4 long",
    "AWS_ACCESS_KEY_ID": "s5",
    "DB_PASSWORD": "s6",
    "MYSQL_PWD": "s7",
    "MY_CLIENT_SECRET": "s8",
    "SLURM_JWT": "s9",
    "MEGATRON_DPPO_ALARM_WEBHOOK": "s10",
    "npm_config__authToken": "s11",
    "HTTPS_PROXY": "http://me:s12@proxy:3128",
    "ALL_PROXY": "http://s13@proxy",
    "AZURE_STORAGE_SAS": "s14",
    "HF_ENDPOINT": "https://mirror.example/?sv=2&sig=s15",
    "OMP_API_KEY": "s16",
    "PYTHON_KEYRING_PASSPHRASE": "s17",
    "SSH_AUTH_SOCK": "s18",
    "KUBECONFIG": "s19",
    "MY_SITE": "s20",
    "PATH_TO_IT": "s21",
}
LAUNCHERS = ("RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
COMMON = {
    "TOKENIZERS_PARALLELISM": "false",
    "HTTP_PROXY": "http://proxy:3128",
    "no_proxy": "localhost",
    "LC_COLLATE": "C",
    "TMPDIR": "/tmp",
    "PYTHONUTF8": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "XDG_RUNTIME_DIR": "/run/user/7",
}
PROMPT = Prompt("p", "4", "test", text="2 * 2 =")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's environment."""
    for name, value in (SECRETS | COMMON | dict.fromkeys(LAUNCHERS, "7")).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("passed", [(), ("JUDGE_API_KEY", "MASTER_ADDR", "ALL_PROXY")])
@pytest.mark.parametrize("kind", ["reward", "environment"])
def test_user_code_gets_common_variables_and_what_the_config_names(
    tmp_path: Path, variables: None, kind: str, passed: tuple[str, ...]
) -> None:
    """In programs that it starts, such as a model's."""
    told, limits = tmp_path / "told.json", {"num_workers": 1, "timeout_s": 300.0, "memory_mb": 0}
    if kind == "reward":
        pool: Any = RewardPool("tests.unit.own_environment:tell", environment=passed, **limits)
        pool.score([RewardRequest(PROMPT, str(told), "stop")])
    else:
        pool = EnvironmentPool("tests.unit.own_environment:Teller", environment=passed, **limits)
        pool.step([Trajectory("t", PROMPT, responses=(Response(str(told), "stop"),))])
    pool.close()
    found = json.loads(told.read_text())
    assert {name for name in (*SECRETS, *LAUNCHERS) if name in found} == set(passed)
    assert found.items() >= COMMON.items()
    values = "\n".join(found.values())
    assert [name for name, value in SECRETS.items() if value in values and name not in passed] == []


@pytest.mark.parametrize(
    ("says", "names"),
    [
        ("KeyError: 'JUDGE_API_KEY'", ["JUDGE_API_KEY"]),
        ("set $MY_SITE, or JUDGE_API_KEY_FILE", ["MY_SITE"]),
        ("status 401: log in", ["JUDGE_API_KEY", "HF_TOKEN", "AZURE_STORAGE_SAS"]),
        ("Could not resolve authentication method", ["JUDGE_API_KEY", "HF_TOKEN"]),
        ("no more tokens", []),
    ],
)
def test_a_judge_without_its_key_says_how_to_pass_it_on(variables: None, says: str, names: list[str]) -> None:
    limits: Any = {"num_workers": 1, "timeout_s": 300.0, "memory_mb": 0}
    with RewardPool("tests.unit.own_environment:judge", **limits) as pool:
        (fault,) = pool.score([RewardRequest(PROMPT, says, "stop")])
    assert isinstance(fault, RewardFault)
    _, _, advice = fault.message.partition("data.worker_environment = ")
    assert bool(advice) is bool(names)
    assert all(f'"{name}"' in advice for name in names)
    assert "MEGATRON_DPPO" not in fault.message
    assert (len(names) == 1) is (advice == f'["{names[0] if names else ""}"]')
    with RewardPool("tests.unit.own_environment:judge", environment=("JUDGE_API_KEY",), **limits) as pool:
        (score,) = pool.score([RewardRequest(PROMPT, says, "stop")])
    assert isinstance(score, RewardResult) and score.value == len(SECRETS["JUDGE_API_KEY"])


def test_a_variable_that_is_not_set_stops_the_run(variables: None) -> None:
    limits: Any = {"num_workers": 1, "timeout_s": 300.0, "memory_mb": 0, "environment": ("PATH", "ABSENT_KEY")}
    pool = RewardPool("tests.unit.own_environment:judge", **limits)
    with pool, pytest.raises(RewardError, match=r"data\.worker_environment: found ABSENT_KEY, not set"):
        pool.start()


def test_a_message_arrives_in_any_pieces() -> None:
    messages = [{"text": "é\n\u2028\ud800"}, {}, {"number": 3}]
    data = b"".join(map(json_frame, messages))
    for size in (1, 3, len(data)):
        reader = FrameReader(max_bytes=100)
        parts = [data[start : start + size] for start in range(0, len(data), size)]
        assert [json.loads(found) for part in parts for found in reader.feed(part)] == messages
    stream = io.BytesIO(data + frame_of(b"cut")[:-1])
    assert [json.loads(read_message(stream) or b"") for _ in messages] == messages
    assert read_message(stream) is None


def test_a_message_that_is_too_long_is_refused_after_those_before_it() -> None:
    reader = FrameReader(max_bytes=3)
    assert reader.feed(frame_of(b"abc") + frame_of(b"abcd")) == [b"abc"]
    with pytest.raises(ValueError, match="a message of 4 bytes; expected at most 3"):
        reader.feed(b"")


@pytest.mark.parametrize(
    "message",
    [
        *("", "[]", "{}", "\udcff", '{"number": 0}', '{"number": 0, "files": []}'),
        *('{"number": 0, "files": [], "answer": 1}', '{"number": 1, "files": [], "answer": {}}'),
        *('{"number": 0, "files": [["a"]], "answer": {}}', '{"number": 0, "files": [], "failed": 1}'),
    ],
)
def test_malformed_replies_are_refused(message: str) -> None:
    with pytest.raises(ValueError):
        read_reply(message.encode(errors="surrogateescape"), 0, dict[str, float], set())


OWN_CODE = {
    "points/__init__.py": "",
    "points/scale.py": "FACTOR = 2.0",
    "rules.py": """
import json, os, pathlib, tempfile
import tomli_w
from points.scale import FACTOR
HERE = pathlib.Path(__file__).parent
BASE = json.loads(open("base.json").read())

def score(prompt, response, finish_reason):
    tables = {name: json.loads((HERE / "tables" / f"{name}.json").read_text()) for name in response.split()}
    with tempfile.NamedTemporaryFile("w+") as file:
        file.write("1")
        file.flush()
        assert open(file.name).read() == "1"
    os.path.exists("absent") or os.open(HERE / "seen.log", os.O_WRONLY | os.O_CREAT)
    return BASE + FACTOR * sum(tables.values())
""",
    "base.json": "1",
    "tables/a.json": "3",
    "tables/b.json": "4",
    "tables/c.json": "5",
}


def test_workers_name_the_files_that_their_code_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without compiled modules; neither installed packages nor what the code writes."""
    for name, content in OWN_CODE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    expected = {str(tmp_path / name) for name in OWN_CODE if name != "tables/c.json"}
    for _ in range(2):
        with RewardPool("rules:score", num_workers=2, timeout_s=300.0, memory_mb=0) as pool:
            pool.start()
            loaded = {path for path, _ in pool.files}
            results = pool.score([RewardRequest(PROMPT, response, "stop") for response in ("a", "b", "a b")])
            files = pool.files
        assert [result.value for result in results if isinstance(result, RewardResult)] == [7.0, 9.0, 15.0]
        assert {path for path in loaded if path.startswith(str(tmp_path))} == {
            path for path in expected if "tables" not in path
        }
        assert {path for path, _ in files if path.startswith(str(tmp_path))} == expected
        assert not [path for path, _ in files if "tomli_w" in path or path.startswith(("/proc/", "/dev/"))]
        assert all(digest and digest == digest_of(path) for path, digest in files)
    (tmp_path / "tables/a.json").write_text("4")
    (tmp_path / "points/scale.py").unlink()
    changed = {path for path, digest in files if digest != digest_of(path)}
    assert changed == {str(tmp_path / "tables/a.json"), str(tmp_path / "points/scale.py")}


def test_files_without_number_never_count_as_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(user_code, "_MOST_FILES", 1)
    files = user_code.FilesRead()
    (tmp_path / "table").write_text("1")
    assert (tmp_path / "table").read_text() == "1"
    assert any(digest != digest_of(path) for path, digest in files.take())

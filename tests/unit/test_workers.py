"""A kind of worker of one's own, as the room's README adds it, and the frames on the wire."""

import importlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.errors import DataError
from megatron_dppo.runtime.framing import FrameReader, frame_of, json_frame, read_message
from megatron_dppo.workers.service import WorkerFault, read_answer

README = Path(__file__).parents[2] / "megatron_dppo" / "workers" / "README.md"
MY_FILTERS = """
import time


def is_short(text: str) -> bool:
    if text == "hang":
        time.sleep(60)
    if text == "raise":
        raise KeyError("lost")
    return len(text) < 100
"""


@pytest.fixture
def filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the README's recipe, with the user's code beside them."""
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


def test_a_fault_names_its_request_and_the_options_of_its_service(filters: Any) -> None:
    try:
        short, late, failed, last = filters.pool.ask(["short", "hang", "raise", "short"])
    finally:
        filters.pool.close()
    assert short is last is True
    action = "Correct the filter, or raise data.filter_timeout_s."
    assert late == WorkerFault("timed_out", f"text 'hang': found no reply within 1 s. {action}")
    assert isinstance(failed, WorkerFault) and failed.kind == "failed"
    assert failed.message.startswith("text 'raise': its worker exited with code 1. Correct the filter.")
    assert failed.message.endswith("KeyError: 'lost'")


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
    ["", "[]", "{}", "\udcff", '{"number": 0}', '{"number": 0, "answer": 1}', '{"number": 1, "answer": {}}'],
)
def test_an_answer_to_no_request_is_none(message: str) -> None:
    with pytest.raises(ValueError):
        read_answer(message.encode(errors="surrogateescape"), 0)

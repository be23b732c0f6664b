import importlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.config.sections import PromptFile
from megatron_dppo.data.prompts.prompts import PromptStream, load_prompts, load_training_prompts, read_columns
from megatron_dppo.data.prompts.shares import Shares, parts_of
from megatron_dppo.errors import DataError
from megatron_dppo.runtime.files import write_jsonl
from megatron_dppo.types import DataCursor, Prompt
from tests.support.refusals import refused

ROWS: list[dict[str, object]] = [
    {"id": "first", "prompt": "1 + 1 =", "answer": "2"},
    {"id": "second", "prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"},
]


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    pyarrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return path


def fails_with(path: Path, *parts: str, prompt: str = "prompt", answer: str = "answer") -> None:
    with pytest.raises(DataError) as error:
        load_prompts(path, prompt, answer)
    for part in parts:
        assert part in str(error.value)


def many(n: int) -> list[Prompt]:
    return [Prompt(str(i), "", "test", text=str(i)) for i in range(n)]


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def test_a_prompt_is_a_string_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    write_jsonl(path, ROWS)
    assert read_columns(path) == ["id", "prompt", "answer"]
    first, second = load_prompts(path, "prompt", "answer")
    assert first == Prompt("first", "2", "sums", text="1 + 1 =")
    assert second == Prompt("second", "4", "sums", messages=({"role": "user", "content": "2 + 2?"},))


def test_parquet_with_other_columns_integers_and_a_source(tmp_path: Path) -> None:
    columns = {"question": ["a", "b"], "solution": [7, 8], "source": ["easy", "hard"], "unused": [1.5, None]}
    path = write_parquet(tmp_path / "set.parquet", columns)
    assert read_columns(path) == list(columns)
    assert load_prompts(path, "question", "solution") == [
        Prompt("1", "7", "easy", text="a", label=7),
        Prompt("2", "8", "hard", text="b", label=8),
    ]


def test_parquet_messages(tmp_path: Path) -> None:
    chat = [[{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]]
    path = write_parquet(tmp_path / "chat.parquet", {"prompt": chat, "answer": ["x"]})
    assert load_prompts(path, "prompt", "answer")[0].messages == tuple(chat[0])


def test_a_named_column_is_not_read_as_tools(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    write_jsonl(path, [{"prompt": "Which tool drives nails?", "tools": "hammer"}])
    (prompt,) = load_prompts(path, "prompt", "tools")
    assert (prompt.answer, prompt.tools) == ("hammer", None)


def test_ids_are_line_numbers_and_blank_lines_hold_no_row(tmp_path: Path) -> None:
    row = json.dumps({"prompt": "p", "answer": "a"})
    path = write_lines(tmp_path / "p.jsonl", row, "", row)
    assert ids(load_prompts(path, "prompt", "answer")) == ["1", "3"]


WHOLE = json.dumps({"prompt": "p", "answer": "a"})


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("none.jsonl", None, ("none.jsonl", "found no such file")),
        ("folder/", None, ("found a folder",)),
        ("p.json", "{}", ("found suffix '.json'", "p.jsonl?")),
        ("p.csv", "a", ("found suffix '.csv'", "prepare-data")),
        ("p.jsonl", f"{WHOLE}\n{WHOLE[:12]}\n", ("p.jsonl, line 2", "cut off")),
        ("p.jsonl", "[1]\n", ("p.jsonl, line 1", "found a JSON list")),
        ("p.jsonl", b'{"prompt": "\xff"}\n', ("p.jsonl, line 1", "not UTF-8")),
        ("p.jsonl", f'{WHOLE}\n{{"prompt": "p"}}\n', ("row 2", "columns ['prompt']", "a column 'answer'")),
        ("p.jsonl", "\n", ("found no rows",)),
        ("p.jsonl", f"{json.dumps(ROWS[0])}\n" * 2, ("row 2", "id 'first', which row 1 has too")),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str | bytes | None, parts: tuple[str, ...]
) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path = path.with_suffix(".jsonl")
        path.mkdir()
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    fails_with(path, *parts)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_missing_column_lists_those_there_are(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"p.{suffix}"
    if suffix == "jsonl":
        write_jsonl(path, [{"prompts": "p", "answer": "a"}])
    else:
        write_parquet(path, {"prompts": ["p"], "answer": ["a"]})
    fails_with(path, "['prompts', 'answer']", "a column 'prompt'", "Did you mean 'prompts'?")
    fails_with(path, "data.answer_column", prompt="prompts", answer="zzz")


def test_a_torn_or_empty_parquet_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", {"prompt": ["p"], "answer": ["a"]})
    path.write_bytes(path.read_bytes()[:-20])
    fails_with(path, "p.parquet", "expected a Parquet file", "cut off")
    fails_with(write_parquet(tmp_path / "q.parquet", {"prompt": [], "answer": []}), "found no rows")


def test_a_parquet_column_of_a_pickled_type_is_read_as_what_it_stores(tmp_path: Path) -> None:
    pyarrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    touch = b"cposix\nsystem\n(S'touch " + str(tmp_path / "it_ran").encode() + b"'\ntR."
    pickled = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": touch}
    fields = [pyarrow.field("prompt", pyarrow.string(), metadata=pickled), ("answer", pyarrow.string())]
    parquet.write_table(
        pyarrow.table({"prompt": ["p"], "answer": ["a"]}, pyarrow.schema(fields)), tmp_path / "p.parquet"
    )
    assert read_columns(tmp_path / "p.parquet") == ["prompt", "answer"]
    assert [prompt.text for prompt in load_prompts(tmp_path / "p.parquet", "prompt", "answer")] == ["p"]
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "p", "answer": None}, "NoneType None as the answer"),
        ({"prompt": "p", "answer": "a", "id": [1]}, "list [1] as id"),
        ({"prompt": 3, "answer": "a"}, "int 3 as the prompt"),
        ({"prompt": "", "answer": "a"}, "str '' as the prompt"),
        ({"prompt": [], "answer": "a"}, "list [] as the prompt"),
        ({"prompt": ["hello"], "answer": "a"}, "message str 'hello' as the prompt"),
        ({"prompt": [{"role": "user"}], "answer": "a"}, "message dict {'role': 'user'} as the prompt"),
    ],
)
def test_a_cell_of_another_type(tmp_path: Path, row: dict[str, object], found: str) -> None:
    path = tmp_path / "p.jsonl"
    write_jsonl(path, [ROWS[0], row])
    fails_with(path, "row 2: found " + found)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    write_jsonl(path, ROWS)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_jsonl(path, [{"fine": 1}, {"not json": object()}])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def first(stream: PromptStream, count: int) -> list[str]:
    """Ids of the first prompts of a stream."""
    return ids([stream.at(place).prompt for place in range(count)])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(0, 30), st.sets(st.integers(0, 29), max_size=4))
def test_a_cursor_is_read_as_it_was_written(size: int, next_place: int, again: set[int]) -> None:
    upcoming = next_place, sorted(place for place in again if place < next_place)
    written: DataCursor = json.loads(json.dumps(PromptStream(many(size), 0, True).cursor_at(*upcoming)))
    found, repeated = PromptStream(many(size), 0, True, written).upcoming
    assert (found, list(repeated)) == upcoming
    assert PromptStream(many(size), 0, True).upcoming == (0, ())


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(0, 3), st.booleans(), st.integers(1, 4))
def test_each_epoch_holds_each_prompt_once(size: int, seed: int, shuffle: bool, epochs: int) -> None:
    found = first(PromptStream(many(size), seed, shuffle), size * epochs)
    for epoch in range(epochs):
        assert sorted(found[epoch * size : (epoch + 1) * size]) == sorted(map(str, range(size)))
        if not shuffle:
            assert found[epoch * size : (epoch + 1) * size] == list(map(str, range(size)))


def test_an_epochs_order_depends_on_seed_and_epoch_only() -> None:
    stream = PromptStream(many(50), 0, True)
    third = [stream.at(place) for place in range(100, 150)]
    assert [PromptStream(many(50), 0, True).at(place) for place in range(149, 99, -1)] == third[::-1]
    found = ids([each.prompt for each in third])
    assert found != first(stream, 50)
    assert found != ids([PromptStream(many(50), 1, True).at(place).prompt for place in range(100, 150)])


WEIGHTS = st.lists(st.sampled_from([1, 2, 3, 7, 0.1, 0.25, 1.5, 7473.0]), min_size=1, max_size=4)


@settings(deadline=None, max_examples=80)
@given(WEIGHTS, st.integers(0, 400), st.integers(0, 10**7))
def test_parts_keep_their_shares_from_any_place(weights: list[float], length: int, start: int) -> None:
    shares, total = Shares(weights), sum(map(Fraction, weights))
    counts, after = shares.counts(start), shares.counts(start + length)
    assert sum(counts) == start and sum(after) == start + length
    for weight, before, then in zip(weights, counts, after, strict=True):
        assert abs(before - start * Fraction(weight) / total) < 256
        assert then >= before
    for place in range(start, start + min(length, 20)):  # one after the other is the same as at once
        part, item = shares.at(place)
        assert item == counts[part]
        counts[part] += 1
        assert counts == shares.counts(place + 1)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 3.0, 2.0), (7473.0, 12000.0)])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
def test_each_rank_draws_each_part_in_its_share(weights: tuple[float, ...], num_ranks: int) -> None:
    drawn = [part for part, _ in map(Shares(weights, seed=1).at, range(200 * num_ranks))]
    for rank in range(num_ranks):
        of_rank = drawn[rank::num_ranks]
        for part, weight in enumerate(weights):  # within 4 standard deviations of independent draws
            share = weight / sum(weights)
            assert abs(of_rank.count(part) / 200 - share) < 4 * (share * (1 - share) / 200) ** 0.5


@pytest.mark.parametrize(
    ("weights", "period"), [((1, 4, 2), 7), ((0.5, 0.5), 2), ((30, 20), 5), ((173, 450), 623)]
)
def test_every_period_has_exact_shares(weights: tuple[float, ...], period: int) -> None:
    drawn = [Shares(weights).at(place)[0] for place in range(4 * period)]
    expected = [period * weight / sum(weights) for weight in weights]
    for start in range(0, 4 * period, period):
        assert [drawn[start : start + period].count(part) for part in range(len(weights))] == expected


def test_the_order_of_parts_depends_on_the_seed() -> None:
    first, again, other = ([Shares([1, 1], seed).at(place) for place in range(64)] for seed in (5, 5, 6))
    assert first == again != other


def of_files(*sizes: int, weights: tuple[float | None, ...], shuffle: bool = True) -> PromptStream:
    """A stream of files a, b, ... with prompts a0, a1, ..., b0, ..."""
    names = "abc"[: len(sizes)]
    files = [PromptFile(path=Path(f"{n}.jsonl"), weight=w) for n, w in zip(names, weights, strict=True)]
    prompts = [
        Prompt(f"{n}{i}", "", n, text="x") for n, size in zip(names, sizes, strict=True) for i in range(size)
    ]
    return PromptStream(prompts, 3, shuffle, None, parts_of(files, sizes))


def test_a_file_that_is_exhausted_starts_again_in_another_order() -> None:
    stream = of_files(3, 50, weights=(5, 1))
    drawn = first(stream, 54)
    short, long = ([name for name in drawn if name[0] == file] for file in "ab")
    assert len(short) == 45 and len(long) == 9 == len(set(long))
    epochs = [short[start : start + 3] for start in range(0, 45, 3)]
    assert all(sorted(epoch) == ["a0", "a1", "a2"] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 3
    assert stream.epochs(54) == {"a": 15.0, "b": 9 / 50}
    assert [stream.at(place) for place in range(60, 30, -1)] == [
        of_files(3, 50, weights=(5, 1)).at(place) for place in range(60, 30, -1)
    ]
    plain = first(of_files(2, 4, weights=(1, 2), shuffle=False), 9)
    assert [name for name in plain if name[0] == "a"] == ["a0", "a1", "a0"]
    assert [name for name in plain if name[0] == "b"] == ["b0", "b1", "b2", "b3", "b0", "b1"]


def test_seed_changes_the_mixture_of_prompt_files() -> None:
    parts = parts_of([PromptFile(path=Path("a.jsonl")), PromptFile(path=Path("b.jsonl"))], [30, 30])
    orders = [first(PromptStream(many(60), seed, False, None, parts), 60) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:  # without data.shuffle each file keeps its order
        assert [int(name) for name in order if int(name) < 30] == list(range(30))


def test_files_without_weights_end_their_epochs_together() -> None:
    stream = of_files(2, 9, 4, weights=(None, None, None))
    for start in (0, 15, 30):
        assert len({stream.at(place).prompt.id for place in range(start, start + 15)}) == 15
    assert stream.epochs(45) == {"a": 3.0, "b": 3.0, "c": 3.0}


def test_prompts_of_several_files(tmp_path: Path) -> None:
    paths = [write_parquet(tmp_path / "x.parquet", {"prompt": ["1"], "answer": ["1"], "source": ["own"]})]
    paths.append(
        write_lines(tmp_path / "y z.jsonl", *[json.dumps({"prompt": "2", "label": str(n)}) for n in (4, 5)])
    )
    files = [PromptFile(path=path) for path in paths]
    both = load_training_prompts(files, "prompt", None)
    assert [(each.file, each.source, each.answer) for each in both.prompts] == [
        ("x", "own", "1"),
        ("y_z", "y z", "4"),
        ("y_z", "y z", "5"),
    ]
    one = load_training_prompts(files[1:], "prompt", None)
    assert [each.file for each in one.prompts] == [None, None]
    changed = [
        load_training_prompts(files[::-1], "prompt", None),
        load_training_prompts([files[0], files[1].model_copy(update={"weight": 2.0})], "prompt", None),
        load_training_prompts([files[0], files[1].model_copy(update={"name": "n"})], "prompt", None),
        one,
    ]
    digests = [each.digest for each in (both, *changed)]
    assert len(set(digests)) >= 4 and digests[0] not in digests[3:]


@pytest.mark.parametrize(
    "cursor",
    [
        {"epoch": 0, "index": 3},
        {"epoch": 0, "index": -1},
        {"epoch": -1, "index": 0},
        {"epoch": 0},
        {"epoch": 0, "index": 0, "x": 0},
        {"epoch": 0, "index": True},
        {"epoch": 0, "index": 2, "again": [2]},
        {"epoch": 0, "index": 2, "again": [-1]},
        {"epoch": 0, "index": 2, "again": 1},
    ],
)
def test_a_cursor_that_does_not_fit(cursor: DataCursor) -> None:
    with refused("data cursor", "'index': 0 to 2", "3 prompts", error=DataError):
        PromptStream(many(3), 0, True, cursor)


def test_no_prompts() -> None:
    with pytest.raises(DataError, match="found none"):
        PromptStream([], 0, True)

"""`megatron-dppo check` on files of prompts and tokenizers of several behaviours: refusals and notes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from megatron_dppo.checks import BEFORE_LOADING, megatron_rules, require_valid
from megatron_dppo.cli import app
from megatron_dppo.config import load_config
from megatron_dppo.data.prompts.prompts import Drawn, load_prompts
from megatron_dppo.rollout.groups import GroupMaker
from tests.support.byte_tokenizers import llama_tokenizer, save, tools_tokenizer
from tests.support.refused_configs import MODEL
from tests.support.tiny_families import write_family
from tests.unit.test_agent_renderers import BY_NAME, tokenizer_of
from tests.unit.test_episodes import LATEST_TEMPLATE

CHAT = [{"role": "user", "content": "1 + 1?"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
ENDLESS = "{% for m in messages %}{{ m.content }}</s>\n{% endfor %}"


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory with a config and a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(megatron_rules, "_read_fields", lambda: None)
    config = {**MODEL, "vocab_size": 320, "max_position_embeddings": 1024, "eos_token_id": 258}
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    Path("model/model.safetensors").touch()
    Path("base.toml").write_text(
        'data = { prompts = "p.jsonl", reward = "arithmetic", max_prompt_tokens = 512 }\n'
        'rollout.max_response_tokens = 32\nevaluation.every = 0\nmodel.dtype = "float32"\n'
    )


def checked(tokenizer: PreTrainedTokenizerFast, rows: list[Any], *settings: str) -> tuple[int, str]:
    """Return the exit status of `check`, and its output without the summary."""
    save(tokenizer, Path("model"))
    texts = (row if isinstance(row, str) else json.dumps({"prompt": CHAT, "answer": "2"} | row) for row in rows)
    Path("p.jsonl").write_text("\n".join(texts) + "\n")
    sets = [part for setting in settings for part in ("--set", setting)]
    result = CliRunner().invoke(app, ["check", "base.toml", *sets])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stderr


def noted(tokenizer: PreTrainedTokenizerFast, rows: list[Any], *settings: str) -> list[str]:
    """The notes of a `check` that refuses nothing."""
    status, text = checked(tokenizer, rows, *settings)
    assert status == 0, text
    return [line.removeprefix("note: ") for line in text.splitlines() if line.startswith("note: ")]


@pytest.mark.parametrize(
    ("tokenizer", "prompts", "note"),
    [
        (llama_tokenizer(), ["<s>1 + 1?", "1 + 1?"], "1 of 2 prompts of p.jsonl begin with <s><s>"),
        (llama_tokenizer("<s> $A </s>"), ["1?", "2?"], "2 of 2 prompts of p.jsonl end with </s>: the tok"),
        (llama_tokenizer("$A"), ["1?</s>"], "end with </s>: the response follows an end"),
        (llama_tokenizer("$A"), ["1?</s></s>2"], "have </s></s>, a special token twice in a row"),
        (llama_tokenizer("$A"), ["<s><s>1?"], "have <s><s>, a special token twice in a row"),
        (llama_tokenizer("$A", ENDLESS), [CHAT], "end with </s>: the response follows an end"),
        (tools_tokenizer(), ["1 + 1?", "2"], "2 of 2 prompts of p.jsonl are text"),
        (llama_tokenizer("<s> $A", ENDLESS), ["1?"], "are text, which the tokenizer's chat"),
    ],
)  # fmt: skip
def test_special_tokens_and_text_are_noted_with_their_share(
    tokenizer: Any, prompts: list[Any], note: str
) -> None:
    (found,) = noted(tokenizer, [{"prompt": prompt} for prompt in prompts])
    assert note in found


@pytest.mark.parametrize(
    ("tokenizer", "prompt"),
    [
        (llama_tokenizer(), "1 + 1?"),
        (llama_tokenizer("$A"), "<s>1 + 1?"),
        (tools_tokenizer(), "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"),
        (tools_tokenizer(), CHAT),
        (tools_tokenizer(), json.dumps(CHAT)),
        (tools_tokenizer(), [{"role": "user", "content": [{"type": "text", "text": "1?"}]}]),
        (tools_tokenizer(), CALLED),
        (tools_tokenizer(), "[1, 2] is a list; [{'a': 1}] is another"),
    ],
)
def test_sound_prompts_are_not_noted(tokenizer: Any, prompt: Any) -> None:
    is_text = isinstance(prompt, str) and prompt.startswith("[1")
    assert len(noted(tokenizer, [{"prompt": prompt}])) == is_text


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": str(CHAT)}, "expected JSON of a list of messages, or text"),
    ({"images": ["a.png"]}, "a column images; expected only text"),
    ({"video": "a.mp4"}, "a column video"),
    ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type image_url"),
    ({"prompt": [{"role": "user", "content": "1", "images": ["a"]}]}, "a message with images"),
    ({"prompt": "1?", "tools": [ADD]}, "tools with a text prompt"),
    ({"prompt": "1?", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs with a text prompt"),
    ({"chat_template_kwargs": {"enable_thinkin": False}}, "nothing that reads 'enable_thinkin'"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "the run sets this one"),
    ({"chat_template_kwargs": "none"}, "str 'none' as chat_template_kwargs"),
    ({"tools": "add"}, "str 'add' as tools"),
    ({"system": "Be brief."}, "a column 'system', which is not read"),
    ({"prompt": [*CHAT, {"role": "assistant", "content": "2"}]}, "a last message of the assistant"),
    ({"prompt": json.dumps({"messages": CHAT})}, "expected JSON of a list of messages, or text"),
    ({"prompt": [{"from": "human", "value": "1?"}]}, "messages with text 'role' and 'content'"),
    ({"prompt": [{"role": "human", "content": "1?"}]}, "no message of 'human'"),
    ({"prompt": [*CALLED[:1], {**CALLED[1], "tool_calls": [{"name": "add", "arguments": "a"}]}, CALLED[2]]},
     "str 'a' as arguments of a tool call"),
]  # fmt: skip


@pytest.mark.parametrize("faults", [FAULTS[:9], FAULTS[9:]])
def test_rows_that_would_render_as_another_prompt_are_all_listed(
    faults: list[tuple[dict[str, Any], str]],
) -> None:
    status, text = checked(tools_tokenizer(), [*(row for row, _ in faults), {}])
    assert status == 1
    assert f"{len(faults)} of {len(faults) + 1} rows of p.jsonl that cannot be used" in text
    lines = [line for line in text.splitlines() if line.startswith("  p.jsonl")]
    for number, (line, (_, fault)) in enumerate(zip(lines, faults, strict=True), start=1):
        assert line.startswith(f"  p.jsonl, row {number}: ") and fault in line


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"tools": [ADD]}, "found no tools"),
        ({"prompt": CALLED}, "found no call of 'add'"),
        ({"prompt": [{"role": "user", "content": "Please add."}, *CALLED[1:]]}, "found no call of 'add'"),
    ],
)
def test_a_chat_template_without_tools_is_named(row: dict[str, Any], fault: str) -> None:
    status, text = checked(
        llama_tokenizer("<s> $A", "{% for m in messages %}{{ m.content }}{% endfor %}"), [row]
    )
    assert status == 1 and fault in text


def test_training_logs_the_doubts(caplog: pytest.LogCaptureFixture) -> None:
    (note,) = noted(tools_tokenizer(), [{"prompt": "1?"}])
    require_valid(load_config([Path("base.toml")]), 1, needs=BEFORE_LOADING)
    assert note in caplog.messages


@pytest.mark.parametrize("is_reference", [False, True])
def test_float32_parts_that_a_bfloat16_run_rounds_are_named(is_reference: bool) -> None:
    """Not the parts of a folder that is float32 as a whole."""
    source = write_family(Path("hybrid"), "Qwen3_5MoeForCausalLM", vocab_size=320, max_position_embeddings=1024)
    tensors = load_file(source / "model.safetensors")
    options = ["algorithm.ref_kl_coef=0.1", "model.reference=hybrid"] if is_reference else []
    shutil.copy(source / "config.json", "model/config.json")

    def about_rounding(exact: tuple[str, ...], dtype: str = "bfloat16") -> list[str]:
        narrow = {name: x.bfloat16() for name, x in tensors.items()}
        mixed = {name: x if name.endswith(exact) else narrow[name] for name, x in tensors.items()}
        save_file(mixed, source / "model.safetensors")
        save_file(narrow if is_reference else mixed, "model/model.safetensors")
        notes = noted(tools_tokenizer(), [{}], *options, f"model.dtype={dtype}")
        return [note for note in notes if "in float32 among other weights" in note]

    (note,) = about_rounding(("linear_attn.A_log", "linear_attn.norm.weight"))
    assert note.startswith(f"{'hybrid' if is_reference else 'model'} has 2 x linear_attn.")
    assert {"2 x linear_attn.A_log", "2 x linear_attn.norm.weight"} <= set(re.findall(r"\d x [\w.]*\w", note))
    (note,) = about_rounding(("mlp.gate.weight", "experts.2.down_proj.weight"))
    assert {"3 x mlp.gate.weight", "3 x mlp.experts.down_proj.weight"} <= set(
        re.findall(r"\d x [\w.]*\w", note)
    )
    assert (
        about_rounding(("linear_attn.A_log",), "float32")
        == about_rounding(("",))
        == about_rounding(("?",))
        == []
    )


def test_columns_that_nothing_reads_are_noted() -> None:
    (note,) = noted(tools_tokenizer(), [{}, {"empty": None, "remarks": {"level": 1}, "id": 7, "tools": []}])
    assert note.startswith("columns of p.jsonl that are not read: remarks.")


def test_tools_calls_and_arguments_reach_the_requests() -> None:
    tokenizer = tools_tokenizer()
    rows = [
        {"tools": json.dumps([ADD]), "chat_template_kwargs": {"enable_thinking": False}},
        {"prompt": CALLED, "tools": [ADD]},
        {"prompt": json.dumps(CHAT)},
    ]
    assert noted(tokenizer, rows) == []
    maker = GroupMaker(tokenizer, samples_per_prompt=1, max_prompt_tokens=512, seed=0)
    prompts = load_prompts(Path("p.jsonl"), "prompt", "answer")
    groups = maker.begin(0, [(place, Drawn(place, prompt)) for place, prompt in enumerate(prompts)])
    first, second, third = (tokenizer.decode(list(group.requests[0].prompt_tokens)) for group in groups)
    user, begin = "<|im_start|>user\n1 + 1?<|im_end|>\n", "<|im_start|>assistant\n"
    tools = f"<|im_start|>tool\n{json.dumps(ADD)}<|im_end|>\n"
    assert first == f"{tools}{user}{begin}<think>\n\n</think>\n\n"
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}<|im_end|>\n'
    assert second == f"{tools}{user}{begin}{call}<|im_start|>tool\n2<|im_end|>\n{begin}"
    assert third == user + begin


def test_the_token_that_ends_a_turn_is_named_if_it_ends_no_response() -> None:
    tokenizer = tools_tokenizer()
    assert noted(tokenizer, [{}]) == []
    Path("model/generation_config.json").write_text(json.dumps({"eos_token_id": [259]}))
    (note,) = noted(tokenizer, [{}])
    assert "ends a turn with '<|im_end|>' (258), which ends no response" in note
    assert "responses end with '<|endoftext|>' (259) (eos_token_id of model/generation_config.json)" in note
    assert "add 258 to eos_token_id of model/generation_config.json" in note
    (note,) = noted(tokenizer, [{"prompt": "1?"}])
    assert "ends a turn" not in note, "text has no turns"
    Path("model/generation_config.json").write_text(json.dumps({"eos_token_id": [259, 258]}))
    assert noted(tokenizer, [{}]) == []


def test_thinking_that_no_response_can_end() -> None:
    require, off = "data.thinking=require", {"chat_template_kwargs": {"enable_thinking": False}}
    assert noted(tools_tokenizer(), [{}], require) == []
    special = tools_tokenizer(thinks_in_special_tokens=True)
    status, text = checked(special, [{}], require)
    assert status == 1 and "</think> is a special token, which responses omit" in text
    assert noted(special, [{}]) == []
    status, text = checked(tools_tokenizer(), [off, off, {}], require)
    assert status == 1 and "with 2 of 3 prompts of p.jsonl that end with </think>" in text
    (note,) = noted(tools_tokenizer(), [off, {}, {}], require)
    assert "1 of 3 prompts of p.jsonl end with </think>" in note


def test_few_answers_that_are_texts_are_noted() -> None:
    cells = [
        "2",
        "3",
        r"\frac{1}{2}",
        "x = 5",
        "She has 4 cups.",
        "9 + 9\n#### 18",
        "It holds\nby induction",
        r"So it is $\boxed{7}$.",
    ]
    notes = noted(tools_tokenizer(), [{"answer": cell} for cell in cells], "data.reward=math")
    assert [note.partition(":")[0] for note in notes] == [
        "1 of 8 answers of p.jsonl are a number with words",
        "2 of 8 answers of p.jsonl are texts around a final answer",
        "1 of 8 answers of p.jsonl are texts without a marked final answer, such as "
        "'It holds\\nby induction' in row 7",
    ]
    assert r"'math' scores '\\boxed{4}' as wrong for 'She has 4 cups.' in row 5" in notes[0]
    assert r"'math' scores '\\boxed{18}' as wrong for '9 + 9\n#### 18' in row 6" in notes[1]
    (note,) = noted(tools_tokenizer(), [{"answer": "3 + 4 = 7, so she has 7"}], "data.reward=math")
    assert (
        "such as '3 + 4 = 7, so she has 7' in row 1: a response with only the right answer may be scored"
        in note
    )
    assert noted(tools_tokenizer(), [{"answer": cells[-1]}], "data.reward=math") == [], (
        "the reward reads a box in the reference"
    )


@pytest.mark.parametrize("reward", ["math", "dapo", "{math = 0.5, dapo = 0.5}"])
def test_answers_that_math_can_match_as_text_only_are_noted(
    reward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = ["5", r"\frac{1}{2}", "Monday", "B", "7:30", "1:2:3", r"3\text{ ft }2\text{ in}", r"\sqrt[2", "6–9"]
    notes = noted(tools_tokenizer(), [{"answer": cell} for cell in cells], f"data.reward={reward}")
    unread = [note for note in notes if "Only the same text counts as right" in note]
    assert len(unread) == ("math" in reward)
    for note in unread:
        assert note.startswith(
            "3 of 9 bare answers of p.jsonl have no value that reward 'math' can parse, such as"
        )
        assert repr(cells[6]) + " in row 7" in note
    monkeypatch.setattr("megatron_dppo.data.prompts.survey.NUM_BARE", 5)
    for note in noted(tools_tokenizer(), [{"answer": cell} for cell in cells], f"data.reward={reward}")[-1:]:
        assert note.startswith("2 of 5 bare answers of p.jsonl that were sampled from 9 have no value")


def test_three_different_answers_that_math_can_match_as_text_only_are_shown() -> None:
    feet, root, miles, pounds = r"3\text{ ft }2\text{ in}", r"\sqrt[2", r"4\text{ to }9", r"1\text{ lb }2"
    cells = ["5", feet, feet, root, "7", feet, miles, root, pounds]
    (note,) = noted(tools_tokenizer(), [{"answer": cell} for cell in cells], "data.reward=math")
    assert note.startswith("7 of 9 bare answers")
    assert f"such as {feet!r} in row 2, {root!r} in row 4, {miles!r} in row 7. Only" in note


AGENT = ('rollout.agent.command=["python"]', "rollout.engine=sglang")


@pytest.mark.usefixtures("importable")
def test_template_that_drops_thinking_between_turns_is_noted() -> None:
    """Not if the choice is set, without further turns, or with a template that keeps it."""
    turns = ("rollout.environment=tests.unit.own_environment:Teller", "rollout.max_turns=3")
    chat = [{"prompt": [{"role": "user", "content": "1?"}]}]
    tokenizer = tools_tokenizer()
    assert noted(tokenizer, chat, *turns) == []
    written = "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
    tokenizer.chat_template = f"{{% for m in messages %}}{written}<|im_end|>{{% endfor %}}"
    (note,) = noted(tokenizer, chat, *turns)
    assert note.startswith("the chat template leaves out the thinking of earlier responses")
    for choice in ("keep", "template"):
        assert noted(tokenizer, chat, *turns, f"rollout.thinking={choice}") == []
    assert noted(tokenizer, chat, turns[0]) == []


def test_a_template_that_does_not_append_is_noted_for_agents() -> None:
    tokenizer = tools_tokenizer()
    assert noted(tokenizer, [{}], *AGENT) == []
    tokenizer.chat_template = LATEST_TEMPLATE
    tools, appends = noted(tokenizer, [{}], *AGENT)
    assert tools.startswith("the chat template does not write tools")
    assert appends.startswith("the chat template does not append messages")
    assert "rollout.agent.renderer" in appends
    assert noted(tokenizer, [{}]) == [], "only agents continue a conversation"


def test_a_renderer_is_compared_with_the_tokenizer_and_its_template() -> None:
    family = BY_NAME["minimax-m2"]
    tokenizer = tokenizer_of(family)
    assert checked(tokenizer, [{}], *AGENT, "rollout.agent.renderer=minimax-m2")[0] == 0
    for name in ("kimi-k2", "minimax"):
        status, text = checked(tokenizer, [{}], *AGENT, f"rollout.agent.renderer={name}")
        assert status == 1 and "rollout.agent.renderer" in text and name in text
    tokenizer.chat_template = tokenizer.chat_template.replace("<think>", "")
    status, text = checked(tokenizer, [{}], *AGENT, "rollout.agent.renderer=minimax-m2")
    assert status == 1 and "another way than the tokenizer's chat template" in text

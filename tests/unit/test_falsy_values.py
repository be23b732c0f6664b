"""Valid values that are 0, False or empty: none of them is replaced by a default."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import BaseModel, ValidationError

from megatron_dppo.algorithms import PRESETS, preset
from megatron_dppo.algorithms.presets import OVERRIDABLE, overrides_in
from megatron_dppo.architectures.megatron_options import shares_prefixes
from megatron_dppo.config import dump_config, load_config
from megatron_dppo.config.markers import sections_in
from megatron_dppo.config.schema import Config
from megatron_dppo.config.sections import EvaluationSetConfig
from megatron_dppo.environments import Episode, InProcess, Observation, Response, Trajectory, Turn
from megatron_dppo.errors import ConfigError
from megatron_dppo.rewards import RewardResult
from megatron_dppo.rollout.evaluation import evaluation_sets
from megatron_dppo.rollout.scoring import Scorer
from megatron_dppo.types import FinishReason, Prompt
from tests.support.samples import InProcessScorer, make_sample
from tests.support.word_tokenizers import TOKENIZER

FALSY: tuple[Any, ...] = (0, 0.0, False, (), {}, "")
PROMPT = Prompt("p", "408", "test", text="<bos> 2 1 * 4 3 =")


def fields_of(section: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every field below a section, with its default."""
    for name, field in section.model_fields.items():
        inner = sections_in(field.annotation)
        for each in inner:
            yield from fields_of(each, (*path, name))
        if not inner:
            yield (*path, name), field.get_default(call_default_factory=True)


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


def at(config: Config, path: tuple[str, ...]) -> Any:
    found: Any = config
    for key in path:
        found = getattr(found, key)
    return found


def falsy_settings() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each setting that may be falsy, with such a value."""
    for path, _ in fields_of(Config):
        for value in FALSY:
            try:
                found = at(Config.model_validate(nested(path, value), strict=True), path)
            except ValidationError:
                continue
            if found == value and type(found) is type(value):
                yield path, value


SETTINGS = list(falsy_settings())


def test_a_falsy_setting_of_a_later_layer_wins_over_an_earlier_one(tmp_path: Path) -> None:
    """As a file and as an override. It is also in the resolved config that a run writes."""
    defaults = dict(fields_of(Config))
    names = {".".join(path) for path, _ in SETTINGS}
    assert {"evaluation.temperature", "optimizer.clip_grad", "parallel.share_prefixes", "run.seed"} <= names
    num_compared = 0
    for path, value in SETTINGS:
        others = [defaults[path], True, 1, 1.0, 0.5]
        truthy = next((other for other in others if other and _is_valid(path, other)), None)
        if truthy is None or value == "" or isinstance(value, dict):
            continue
        earlier, later = tmp_path / "earlier.toml", tmp_path / "later.toml"
        earlier.write_text(tomli_w.dumps(nested(path, list(truthy) if isinstance(truthy, tuple) else truthy)))
        assert at(load_config([earlier]), path) == truthy, path
        written = [] if value == () else value
        later.write_text(tomli_w.dumps(nested(path, written)))
        override = f"{'.'.join(path)}={str(written).lower()}"
        for found in (load_config([earlier, later]), load_config([earlier], [override])):
            assert at(found, path) == value and type(at(found, path)) is type(value), path
            resolved = tmp_path / "resolved.toml"
            resolved.write_text(dump_config(found))
            assert at(load_config([resolved]), path) == value, path
        num_compared += 1
    assert num_compared > 40


def _is_valid(path: tuple[str, ...], value: Any) -> bool:
    try:
        return at(Config.model_validate(nested(path, value), strict=True), path) == value
    except ValidationError:
        return False


def falsy_overrides() -> list[tuple[str, str, Any]]:
    """Return (preset, field, value) for each field in use that may be falsy and is not."""
    found = list[tuple[str, str, Any]]()
    for name, objective in PRESETS.items():
        for field in OVERRIDABLE:
            before = getattr(objective, field, None)
            if not before or field not in objective.fields_in_use or isinstance(before, str | tuple):
                continue
            value = False if isinstance(before, bool) else 0 if isinstance(before, int) else 0.0
            try:
                preset(name, **{field: value})
            except ConfigError:
                continue
            found.append((name, field, value))
    return found


@pytest.mark.parametrize(("name", "field", "value"), falsy_overrides())
def test_a_falsy_field_wins_over_that_of_the_preset(name: str, field: str, value: Any) -> None:
    config = Config.model_validate({"algorithm": {"preset": name, field: value}})
    overrides = overrides_in(config.algorithm.model_dump())
    found = getattr(preset(name, **overrides), field)
    assert found == value != getattr(PRESETS[name], field)


OUTER = {"samples_per_prompt": 5, "temperature": 0.9, "top_p": 0.8, "max_response_tokens": 7}
INNER: dict[str, tuple[Any, Any]] = {  # the smallest value, and what there is without one
    "samples_per_prompt": (1, 5),
    "temperature": (0.0, 0.9),
    "top_p": (0.25, 0.8),
    "max_response_tokens": (1, 7),
    "reward": ("dapo", "math"),
}


def test_each_field_of_an_evaluation_set_wins_over_its_outer_table() -> None:
    optional = {name for name, field in EvaluationSetConfig.model_fields.items() if field.default is None}
    assert optional == INNER.keys()
    for name, (value, outer) in INNER.items():
        sets = {"own": {"prompts": "a.jsonl", name: value}, "other": {"prompts": "b.jsonl"}}
        tables = {"evaluation": OUTER | {"sets": sets}, "data": {"reward": "math"}}
        own, other = evaluation_sets(Config.model_validate(tables))
        assert (getattr(own, name), getattr(other, name)) == (value, outer)
        rest = INNER.keys() - {name}
        assert all(getattr(own, each) == INNER[each][1] for each in rest)


def test_no_pass_at_k_is_no_default() -> None:
    """An empty list of k replaces the default, the powers of two."""
    for given, expected in ((None, (1, 2, 4)), ((), ()), ((3,), (3,))):
        options: dict[str, Any] = OUTER | {"sets": {"own": {"prompts": "a.jsonl"}}}
        options |= {} if given is None else {"pass_at": given}
        (found,) = evaluation_sets(Config.model_validate({"evaluation": options}))
        assert found.pass_at == expected


def test_prefixes_are_not_shared_if_the_setting_says_so() -> None:
    found = [
        shares_prefixes(Config.model_validate({"parallel": parallel}), None)
        for parallel in ({}, {"share_prefixes": True}, {"share_prefixes": False})
    ]
    assert found == [True, True, False]


class Zero:
    """Ends with a reward of 0."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        return Observation(prompt.text, prompt.messages)

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        return Turn(None, 0.0, True)


def test_an_environment_s_reward_of_0_is_one() -> None:
    """No worker scores the response again: alone, and in a group of which others need a score."""

    def reward(prompt: Prompt, response: str, finish_reason: FinishReason) -> RewardResult:
        assert response == "to score"
        return RewardResult(1.0)

    scorer = Scorer(TOKENIZER, InProcessScorer(reward), False, None, scores_groups=True)
    samples = [make_sample(list(range(9)), 7) for _ in range(3)]
    samples = [
        replace(sample, reward=None, finish_reason="stop", rollout_log_probs=-sample.rollout_log_probs.abs())
        for sample in samples
    ]
    zero, scored = Episode("scored", 2, 0.0, {}, None), Episode("to score", 2, None, {}, None)
    alone = asyncio.run(scorer.score(PROMPT, samples[0], zero))
    group = asyncio.run(scorer.score_group(PROMPT, list(zip(samples, (zero, scored, zero), strict=True))))
    assert [getattr(each, "reward", each) for each in (alone, *group)] == [0.0, 0.0, 1.0, 0.0]
    environments = InProcess(Zero)
    environments.reset([Trajectory("a", PROMPT)])
    (turn,) = environments.step([Trajectory("a", PROMPT, (Response("x", "stop"),))])
    assert isinstance(turn, Turn) and turn.reward == 0.0

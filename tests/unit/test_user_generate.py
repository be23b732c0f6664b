"""A user's sampling function, from a module in a separate folder, on the real embedded engine."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.engines.base import SamplingParams, mask_of, response_alone
from megatron_dppo.errors import RolloutError
from megatron_dppo.rewards import RewardResult
from megatron_dppo.rollout.trajectories import Generate, UserGenerate
from megatron_dppo.runtime.user_code import import_named
from megatron_dppo.types import Prompt, Sample, WeightVersionSpan
from tests.support.collecting import Collected, collect
from tests.support.refusals import refused
from tests.support.samples import InProcessScorer, assert_same
from tests.unit.test_multi_turn import TOKENIZER, WORDS, words_of
from tests.unit.test_transformers_engine import VOCAB, engine_of, moe_config, reference_model

MODULE = '''
from dataclasses import replace

import torch

from megatron_dppo.environments import Episode
from megatron_dppo.engines.base import with_observation


def twice(engine, requests, params):
    """Three tokens, the word t9, and three more; each t1 of the second try earns a point."""
    params = replace(params, max_turn_tokens=3)
    first = engine.generate(requests, params)
    said = [with_observation(completion, torch.tensor([9])) for completion in first]
    asked = [replace(request, partial=partial) for request, partial in zip(requests, said)]
    points = lambda completion: float((completion.tokens[4:] == 1).sum())
    both = engine.generate(asked, params)
    return [replace(c, episode=Episode("", 2, points(c), {"tries": 2.0})) for c in both]
'''
PARAMS = SamplingParams(8, num_topk_log_probs=2, capture_routes=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return reference_model(moe_config())


def collected(model: Any, function: Generate) -> Collected:
    engine: Any = engine_of(model)
    engine.session = UserGenerate("own:function", function, engine_of(model), VOCAB).session
    scorer = InProcessScorer(lambda prompt, response, finish_reason: RewardResult(float(len(response.split()))))
    prompts = [Prompt(str(i), "", "test", text="<bos> t5") for i in range(2)]
    return collect(
        engine, prompts, TOKENIZER, scorer, PARAMS, samples_per_prompt=2, max_prompt_tokens=9, seed=1, rollout=2
    )


def test_function_from_the_import_path(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_generate.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    batch = collected(model, import_named("rollout.generate", "own_generate:twice"))
    monkeypatch.delitem(sys.modules, "own_generate")
    assert len(batch.samples) == 4 and batch.counts.metrics()["rollout/num_turns_mean"] == 2.0
    for sample in batch.samples:
        assert sample.tokens[5].item() == WORDS["t9"]
        assert sample.loss_mask.tolist() == [True] * 3 + [False] + [True] * 3
        assert sample.reward == (sample.tokens[6:] == 1).sum() and sample.reward_info == {"tries": 2.0}
        assert sample.routed_experts is not None and sample.routed_experts.indices.shape[0] == 2 + 7 - 1
    with refused("rollout.generate", "'thrice'"):
        import_named("rollout.generate", "own_generate:thrice")


def changed(**changes: Any) -> Generate:
    """The engine's own completions, the second of them with changes that may depend on it."""

    def function(engine: Any, requests: Any, params: SamplingParams) -> list[Sample]:
        first, second, *others = engine.generate(requests, params)
        values = {name: change(second) if callable(change) else change for name, change in changes.items()}
        return [first, dataclasses.replace(second, **values), *others]

    return function


def test_without_an_episode_the_response_is_scored(model: Any) -> None:
    for sample in collected(model, changed()).samples:
        assert sample.reward == len(words_of(sample.tokens[sample.prompt_length :]))


def test_masked_tokens_need_no_log_prob(model: Any) -> None:
    nan = torch.full((8,), torch.nan)
    assert collected(model, changed(rollout_log_probs=nan)).counts.num_dropped["non_finite_log_probs"] == 1
    batch = collected(model, changed(rollout_log_probs=nan, loss_mask=torch.zeros(8, dtype=torch.bool)))
    assert batch.counts.num_dropped_samples == 0


def longer(engine: Any, requests: Any, params: SamplingParams) -> list[Sample]:
    return engine.generate(requests, dataclasses.replace(params, max_response_tokens=9))


def broken(*arguments: Any) -> Any:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (broken, r"'own:function' raised KeyError: 'lost'"),
        (lambda engine, requests, params: [], "found 0 completions; expected one for each of 4"),
        (lambda engine, requests, params: [None] * 4, "found 'NoneType' in place of"),
        (changed(id="other"), "found 'other' in place of"),
        (changed(tokens=lambda c: c.tokens[:-1]), r"'log_probs': 8.*expected 7, one per token"),
        (changed(tokens=lambda c: c.tokens + VOCAB), "expected 0 to 39"),
        (changed(tokens=lambda c: c.tokens.float()), "tokens of torch.float32; expected int64"),
        (changed(loss_mask=lambda c: torch.ones(8)), "loss_mask of torch.float32; expected bool"),
        (changed(topk=None), "'topk': 0"),
        (changed(finish_reason="done"), "finish_reason 'done'"),
        (longer, "found 9 tokens; expected at most 8"),
    ],
)
def test_mismatched_completions_are_refused(model: Any, function: Callable[..., Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        collected(model, function)


def test_the_older_name_of_a_response_makes_the_same_record() -> None:
    spans, mask = (WeightVersionSpan(0, 3, 5),), torch.tensor([True, False, True])
    tokens, log_probs = torch.tensor([4, 9, 2]), torch.tensor([-0.5, 0.0, -2.0])
    made = response_alone("a+1", tokens, log_probs, "stop", None, None, spans, loss_mask=mask)
    same = response_alone("a+1", tokens, log_probs, "stop", weight_versions=spans, loss_mask=mask)
    assert_same(made, same)
    assert isinstance(made, Sample) and not isinstance(None, Sample)
    assert (made.request_id, made.prompt_length, mask_of(made).tolist()) == ("a+1", 0, mask.tolist())
    assert torch.equal(made.log_probs, made.rollout_log_probs)

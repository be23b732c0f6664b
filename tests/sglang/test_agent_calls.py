"""An agent's conversations by a real server: recorded, against a forward pass, and against an environment."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from megatron_dppo.agents.agents import Agents
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.environments import InProcess, Observation, Turn
from megatron_dppo.rollout.conversations import TurnLimits
from megatron_dppo.types import FinishReason, Prompt, Sample
from tests.sglang.fault_proxy import Body, FaultProxy
from tests.support.collecting import MultiTurn
from tests.support.comparing import PARITY, ChatLetters, compare, requests_of
from tests.support.serving import KEY, MODEL, Served

PARAMS = SamplingParams(64, num_topk_log_probs=5, capture_routes=True)
SAYS = ("t1 t2", "t3", None)


class Scripted:
    """Speaks the lines of the harness `scripted`."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.says = iter(SAYS)
        return Observation(prompt.text, prompt.messages)

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        says = next(self.says)
        return Turn(says, float(len(response.split())), says is None)


@pytest.fixture(scope="module")
def proxy(served: Served) -> Iterator[FaultProxy]:
    with FaultProxy(served.url).running() as proxy:
        yield proxy


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_calls_continue_what_the_server_sampled_as_an_environment_does(
    served: Served, proxy: FaultProxy, temperature: float
) -> None:
    """By a proxy that records what the server was sent and returned. Greedy responses can be compared."""
    engine = SglangEngine(proxy.url, MODEL, Patience(generate_timeout_s=600), api_key=KEY)
    agent = AgentConfig(harness="tests.support.harnesses:scripted", call_timeout_s=300.0)
    options = RolloutConfig(agent=agent, max_turn_tokens=5)
    prompt = Prompt("p", "", "test", messages=({"role": "user", "content": "?"},))
    opening = tuple(ChatLetters().encode("user: ?;assistant: ", add_special_tokens=False))
    requests = [
        replace(each, prompt=prompt, prompt_tokens=opening, is_chat=True)
        for each in requests_of("agents", num_prompts=2, samples=2)
    ]
    params = replace(PARAMS, temperature=temperature)
    multi_turn = MultiTurn(engine, InProcess(Scripted), ChatLetters(), TurnLimits(3, max_turn_tokens=5))
    by_environment = multi_turn.generate(requests, params)
    proxy.passed.clear()
    with closing(Agents(options, DataConfig(reward="x", max_prompt_tokens=60))) as agents:
        multi_turn.converse = agents.converse(ChatLetters())
        completions = multi_turn.generate(requests, params)
    worst, worst_topk = compare(served, requests, completions, params)
    print(f"log-probs {worst:.1e}, top-5 {worst_topk:.1e}")
    assert max(worst, worst_topk) <= PARITY
    for completion, other in zip(completions, by_environment, strict=True):
        assert completion.loss_mask is not None and completion.episode is not None
        assert completion.prompt_tokens == opening and completion.episode.num_forks == 0
        assert completion.episode.num_turns == len(completion.weight_versions) == 3
        assert completion.episode.reward == completion.loss_mask.sum(), "the client saw each sampled token"
        assert completion.tokens[~completion.loss_mask].tolist() == context_between(completion)
        require_recorded(completion, proxy.passed[completion.request_id])
        if not temperature:
            require_same(completion, other)


def context_between(completion: Sample) -> list[int]:
    """Return what the template writes between responses: one that sampled the ";" gets no second one."""
    assert completion.loss_mask is not None
    is_last = completion.loss_mask[:-1] & ~completion.loss_mask[1:]
    context: list[int] = []
    for last, says in zip(completion.tokens[:-1][is_last].tolist(), SAYS, strict=False):
        end, *rest = ChatLetters().encode(f";user: {says};assistant: ", add_special_tokens=False)
        context += rest if last == end else [end, *rest]
    return context


def require_recorded(completion: Sample, passed: Sequence[tuple[Body, Body]]) -> None:
    """Each token that trains is one that the server returned, after the tokens that it was sent."""
    assert completion.loss_mask is not None
    tokens = [*(completion.prompt_tokens or ()), *completion.tokens.tolist()]
    is_sampled = [False] * len(tokens)
    for asked, answered in passed:
        start, sampled = len(asked["input_ids"]), answered["output_ids"]
        assert tokens[: start + len(sampled)] == [*asked["input_ids"], *sampled]
        is_sampled[start : start + len(sampled)] = [True] * len(sampled)
    assert is_sampled[-len(completion.tokens) :] == completion.loss_mask.tolist()


def require_same(completion: Sample, other: Sample) -> None:
    """Also the log-probs, up to what other requests of the server's batch change."""
    assert completion.loss_mask is not None and other.loss_mask is not None
    assert completion.topk is not None and other.topk is not None
    assert completion.routed_experts is not None and other.routed_experts is not None
    assert torch.equal(completion.tokens, other.tokens) and torch.equal(completion.loss_mask, other.loss_mask)
    assert completion.weight_versions == other.weight_versions
    torch.testing.assert_close(completion.log_probs, other.log_probs, rtol=0, atol=PARITY)
    torch.testing.assert_close(completion.topk.log_probs, other.topk.log_probs, rtol=0, atol=PARITY)
    assert torch.equal(completion.routed_experts.indices, other.routed_experts.indices)
    assert completion.episode is not None and other.episode is not None
    assert completion.episode.reward == other.episode.reward

"""An agent's conversations by a real server, against a forward pass of the whole."""

from contextlib import closing
from dataclasses import replace
from typing import Any

from megatron_dppo.agents.agents import Agents
from megatron_dppo.config.schema import AgentConfig, RolloutConfig
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.environments import InProcess, SingleTurn
from megatron_dppo.rollout.conversations import TurnLimits
from megatron_dppo.types import Prompt
from tests.support.collecting import MultiTurn
from tests.support.comparing import PARITY, Letters, compare, requests_of
from tests.support.serving import KEY, MODEL, Served

PARAMS = SamplingParams(64, num_topk_log_probs=5, capture_routes=True)


class ChatLetters(Letters):
    """Writes chats, too."""

    chat_template, name_or_path = "role: content;", "letters"

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        text = "".join(f"{message['role']}: {message['content']};" for message in conversation)
        text += "assistant: " * options["add_generation_prompt"]
        return self.encode(text, add_special_tokens=False) if options["tokenize"] else text


def test_calls_continue_what_the_server_sampled(served: Served) -> None:
    engine = SglangEngine(served.url, MODEL, Patience(generate_timeout_s=120), api_key=KEY)
    agent = AgentConfig(harness="tests.support.harnesses:scripted", call_timeout_s=60.0)
    options = RolloutConfig(agent=agent, max_turn_tokens=5)
    multi_turn = MultiTurn(engine, InProcess(SingleTurn), Letters(), TurnLimits())
    prompt = Prompt("p", "", "test", text="?")
    requests = [replace(each, prompt=prompt) for each in requests_of("agents", num_prompts=2, samples=2)]
    with closing(Agents(options, DataConfig(reward="x", max_prompt_tokens=60))) as agents:
        multi_turn.converse = agents.converse(ChatLetters())
        completions = multi_turn.generate(requests, PARAMS)
    own = [
        replace(each, prompt_tokens=each.prompt_of(done))
        for each, done in zip(requests, completions, strict=True)
    ]
    worst, worst_topk = compare(served, own, completions, PARAMS)
    print(f"log-probs {worst:.1e}, top-5 {worst_topk:.1e}")
    assert max(worst, worst_topk) <= PARITY
    opening = ChatLetters().encode("user: ?;assistant: ", add_special_tokens=False)
    for completion in completions:
        assert completion.loss_mask is not None and completion.episode is not None
        assert completion.prompt_tokens == tuple(opening) and completion.episode.num_forks == 0
        assert completion.episode.num_turns == len(completion.weight_versions) == 3
        assert completion.episode.reward == completion.loss_mask.sum(), "the client saw each sampled token"
        between = "".join(f";user: {says};assistant: " for says in ("t1 t2", "t3"))
        expected = ChatLetters().encode(between, add_special_tokens=False)
        assert completion.tokens[~completion.loss_mask].tolist() == expected

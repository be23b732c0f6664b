"""Conversations of several turns by a real server, against a forward pass of the whole."""

import dataclasses

import torch

from megatron_dppo.engines.base import SamplingParams
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.environments import InProcess, Observation, Turn
from megatron_dppo.rollout.conversations import TurnLimits
from megatron_dppo.types import FinishReason, Prompt
from tests.support.collecting import MultiTurn
from tests.support.comparing import PARITY, Letters, compare, requests_of
from tests.support.serving import KEY, MODEL, Served

PARAMS = SamplingParams(64, num_topk_log_probs=5, capture_routes=True)
SAYS = ["and then?", "why?", None]


class Curious:
    """Asks twice."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.num_turns = 0
        return Observation("?")

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        self.num_turns += 1
        says = SAYS[self.num_turns - 1]
        return Turn(says, 1.0, done=says is None)


def test_conversation_equals_one_forward_pass(served: Served) -> None:
    engine = SglangEngine(served.url, MODEL, Patience(generate_timeout_s=600), api_key=KEY)
    multi_turn = MultiTurn(engine, InProcess(Curious), Letters(), TurnLimits(max_turns=3, max_turn_tokens=9))
    prompt = Prompt("p", "", "test", text="?")
    requests = [dataclasses.replace(r, prompt=prompt) for r in requests_of("turns", num_prompts=4, samples=3)]
    completions = multi_turn.generate(requests, PARAMS)
    worst, worst_topk = compare(served, requests, completions, PARAMS)
    print(f"log-probs {worst:.1e}, top-5 {worst_topk:.1e}")
    assert max(worst, worst_topk) <= PARITY
    said = torch.tensor(Letters().encode("".join(filter(None, SAYS)), add_special_tokens=False))
    for completion in completions:
        assert completion.loss_mask is not None and completion.episode is not None
        assert (completion.episode.num_turns, completion.episode.reward) == (3, 3.0)
        assert torch.equal(completion.tokens[~completion.loss_mask], said)
        assert len(completion.weight_versions) == 3
        assert sum(span.stop - span.start for span in completion.weight_versions) == completion.loss_mask.sum()

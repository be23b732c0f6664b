"""What a server answered, compared with Hugging Face's forward pass of the same weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_dppo.engines.base import Request, SamplingParams, response_alone
from megatron_dppo.rewards import RewardFault, RewardRequest, RewardResult
from megatron_dppo.types import Sample
from tests.support.serving import Served
from tests.support.tiny import VOCAB

PARITY = 5e-5  # of float32 log-probs
TIE = 2e-5  # of float32 scores of experts: closer ones may come in either order
FULL = SamplingParams(24, num_topk_log_probs=20, capture_routes=True)


def requests_of(name: str, num_prompts: int, samples: int, length: int = 40) -> list[Request]:
    """Groups `<name>/0`, `<name>/1`, ... of random prompts of this length."""
    generator = torch.Generator().manual_seed(length)
    prompts = torch.randint(1, VOCAB, (num_prompts, length), generator=generator).tolist()
    return [
        Request(f"{name}/{p}+{k}", tuple(prompt), (0, 0, p * samples + k))
        for p, prompt in enumerate(prompts)
        for k in range(samples)
    ]


@torch.no_grad()
def compare(
    served: Served, requests: Sequence[Request], completions: Sequence[Sample], params: SamplingParams
) -> tuple[float, float]:
    """Largest differences of log-probs and of the top-K of what was sampled; all routes must be equal.

    If two experts' scores tie, either may come first. A response is compared up to a tie that
    changed which experts were chosen.
    """
    worst, worst_topk = 0.0, 0.0
    for request, completion in zip(requests, completions, strict=True):
        assert completion.request_id == request.id
        tokens = torch.cat([torch.tensor(request.prompt_tokens), completion.tokens])
        with router_choices(served.model) as choices:
            logits = served.model(tokens[None]).logits[0]
        log_probs = (logits / (params.temperature or 1.0)).log_softmax(-1)
        log_probs = log_probs[len(request.prompt_tokens) - 1 : -1]
        expected = log_probs.gather(1, completion.tokens[:, None])[:, 0]
        is_sampled = torch.ones_like(completion.tokens, dtype=torch.bool)
        if completion.loss_mask is not None:
            is_sampled = completion.loss_mask.clone()
        if params.capture_routes:
            assert completion.routed_experts is not None
            alike = num_alike(completion.routed_experts.indices.long(), choices)
            is_sampled[max(0, alike + 1 - len(request.prompt_tokens)) :] = False
        if not is_sampled.any():
            continue
        worst = max(worst, float((completion.log_probs - expected)[is_sampled].abs().max()))
        if params.num_topk_log_probs:
            assert completion.topk is not None
            found, log_probs = completion.topk.log_probs[is_sampled], log_probs[is_sampled]
            best = log_probs.topk(params.num_topk_log_probs).values
            worst_topk = max(worst_topk, float((found - best).abs().max()))
            by_id = log_probs.gather(1, completion.topk.ids[is_sampled].long())
            worst_topk = max(worst_topk, float((found - by_id).abs().max()))
    return worst, worst_topk


def as_answered(samples: Sequence[Sample]) -> tuple[list[Request], list[Sample]]:
    """Samples as the requests and completions that they were made of."""
    split = [sample.tokens.tensor_split([sample.prompt_length]) for sample in samples]
    requests = [
        Request(s.id, tuple(prompt.tolist()), (0, 0, 0)) for s, (prompt, _) in zip(samples, split, strict=True)
    ]
    completions = [
        response_alone(s.id, response, s.rollout_log_probs, s.finish_reason, s.topk, s.routed_experts, ())
        for s, (_, response) in zip(samples, split, strict=True)
    ]
    return requests, completions


def num_alike(routes: Tensor, choices: list["Choice"]) -> int:
    """Tokens before the first for which a tie changed the chosen experts. Any other difference fails."""
    expected = torch.stack([choice.experts for choice in choices], dim=1)[:-1]
    assert routes.shape == expected.shape
    for token, layer in (routes != expected).any(-1).nonzero().tolist():
        scores, found, best = choices[layer].scores[token], routes[token, layer], expected[token, layer]
        gap = float((scores[found] - scores[best]).abs().max())
        print(
            f"token {token}, layer {layer}: {found.tolist()}, not {best.tolist()}; scores differ by {gap:.1e}"
        )
        assert gap <= TIE
        if set(found.tolist()) != set(best.tolist()):
            return token
    return len(routes)


class Choice(NamedTuple):
    """What a router of a transformers model computed for each token."""

    scores: Tensor  # float [tokens, experts]
    experts: Tensor  # int [tokens, top_k], the best first


@contextmanager
def router_choices(model: torch.nn.Module) -> Iterator[list[Choice]]:
    """Collect what the routers of a transformers model choose, in their order."""
    choices: list[Choice] = []

    def collect(router: torch.nn.Module, _: Any, out: tuple[Tensor, ...]) -> None:
        bias = getattr(router, "e_score_correction_bias", None)
        choices.append(Choice(out[0] if bias is None else out[0].sigmoid() + bias, out[-1]))

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("router")]
    hooks = [router.register_forward_hook(collect) for router in routers]
    try:
        yield choices
    finally:
        for hook in hooks:
            hook.remove()


class Letters:
    """One token per character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) % (VOCAB - 1) + 1 for letter in text]

    def apply_chat_template(self, conversation: Any, **_: Any) -> list[int]:
        raise AssertionError(conversation)

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return " ".join(map(str, token_ids))


class ChatLetters(Letters):
    """Writes chats, too."""

    chat_template, name_or_path = "role: content;", "letters"

    def get_chat_template(self, tools: Any = None) -> str:
        return self.chat_template

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        text = "".join(f"{message['role']}: {message['content']};" for message in conversation)
        text += "assistant: " * options["add_generation_prompt"]
        return self.encode(text, add_special_tokens=False) if options["tokenize"] else text


class Lengths:
    """Rewards long responses."""

    async def score_one(self, request: RewardRequest) -> RewardResult | RewardFault:
        return RewardResult(float(len(request.response)))

    async def score_group(self, requests: Sequence[RewardRequest]) -> list[RewardResult | RewardFault]:
        return [await self.score_one(request) for request in requests]

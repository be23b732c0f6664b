"""A micro-batch has the bits that the engine returned for each token: mu, Top-K, routes, version and mask."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages
from megatron_dppo.engines.base import (
    EngineCounts,
    Request,
    SamplingParams,
    join_parts,
    response_alone,
    with_observation,
)
from megatron_dppo.rewards import RewardResult
from megatron_dppo.types import (
    Microbatch,
    ModelRouting,
    Prompt,
    RolloutTopK,
    RoutedExperts,
    Sample,
    WeightVersionSpan,
)
from tests.support.collecting import Collected, InBatches, collect
from tests.support.ranks_on_threads import alone
from tests.support.samples import InProcessScorer
from tests.support.word_tokenizers import TOKENIZER

ROUTING = ModelRouting((1, 3), 128, 2)
PARAMS = SamplingParams(40, num_topk_log_probs=3, capture_routes=True)
PROMPTS = [Prompt(text, "", "test", text=f"<bos> {text}") for text in ("2 1", "2 1 * 4", "4 3 = 2 1")]
Row = Mapping[str, list[Any]]


class InTwoParts(InBatches):
    """Two versions of the weights sample each response, with an observation between them; all is random."""

    weight_version, counts = 8, EngineCounts()
    refusals: Mapping[str, int] = MappingProxyType({})

    def __init__(self) -> None:
        self.generator, self.rows = torch.Generator().manual_seed(3), dict[str, list[Row]]()

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        return [self._response(request) for request in requests]

    def _response(self, request: Request) -> Sample:
        num_prompt, (first, seen, last) = len(request.prompt_tokens), self._numbers(2, 9, 3)
        one = self._part(request, first, num_prompt + first - 1, 7)
        other = self._part(request, last, seen + last, 8)
        whole = join_parts(with_observation(one, torch.arange(seen)), other)
        rows = [*self._rows(one), *[{"mask": [False]}] * seen, *self._rows(other)]
        assert one.routed_experts is not None and other.routed_experts is not None
        routes = [*one.routed_experts.indices.tolist(), *other.routed_experts.indices.tolist()]
        self.rows[request.id] = [{**row, "next": [place]} for place, row in enumerate(rows)]
        self.rows[request.id + " routes"] = [{"routes": each} for each in routes]
        return replace(whole, finish_reason="stop")

    def _numbers(self, *least: int) -> list[int]:
        return [n + int(torch.randint(0, 6, (), generator=self.generator)) for n in least]

    def _part(self, request: Request, num_tokens: int, num_rows: int, version: int) -> Sample:
        def drawn(*shape: int) -> torch.Tensor:
            return torch.randint(0, 17, shape, generator=self.generator)

        def log_probs(*shape: int) -> torch.Tensor:
            return -torch.rand(shape, generator=self.generator).square() * 10 ** -drawn(*shape).div(6).float()

        return response_alone(
            request.id,
            drawn(num_tokens),
            log_probs(num_tokens),
            "abort",
            RolloutTopK(drawn(num_tokens, 3).int(), log_probs(num_tokens, 3).sort(descending=True).values),
            RoutedExperts(drawn(num_rows, 2, 2).to(torch.uint8), ROUTING.layer_numbers, ROUTING.num_experts),
            (WeightVersionSpan(0, num_tokens, version),),
        )

    def _rows(self, part: Sample) -> list[Row]:
        """What one part has of each token."""
        assert part.topk is not None
        columns = (part.tokens, part.rollout_log_probs, part.topk.ids, part.topk.log_probs)
        versions = [span.version for span in part.weight_versions for _ in range(span.start, span.stop)]
        found = zip(*(column.tolist() for column in columns), versions, strict=True)
        return [
            {"mask": [True], "token": [token], "mu": [mu], "ids": ids, "values": values, "version": [version]}
            for token, mu, ids, values, version in found
        ]


def collected(engine: InTwoParts) -> Collected:
    scorer = InProcessScorer(lambda prompt, response, finish_reason: RewardResult(float(len(response) % 5)))
    limits: Any = {"samples_per_prompt": 4, "max_prompt_tokens": 20, "seed": 1, "rollout": 2}
    return collect(engine, PROMPTS, TOKENIZER, scorer, PARAMS, **limits)


def sequences(microbatch: Microbatch) -> dict[str, slice]:
    bounds = pairwise(microbatch.cu_seqlens.tolist())
    return {name: slice(*each) for name, each in zip(microbatch.sample_ids, bounds, strict=True)}


def test_every_token_trains_with_what_the_engine_returned_for_it() -> None:
    engine = InTwoParts()
    groups = with_advantages(collected(engine).groups, normalize_std=False)
    samples = [sample for group in groups for sample in group.samples]
    shape = BatchShape("token_mean", 40, 100, topk_columns=3, routing=ROUTING)
    ((batch,), _), num_compared = train_batches([list(samples)], shape, alone()), 0
    assert len(batch.microbatches) > 1 and len(samples) == 12
    for m in batch.microbatches:
        assert m.topk is not None and m.weight_versions is not None and m.routed_experts is not None
        for name, where in sequences(m).items():
            rows, routes = engine.rows[name], [row["routes"] for row in engine.rows[name + " routes"]]
            first = where.stop - 1 - len(rows)  # scores the first response token
            assert m.routed_experts.indices[where].tolist() == [*routes, routes[-1]]
            assert not m.loss_mask[where.start : first].any() and not m.loss_mask[where.stop - 1]
            for place, row in enumerate(rows, first):
                assert [bool(m.loss_mask[place])] == row["mask"]
                if row["mask"] == [True]:
                    assert [int(m.targets[place])] == row["token"] == [int(m.tokens[place + 1])]
                    assert [float(m.rollout_log_probs[place])] == row["mu"]
                    assert m.topk.ids[place].tolist() == row["ids"]
                    assert m.topk.log_probs[place].tolist() == row["values"]
                    assert [int(m.weight_versions[place])] == row["version"]
                    num_compared += 1
    mu = torch.cat([m.rollout_log_probs[m.loss_mask] for m in batch.microbatches])
    assert num_compared == mu.numel() > 60 and mu.max() > -1e-3 and mu.min() < -0.3
    assert len({float(value) for value in mu}) > 0.9 * mu.numel(), "no two tokens are alike"

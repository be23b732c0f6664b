"""Rollouts sampled ahead by a real server: each token compared with a forward pass of its weight version."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from string import ascii_letters

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from megatron_dppo.agents.agents import Agents, Converse
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.sections import DataConfig
from megatron_dppo.data.prompts.prompts import PromptStream
from megatron_dppo.engines.base import Ask, Request, SamplingParams
from megatron_dppo.engines.sglang.client import Patience
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.weight_sync.fleet import Fleet, Member
from megatron_dppo.environments import InProcess, Observation, SingleTurn, Turn
from megatron_dppo.rollout.conversations import Conversations, TurnLimits
from megatron_dppo.rollout.groups import GroupMaker
from megatron_dppo.rollout.producer import Producer
from megatron_dppo.rollout.sampler import GroupSampler
from megatron_dppo.rollout.scheduling import Scheduler, run_to_end
from megatron_dppo.rollout.scoring import Scorer, as_text
from megatron_dppo.rollout.staleness import StalenessBound
from megatron_dppo.types import FinishReason, Prompt, Sample
from tests.support.comparing import PARITY, ChatLetters, Lengths, Letters
from tests.support.processes import wait_until
from tests.support.serving import KEY, MODEL, VERSION, Served, num_requests
from tests.support.tiny import TOP_K

pytestmark = pytest.mark.usefixtures("changes_weights")

BOUND = StalenessBound(prompts_per_rollout=4, max_staleness=3, over_sampling=2.5)
SAMPLES, LONGEST, FIRST_VERSION, ROLLOUTS, MOST_ROLLOUTS = 3, 420, 7, 5, 20
PARAMS = SamplingParams(LONGEST, num_topk_log_probs=5, capture_routes=True)
LIMITS = TurnLimits(max_turns=3, max_turn_tokens=90)
SAYS = ["and then?", "why?", None]
REWARDS = [1.0, 2.0, 4.0]
PROMPTS = [
    Prompt(str(i), "", "test", text="".join(random.Random(i).choices(ascii_letters, k=8 + i % 40)))
    for i in range(99)
]


class Curious:
    """Asks twice, and writes down what it hears."""

    heard: list[str]

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        assert prompt.text is not None
        self.num_turns = 0
        return Observation(prompt.text)

    def step(self, response: str, finish_reason: FinishReason) -> Turn:
        self.heard.append(response)
        self.num_turns += 1
        says = SAYS[self.num_turns - 1]
        return Turn(says, REWARDS[self.num_turns - 1], done=says is None)


class LongTail(Conversations):
    """Most responses are short, and some nearly as long as they may be."""

    async def run(self, request: Request, params: SamplingParams, ask: Ask) -> Sample:
        length = min(LONGEST, 24 + int(random.Random(request.id).lognormvariate(4.2, 1.1)))
        return await super().run(request, replace(params, max_response_tokens=length), ask)


@dataclass
class Weights:
    """The weights of each version, as the folders that a server and Hugging Face read."""

    served: Served
    folder: Path

    def __post_init__(self) -> None:
        self.tensors = load_file(self.served.folder / "model.safetensors")
        self.models = dict[int, Qwen3MoeForCausalLM]()

    def push(self, version: int) -> None:
        """Add noise to the weights, and push them as a weight sync does."""
        generator = torch.Generator().manual_seed(version)
        for name, tensor in self.tensors.items():
            if "norm" not in name:
                tensor.add_(0.02 * tensor.std() * torch.randn(tensor.shape, generator=generator))
        folder = self.folder / str(version)
        folder.mkdir()
        (folder / "config.json").write_bytes((self.served.folder / "config.json").read_bytes())
        save_file(self.tensors, folder / "model.safetensors", {"format": "pt"})
        fleet = Fleet([Member(self.served.url, 0, 1, VERSION)], KEY, 300)
        fleet.tell(lambda member: member.calls.pause)
        fleet.tell(lambda member: member.calls.from_disk(str(folder), version))
        fleet.tell(lambda member: member.calls.go_on)
        assert not fleet.failures

    def model(self, version: int) -> Qwen3MoeForCausalLM:
        if version not in self.models:
            folder = self.folder / str(version)
            self.models[version] = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return self.models[version]


def make_ahead(engine: SglangEngine, converse: Converse, environments: InProcess) -> Scheduler:
    stream = PromptStream(PROMPTS, 0, shuffle=False)
    maker = GroupMaker(Letters(), SAMPLES, max_prompt_tokens=64, seed=0, environments=environments)
    scorer = Scorer(Letters(), Lengths(), True, None)
    sampler = GroupSampler(engine.session, converse, scorer, PARAMS)
    return Scheduler(BOUND, Producer(maker, sampler, stream, (0, 1)), smallest_group=1)


@pytest.fixture
def weights(served: Served, tmp_path: Path) -> Weights:
    return Weights(served, tmp_path)


def train(
    ahead: Scheduler, engine: SglangEngine, weights: Weights, num_pushes: int
) -> list[tuple[int, Sample]]:
    """Sample and "train" a few rollouts, and more until so many pushes have interrupted responses.

    Whether a push meets a short turn, or the time between two, depends on how busy the machine is.

    Returns:
        Each version with each of the samples that it trained on.
    """

    def push(version: int) -> None:
        with ahead.pause(version, FIRST_VERSION + 99 - version):
            wait_until(lambda: num_requests(weights.served) == 0, 300)  # its report lags behind by an iteration
            weights.push(version)
            engine.admit(engine.urls, version)

    push(FIRST_VERSION)
    trained = list[tuple[int, Sample]]()
    for version in range(FIRST_VERSION, FIRST_VERSION + MOST_ROLLOUTS):
        taken = ahead.next(version, version, lambda value: [value], run_to_end)
        assert taken is not None
        groups, counts = taken
        assert sum(counts.num_dropped.values()) == 0
        assert [len(group.samples) for group in groups] == [SAMPLES] * BOUND.prompts_per_rollout
        trained += [(version, sample) for group in groups for sample in group.samples]
        push(version + 1)  # at once: on a busy machine the server would finish all responses meanwhile
        if version + 1 >= FIRST_VERSION + ROLLOUTS and are_interrupted(trained, num_pushes):
            return trained
    raise AssertionError(f"{MOST_ROLLOUTS} pushes interrupted too few responses")


def are_interrupted(trained: Sequence[tuple[int, Sample]], num_pushes: int) -> bool:
    """Whether so many pushes interrupted responses, and two or more of them one response."""
    interrupting, most = set[int](), 0
    for _, sample in trained:
        spans = sample.weight_versions
        most = max(most, len({span.version for span in spans}))
        interrupting |= {b.version for a, b in pairwise(spans) if a.stop == b.start}
    return most >= 3 and len(interrupting) >= num_pushes


def turns_of(mask: Tensor) -> list[tuple[int, int]]:
    """Where a mask is true: (start, stop) of each run."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1).int(), append=torch.zeros(1).int()).nonzero()[:, 0]
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def require_whole_spans(sample: Sample) -> None:
    """Each sampled token has one version, and versions rise."""
    spans, covered = sample.weight_versions, torch.zeros(sample.response_length, dtype=torch.int64)
    assert [span.version for span in spans] == sorted(span.version for span in spans)
    for before, span in pairwise(spans):
        assert before.stop <= span.start
    for span in spans:
        assert span.start < span.stop
        covered[span.start : span.stop] += 1
    assert torch.equal(covered, sample.loss_mask.long())


@torch.no_grad()
def compare_by_version(
    weights: Weights, samples: Sequence[Sample], shift: int = 0
) -> tuple[float, float, float]:
    """Compare what was sampled with forward passes of the whole sequences, by the weights of each span.

    The server and the forward pass may choose different experts of equal score, which changes the token's
    log-probs and later ones. Such samples are left out, and are few.

    Returns:
        The largest differences of log-probs, of the top-K, and of the router's scores of the experts chosen
        from the best ones: routes that differ only where experts are equally good are no fault.
    """
    of_samples, ties = dict[str, list[float]](), set[str]()
    for version in sorted({span.version for sample in samples for span in sample.weight_versions}):
        own = [sample for sample in samples if version in {span.version for span in sample.weight_versions}]
        padded = torch.nn.utils.rnn.pad_sequence([sample.tokens for sample in own], batch_first=True)
        out = weights.model(version + shift)(padded, output_router_logits=True)
        scores = torch.stack([layer.view(*padded.shape, -1) for layer in out.router_logits], dim=2)
        for index, sample in enumerate(own):
            first, row = sample.prompt_length, 0
            response = sample.tokens[first:]
            log_probs = out.logits[index, first - 1 : len(sample.tokens) - 1].log_softmax(-1)
            assert sample.topk is not None and sample.routed_experts is not None
            routes = sample.routed_experts.indices.long()
            assert len(routes) == len(sample.tokens) - 1
            for span in sample.weight_versions:
                rows, row = slice(row, first + span.stop - 1), first + span.stop - 1
                if span.version != version:
                    continue
                at = slice(span.start, span.stop)
                expected = log_probs[at].gather(1, response[at, None])[:, 0]
                best = log_probs[at].topk(sample.topk.ids.shape[1]).values
                by_id = log_probs[at].gather(1, sample.topk.ids[at].long())
                chosen = scores[index, rows].gather(-1, routes[rows])
                assert routes[rows].sort(-1).values.diff(dim=-1).min() > 0  # no expert twice
                found = [
                    expected - sample.rollout_log_probs[at],
                    torch.stack([best, by_id]) - sample.topk.log_probs[at],
                    scores[index, rows].topk(TOP_K).values - chosen,
                ]
                new = [float(each.abs().max()) for each in found]
                of_samples[sample.id] = list(map(max, of_samples.get(sample.id, [0.0] * 3), new))
                gaps = found[2].abs().amax(-1).flatten()  # of each token, layer by layer
                nearest = gaps[gaps > 0][:1]  # what follows a tie may differ by any amount
                ties |= {sample.id} if nearest.numel() and nearest <= PARITY else set()
    assert len(ties) <= len(samples) / 10
    compared = [worst for name, worst in of_samples.items() if name not in ties]
    log_probs_worst, topk_worst, routes_worst = map(max, zip(*compared, strict=True))
    return log_probs_worst, topk_worst, routes_worst


@pytest.mark.parametrize("num_turns", [1, 3])
def test_sampled_tokens_match_a_forward_pass_by_weight_version(
    served: Served, weights: Weights, num_turns: int
) -> None:
    heard = list[str]()
    curious: Callable[[], Curious] = type("Listening", (Curious,), {"heard": heard})
    environments = InProcess(SingleTurn if num_turns == 1 else curious)
    if num_turns == 1:
        model, conversations = replace(MODEL, end_tokens=()), LongTail(environments, Letters(), TurnLimits())
    else:
        model, conversations = MODEL, Conversations(environments, Letters(), LIMITS)
    engine = SglangEngine(
        served.url, model, Patience(generate_timeout_s=600), api_key=KEY, max_concurrent_requests=24
    )
    ahead = make_ahead(engine, conversations.run, environments)
    try:
        trained = train(ahead, engine, weights, num_pushes=3 if num_turns == 1 else 1)
        cursor = ahead.cursor
    finally:
        ahead.close()
    assert num_requests(served) == 0

    samples = [sample for _, sample in trained]
    for version, sample in trained:
        require_whole_spans(sample)
        assert 0 <= version - sample.weight_versions[0].version <= BOUND.max_staleness
    places = {sample.id.partition("+")[0] for sample in samples}
    assert len(places) * SAMPLES == len({sample.id for sample in samples}) == len(samples)
    top, again = PromptStream(PROMPTS, 0, shuffle=False, cursor=cursor).upcoming
    assert sorted([*places, *(f"place{place}" for place in again)]) == sorted(f"place{p}" for p in range(top))

    worst = compare_by_version(weights, samples)
    print(f"log-probs {worst[0]:.1e}, top-5 {worst[1]:.1e}, routes {worst[2]:.1e} of {len(samples)} samples")
    assert max(worst) <= PARITY
    assert min(compare_by_version(weights, samples, shift=1)) > 100 * PARITY  # other versions are distinguished
    if num_turns > 1:
        require_whole_conversations(samples, heard)


def test_pushes_in_the_middle_of_an_agents_calls_are_not_seen_by_its_client(
    served: Served, weights: Weights
) -> None:
    """It gets one reply to each call, whose tokens have the versions that sampled them."""
    engine = SglangEngine(
        served.url, MODEL, Patience(generate_timeout_s=600), api_key=KEY, max_concurrent_requests=24
    )
    options = RolloutConfig(
        agent=AgentConfig(harness="tests.support.harnesses:scripted"), max_turn_tokens=LIMITS.max_turn_tokens
    )
    with (
        closing(Agents(options, DataConfig(reward="x", max_prompt_tokens=99))) as agents,
        closing(make_ahead(engine, agents.converse(ChatLetters()), InProcess(SingleTurn))) as ahead,
    ):
        samples = [sample for _, sample in train(ahead, engine, weights, num_pushes=3)]
    for sample in samples:
        require_whole_spans(sample)
        assert len(turns_of(sample.loss_mask)) == 3
        assert sample.reward == sample.loss_mask.sum(), "the client saw each sampled token"
    worst = compare_by_version(weights, samples)
    print(f"log-probs {worst[0]:.1e}, top-5 {worst[1]:.1e}, routes {worst[2]:.1e} of {len(samples)} samples")
    assert max(worst) <= PARITY
    assert min(compare_by_version(weights, samples, shift=1)) > 100 * PARITY


def require_whole_conversations(samples: Sequence[Sample], heard: Sequence[str]) -> None:
    """Three turns each, separated by the environment's text; the environment saw each response complete."""
    num_held, said_by_all = 0, Counter[str]()
    for sample in samples:
        response, turns = sample.tokens[sample.prompt_length :], turns_of(sample.loss_mask)
        assert len(turns) == len(SAYS) and (turns[0][0], turns[-1][1]) == (0, len(response))
        for (_, stop), (start, _), says in zip(turns, turns[1:], SAYS, strict=False):
            assert says is not None
            assert response[stop:start].tolist() == Letters().encode(says, add_special_tokens=False)
        for start, stop in turns:
            said = response[start:stop]
            said_by_all[as_text(Letters(), said.tolist(), has_special_tokens=False)] += 1
            assert stop - start == LIMITS.max_turn_tokens or int(said[-1]) in MODEL.end_tokens
            num_held += sum(start < span.start < stop for span in sample.weight_versions)
        assert sample.reward == sum(REWARDS)
    assert said_by_all <= Counter(heard)
    assert num_held  # within turns, not between them

"""Runs the host's path from SGLang's bytes to packed micro-batches, step by step, with the loop's functions.

The replies come from `decoding`, all with the same content. Parcels for other ranks are sent to this rank
itself. The plan of mini-batches, which needs only lengths, is made for a complete rollout.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.balance import SampleCost, plan_minibatch
from megatron_dppo.data.batches.batch_file import bytes_of
from megatron_dppo.data.batches.exchange import DataParallel, decode, encode
from megatron_dppo.data.batches.gradient_steps import gradient_steps, with_advantages
from megatron_dppo.data.batches.memory import bytes_of_samples
from megatron_dppo.data.batches.token_slices import token_slice
from megatron_dppo.data.prompts.prompts import Drawn
from megatron_dppo.engines.base import Completion, Request, SamplingParams
from megatron_dppo.engines.sglang.client import SglangClient
from megatron_dppo.engines.sglang.protocol import NEWEST, generation_of
from megatron_dppo.environments import InProcess, SingleTurn
from megatron_dppo.rewards import RewardPool
from megatron_dppo.rollout.conversations import Conversations, TurnLimits
from megatron_dppo.rollout.groups import GroupMaker, PromptGroup, sample_of, usable_groups
from megatron_dppo.rollout.scoring import Fault, Scorer
from megatron_dppo.routing_replay.capture import validate_routes
from megatron_dppo.run.logger import RunLogger
from megatron_dppo.runtime.concurrency import all_of, run_loop
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import Prompt, Sample, SampledRollout, SampleGroup, TrainBatch
from tools.benchmarks.decoding import MODEL, PROMPT, REQUEST, TOPK, answer
from tools.benchmarks.host_stand_ins import answering, random_tokenizer

T = TypeVar("T")

Where = Literal["decoding process", "generation", "exposed"]
"""Decoding process; trainer, while other responses are generated; or trainer, while the GPUs wait."""

COST = SampleCost(
    linear=6 * 3.0e9, quadratic=6.0 * 48 * 32 * 128
)  # of Qwen3-30B-A3B: active weights, attention


@dataclass(frozen=True)
class Rollout:
    """Sizes of a complete rollout."""

    num_samples: int = 2048
    num_tokens: int = 8192  # tokens per sample, including the prompt
    num_ranks: int = 8
    group_size: int = 8  # samples per prompt
    num_minibatches: int = 8

    @property
    def samples_per_rank(self) -> int:
        """Number of samples that each rank samples."""
        return self.num_samples // self.num_ranks

    def config(self, folder: Path) -> Config:
        """Return the config of a run in this folder with rollouts of these sizes."""
        options = {
            "engine": "sglang",
            "prompts_per_rollout": self.num_samples // self.group_size,
            "samples_per_prompt": self.group_size,
            "max_response_tokens": self.num_tokens - PROMPT,
            "num_topk_log_probs": TOPK,
            "routing_replay": "replay",
        }
        return Config.model_validate(
            {
                "run": {"folder": folder},
                "model": {"load": folder},
                "parallel": {"max_tokens_per_microbatch": 2 * self.num_tokens},
                "data": {"max_prompt_tokens": PROMPT},
                "rollout": options,
                "algorithm": {"minibatches_per_rollout": self.num_minibatches},
            }
        )


@dataclass
class Step:
    """CPU time of a step in each round, and the number of samples that it processed."""

    name: str
    where: Where
    num_samples: int
    num_tokens: int  # tokens of all these samples
    alone: float = 1.0
    """Samples that a rank processes per sample that it sampled, if each rank trains a complete model."""
    together: float = 1.0
    """The same if all ranks train one model (tensor 4, context 2), and so get the same micro-batches."""
    cpu_s: list[float] = field(default_factory=list[float])


@dataclass(frozen=True)
class Sizes:
    """Bytes of all samples of a round, by form."""

    replies: int  # as received from the server
    samples: int
    parcels: int
    microbatches: int


class HostPath:
    """Runs the path repeatedly, and records the time of each step. Use it in a `with` statement."""

    def __init__(self, runtime: Runtime, folder: Path, num_samples: int, num_tokens: int) -> None:
        """Make the replies, and the objects that the loop makes at its start.

        Args:
            runtime: Runtime of a job with one rank.
            folder: Folder for the run's files.
            num_samples: Samples per round; even.
            num_tokens: Tokens per sample, including the prompt.
        """
        self._shape = Rollout(num_samples, num_tokens, num_ranks=1, group_size=2, num_minibatches=1)
        self._runtime, self._config = runtime, self._shape.config(folder)
        self._params = SamplingParams(num_tokens - PROMPT, num_topk_log_probs=TOPK, capture_routes=True)
        self._generation = generation_of(NEWEST)
        self._reply = answer(self._params, type(self._generation))
        self._tokenizer = random_tokenizer(MODEL.vocab_size)
        environments = InProcess(SingleTurn)
        self._conversations = Conversations(environments, self._tokenizer, TurnLimits())
        prompt = Prompt("p", "1", "benchmark", text="?" * PROMPT)
        places = [(index, Drawn(index, prompt)) for index in range(num_samples // 2)]
        self._groups = GroupMaker(self._tokenizer, 2, PROMPT, 0, environments).begin(0, places)
        self._requests = [request for group in self._groups for request in group.requests]
        self._stack = ExitStack()
        self.steps: dict[str, Step] = {}

    def __enter__(self) -> "HostPath":
        self._url = self._stack.enter_context(answering(self._reply))
        pool = RewardPool("arithmetic", num_workers=1, timeout_s=60.0, memory_mb=0)
        self._scorer = Scorer(self._tokenizer, self._stack.enter_context(pool), True, None)
        self._logger = self._stack.enter_context(RunLogger.open(self._config, self._runtime))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def go(self) -> Sizes:
        """Process all samples from bytes to micro-batches once."""
        bodies = run_loop(self._received())
        own = self._credited(self._scored(self._with_texts(self._decoded(bodies))))
        self._timed(
            "sample files (rank 0)", "exposed", lambda: self._logger.write_samples(0, own, self._tokenizer)
        )
        samples = [sample for group in own for sample in group.samples]
        moved = self._planned()
        parcel_bytes = self._exchanged(samples, moved)
        steps, report = self._timed(
            "weights, packing",
            "exposed",
            lambda: gradient_steps(
                own, 0, self._config, DataParallel((0,), self._runtime, COST), routing=MODEL.routing
            ),
            together=Rollout.num_ranks,
        )
        self._timed("metrics of batches", "exposed", lambda: self._logger.describe_batches(report))
        self._timed(
            "metrics of age",
            "exposed",
            lambda: self._logger.begin_row(SampledRollout(tuple(steps), {}), 0),
            together=Rollout.num_ranks,
        )
        self._sliced(steps)
        num_bytes = len(self._reply) * len(bodies), bytes_of_samples(samples), parcel_bytes
        return Sizes(*num_bytes, sum(map(bytes_of, steps)))

    def _timed(
        self,
        name: str,
        where: Where,
        work: Callable[[], T],
        *,
        alone: float = 1.0,
        together: float = 1.0,
        times: int = 1,
    ) -> T:
        started = time.process_time()
        done = work()
        self._add(name, where, time.process_time() - started, alone=alone, together=together, times=times)
        return done

    def _add(
        self,
        name: str,
        where: Where,
        cpu_s: float,
        *,
        alone: float = 1.0,
        together: float = 1.0,
        times: int = 1,
    ) -> None:
        """Record the time of a step on `times` the number of samples of a round."""
        count = times * self._shape.num_samples
        step = Step(name, where, count, count * self._shape.num_tokens, alone, together)
        self.steps.setdefault(name, step).cpu_s.append(cpu_s)

    async def _received(self) -> list[bytes]:
        body = self._generation.generate_body(REQUEST, self._params, MODEL)
        async with SglangClient(self._url) as client:
            started = time.thread_time()  # CPU time of this thread: the server runs in another one
            bodies = [await client.generate(body) for _ in self._requests]
            self._add("receive replies (HTTP)", "generation", time.thread_time() - started)
        return bodies

    def _decoded(self, bodies: Sequence[bytes]) -> list[Completion]:
        async def read() -> list[Completion]:
            read_reply = self._generation.read_reply
            answers = (read_reply(body, REQUEST, self._params, MODEL) for body in bodies)
            return await all_of(answers)

        before = children_cpu_s()
        read_here = self._timed("memory to and from it", "generation", lambda: run_loop(read()))
        self._add("decode replies", "decoding process", children_cpu_s() - before)
        pairs = zip(read_here, self._requests, strict=True)
        return [replace(completion, request_id=request.id) for completion, request in pairs]

    def _with_texts(self, completions: Sequence[Completion]) -> list[Completion]:
        answers = {completion.request_id: completion for completion in completions}

        async def ask(request: Request, params: SamplingParams) -> Completion:
            return answers[request.id]

        async def converse() -> list[Completion]:
            conversations = (self._conversations.run(each, self._params, ask) for each in self._requests)
            return await all_of(conversations)

        return self._timed("text of responses", "generation", lambda: run_loop(converse()))

    def _scored(self, completions: Sequence[Completion]) -> list[PromptGroup]:
        async def score_one(request: Request, completion: Completion) -> Sample | Fault:
            assert request.prompt is not None, "requests of groups name their prompts"
            sample = sample_of(request, completion)
            return await self._scorer.score(request.prompt, sample, completion.episode)

        async def score() -> list[Sample]:
            found = await all_of(map(score_one, self._requests, completions))
            faults = [each for each in found if not isinstance(each, Sample)]
            assert not faults, faults[0]
            return [each for each in found if isinstance(each, Sample)]

        samples = self._timed("checks, reward's worker", "generation", lambda: run_loop(score()))
        routing = MODEL.routing
        assert routing is not None, "a model with experts"
        self._timed(
            "validate routes", "generation", lambda: [validate_routes(sample, routing) for sample in samples]
        )
        rest, scored, groups = list(completions), list(samples), list[PromptGroup]()
        for group in self._groups:
            size = len(group.requests)
            groups.append(replace(group, completions=[*rest[:size]], scored=[*scored[:size]]))
            del rest[:size], scored[:size]
        return groups

    def _credited(self, groups: Sequence[PromptGroup]) -> list[SampleGroup]:
        """Return the groups with advantages. Counts and metrics run on the number of samples of a rank."""
        times = max(Rollout().samples_per_rank // self._shape.num_samples, 1)
        kept: dict[str, Any] = dict(num_too_long=0, weight_version=0)
        many, counts = self._timed(
            "counts", "exposed", lambda: usable_groups([*groups] * times, [], 2, **kept), times=times
        )
        self._timed(
            "metrics of samples", "exposed", lambda: self._logger.describe_rollout(many, counts), times=times
        )
        many = self._timed("advantages", "exposed", lambda: with_advantages(many, False), times=times)
        return many[: len(groups)]

    def _planned(self) -> float:
        """Plan a complete rollout with responses of mixed lengths. Return the share of the tokens that move."""
        whole, chance = Rollout(), random.Random(0)
        size, per_rank = whole.num_samples // whole.num_minibatches, whole.samples_per_rank
        per_rank //= whole.num_minibatches
        homes = [rank for rank in range(whole.num_ranks) for _ in range(per_rank)]
        held, moved, total = [0] * whole.num_ranks, 0, 0
        started = time.process_time()
        for _ in range(whole.num_minibatches):
            lengths = [chance.randint(PROMPT, 2 * whole.num_tokens - PROMPT) for _ in range(size)]
            plan = plan_minibatch(lengths, homes, held, max_tokens=2 * whole.num_tokens, cost=COST)
            held = [before + added for before, added in zip(held, plan.tokens, strict=True)]
            places = zip(lengths, plan.group_of_sample, homes, strict=True)
            moved += sum(length for length, group, home in places if group != home)
            total += sum(lengths)
        cpu_s, ranks = time.process_time() - started, whole.num_ranks
        step = Step("plan of mini-batches", "exposed", whole.num_samples, total, ranks, ranks)
        self.steps.setdefault(step.name, step).cpu_s.append(cpu_s)
        return moved / total

    def _exchanged(self, samples: list[Sample], moved: float) -> int:
        """Send all samples to this rank itself. Return the bytes of the parcel."""
        others = Rollout.num_ranks - 1
        parcel = self._timed("exchange: encode", "exposed", lambda: encode(samples), alone=moved)
        num_bytes, parcels = parcel.nbytes, [parcel]
        del parcel
        (came,) = self._timed(
            "exchange: send, receive",
            "exposed",
            lambda: self._runtime.exchange(parcels),
            alone=moved,
            together=others,
        )
        self._timed("exchange: decode", "exposed", lambda: decode(came), alone=moved, together=others)
        return num_bytes

    def _sliced(self, steps: Sequence[TrainBatch]) -> None:
        batches = [microbatch for step in steps for microbatch in step.microbatches]
        for context, alone, together in ((1, 1, 0), (2, 0, Rollout.num_ranks)):
            self._timed(
                f"tokens of a rank, context {context}",
                "exposed",
                lambda context=context: [token_slice(m, 0, context, tensor=1).local(m) for m in batches],
                alone=alone,
                together=together,
            )


def children_cpu_s() -> float:
    """Return the CPU seconds of this process's live children. Linux counts them in hundredths."""
    return sum(
        (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK") for values in _children().values()
    )


def children_peak_bytes() -> int:
    """Return the peak resident memory of the largest live child of this process."""
    lines = [line for pid in _children() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return max((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), default=0)


def _children() -> dict[int, list[str]]:
    """Return the fields of /proc/PID/stat after the name, for each live child."""
    found: dict[int, list[str]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            values = stat.read_text().rpartition(")")[2].split()
            if int(values[1]) == os.getpid():
                found[int(stat.parent.name)] = values
    return found

"""The scenarios that show which settings reach which consumer: tiny runs, two-process layouts, and servers.

Every number of a scenario differs from its default and from the other numbers in its section, so a setting that
is forgotten or swapped with its neighbour is seen.
"""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron_dppo.config import Config
from megatron_dppo.runtime.files import read_jsonl, write_jsonl
from megatron_dppo.runtime.process import Runtime, stop
from tests.support.sanity_run import make_task
from tests.support.tiny import write_model

OWN = "tests.distributed.seam_rewards"


@dataclass(frozen=True)
class Scenario:
    """Something real that is done with a config."""

    tables: Callable[[Path], dict[str, Any]]
    play: Callable[[Config, Runtime], None]
    world_size: int = 1


def make_prompts(folder: Path) -> Path:
    """The sanity task, its rows under other names of columns; and a model of four layers."""
    make_task(folder)
    write_model(folder / "deep", num_hidden_layers=4)
    shutil.copytree(folder / "model", folder / "before")
    for name in ("prompts", "held_out"):
        rows = [row for _, row in read_jsonl(folder / f"{name}.jsonl")]
        renamed = [
            {"question": row["prompt"], "reference": row["answer"], "id": row["id"]} for row in rows[:24]
        ]
        write_jsonl(folder / f"{name}.jsonl", renamed)
    return folder


def _tables(task: Path, name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """What all scenarios have in common, and a scenario's own."""
    common: dict[str, dict[str, Any]] = {
        "run": {"folder": task / name},
        "model": {"load": task / "model", "dtype": "float32"},
        "data": {
            "prompts": task / "prompts.jsonl",
            "prompt_column": "question",
            "answer_column": "reference",
            "reward": "arithmetic",
            "max_prompt_tokens": 17,
        },
        "rollout": {"prompts_per_rollout": 6, "samples_per_prompt": 3, "max_response_tokens": 9},
        "algorithm": {"minibatches_per_rollout": 3},
        "optimizer": {"lr": 1e-3},
        "parallel": {"max_tokens_per_microbatch": 90},
    }
    names = common.keys() | sections.keys()
    return {section: common.get(section, {}) | sections.get(section, {}) for section in names}


def whole(task: Path) -> dict[str, Any]:
    """A run with Top-K masks and R3, measured and evaluated in every way, a number of rollouts that tells."""
    return _tables(
        task,
        "whole",
        run={"seed": 11, "num_rollouts": 7, "timeout_s": 700.0, "peer_timeout_s": 71.0},
        model={"layer_spec": "torch"},
        parallel={"share_prefixes": False},
        data={
            "shuffle": False,
            "reward": {"tests.faults.rewards:digits": 0.75, f"{OWN}:heard": 0.25},
            "overlong_buffer_tokens": 4,
            "overlong_penalty": 0.5,
            "reward_workers": 2,
            "reward_timeout_s": 330.0,
            "reward_if_timed_out": -0.5,
            "reward_retries": 3,
            "reward_memory_mb": 1500,
            "worker_environment": ["PATH", "HOME"],
        },
        rollout={
            "temperature": 1.25,
            "num_topk_log_probs": 7,
            "routing_replay": "replay",
            "max_dropped_fraction": 0.3,
            "max_data_gib": 3.5,
            "lag": 2,
            "max_refills": 8,
            "release_trainer": True,
            "transformers": {"weights": "float32", "batch_size": 8},
        },
        algorithm={
            "preset": "dppo_topk_tv",
            "delta_low": 0.11,
            "delta_high": 0.22,
            "ratio_cap": 3.5,
            "top_k": 5,
            "include_other": False,
            "sampled_token": "replace",
            "entropy_coef": 0.01,
            "aggregation": "seq_mean_token_sum_norm",
            "normalize_advantage_std": True,
            "minibatches_per_rollout": 2,
            "epochs_per_rollout": 3,
            "logits_chunk_bytes": 4096,
            "logits_dtype": "float32",
        },
        optimizer={
            "min_lr": 1e-4,
            "schedule": "linear",
            "warmup_steps": 5,
            "weight_decay": 0.02,
            "beta1": 0.8,
            "beta2": 0.97,
            "eps": 1e-6,
            "clip_grad": 0.7,
            "distributed": False,
            "offload": True,
        },
        checkpoint={
            "every": 4,
            "every_steps": 16,
            "resume": False,
            "asynchronous": False,
            "keep_last": 7,
            "keep_every": 5,
            "keep_best": 6,
            "best_metric": "rollout/num_response_tokens",
            "best_is": "lowest",
            "reserve_gib": 0.25,
        },
        evaluation={
            "every": 6,
            "samples_per_prompt": 4,
            "temperature": 0.6,
            "top_p": 0.9,
            "max_response_tokens": 7,
            "pass_at": [1, 2],
            "sets": {
                "far": {"prompts": task / "held_out.jsonl"},
                "near": {
                    "prompts": task / "prompts.jsonl",
                    "samples_per_prompt": 2,
                    "temperature": 0.5,
                    "top_p": 0.8,
                    "max_response_tokens": 6,
                    "reward": f"{OWN}:heard",
                },
            },
        },
        tracking={
            "prometheus_address": "localhost:9",
            "backends": ["tensorboard"],
            "samples_every": 2,
            "batches_every": 3,
            "paired_routing_every": 5,
            "mismatch_share": 0.5,
            "alarms": "off",
            "clipped_tokens_every": 4,
            "max_roll_backs": 9,
            "shadow_presets": ["grpo", "dppo_binary_tv"],
            "shadow_options": {"dppo_binary_tv": {"delta": 0.07}},
        },
    )


def resumed(task: Path) -> dict[str, Any]:
    """A run of adapters, stopped and resumed: warm-up and cosine, groups that are always refilled."""
    return _tables(
        task,
        "resumed",
        run={"num_rollouts": 3},
        lora={"rank": 3, "alpha": 5, "targets": ["q_proj", "v_proj"]},
        data={"reward_values": [0.25, 1.75]},
        rollout={
            "generate": f"{OWN}:plainly",
            "refill_zero_variance": True,
            "max_refills": 2,
            "routing_replay": "measure",
        },
        algorithm={
            "preset": "relax_low",
            "eps_low": 0.13,
            "eps_high": 0.31,
            "alpha": 0.07,
        },
        optimizer={"min_lr": 1e-4, "schedule": "cosine", "warmup_steps": 4},
        megatron={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        tracking={"shadow": False},
    )


def turns(task: Path) -> dict[str, Any]:
    """One rollout of conversations: one threshold for both signs, R3 for the anchor, a reference, logits."""
    return _tables(
        task,
        "turns",
        run={"num_rollouts": 1},
        data={"reward": f"{OWN}:heard"},
        rollout={
            "environment": f"{OWN}:Nodding",
            "max_turns": 2,
            "thinking": "template",
            "routing_replay": "replay",
            "max_turn_tokens": 4,
            "temperature": 1.5,
            "max_response_tokens": 12,
        },
        algorithm={
            "preset": "dppo_binary_kl",
            "delta": 0.17,
            "anchor": "recomputed",
            "ref_kl_coef": 0.03,
            "ref_kl": "k1",
            "loss_from": "logits",
        },
        model={"reference": task / "before"},
        tracking={"samples_every": 1},
    )


def agents(task: Path) -> dict[str, Any]:
    """An agent with every setting of its own: nothing is run."""
    agent = {
        "harness": "tests.support.harnesses:adding",
        "train": "all",
        "thinking": "template",
        "renderer": "default",
        "episode_timeout_s": 310.0,
        "call_timeout_s": 170.0,
        "max_calls": 5,
    }
    return _tables(task, "agents", rollout={"agent": agent})


def skipped(task: Path) -> dict[str, Any]:
    """A run that stops at the second of three gradient steps; two threads make it slow, so it is short."""
    return _tables(
        task, "skipped", run={"num_rollouts": 1, "num_threads": 2}, optimizer={"max_skipped_steps": 2}
    )


def served(task: Path) -> dict[str, Any]:
    """Servers that the run starts itself."""
    return _tables(
        task,
        "served",
        run={"seed": 12},
        rollout={
            "engine": "sglang",
            "sglang": {
                "start_timeout_s": 41.0,
                "max_restarts": 6,
                "request_timeout_s": 42.0,
                "max_attempts": 2,
                "max_concurrent_requests": 7,
                "num_own_servers": 3,
                "weight_sync": "disk",
                "sync_bucket_bytes": 4096,
                "sync_timeout_s": 43.0,
                "probe_every": 5,
                "colocated": True,
            },
        },
        sglang={"python": task / "venv" / "bin" / "python", "device": "cpu", "max_running_requests": 9},
    )


def split(**sizes: Any) -> Callable[[Path], dict[str, Any]]:
    """A layout of two processes, and a model whose layers go into four chunks."""
    return lambda task: _tables(task, "split", model={"load": task / "deep"}, parallel=sizes)


def train(config: Config, runtime: Runtime) -> None:
    """`megatron-dppo train`, within this process."""
    from megatron.core import parallel_state

    from megatron_dppo.train import main

    stop()  # main joins the job itself
    if parallel_state.model_parallel_is_initialized():  # of a run before, in the same process
        parallel_state.destroy_model_parallel()
    main(config)


def train_stop_and_resume(config: Config, runtime: Runtime) -> None:
    """Asked to stop in the middle of the second rollout, and started again."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.run.preemption import Preempted

    take, count = Actor.train_step, 0

    def take_and_ask(self: Actor, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, *args, **options)

    with mock.patch.object(Actor, "train_step", take_and_ask):
        with pytest.raises(Preempted):
            train(config, runtime)
        assert count == 5
        train(config, runtime)


def build_actor(config: Config, runtime: Runtime) -> None:
    """The trained model in its layout."""
    from megatron_dppo.actor.actor import Actor

    Actor(config, runtime)


def skip_every_step(config: Config, runtime: Runtime) -> None:
    """A run whose gradients are never finite."""
    from megatron_dppo.actor import actor
    from megatron_dppo.errors import TrainingError

    faulty = mock.patch.object(actor, "bad_gradients", lambda chunks: ["injected"])
    with faulty, pytest.raises(TrainingError, match=r"optimizer\.max_skipped_steps"):
        train(config, runtime)


class _Owner:
    """In the place of a trainer: weights of the model that servers load."""

    pipeline_place = (0, 1, True)

    def __init__(self, folder: Path) -> None:
        from megatron_dppo.checkpoints.hf_folder import HFWeights

        weights = HFWeights(folder)
        self._weights = {name: weights.tensor(name) for name in weights.shapes()}

    def weights(self, **_: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights.items())

    def describe_weights(self, **_: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.to("meta") for name, tensor in self._weights.items()}

    def log_probs(self, sequences: Any) -> list[torch.Tensor]:
        raise AssertionError("nothing is pushed")


def open_episode(config: Config, runtime: Runtime) -> None:
    """Begin an episode whose harness is not run."""
    from megatron_dppo.agents.agents import Agents
    from megatron_dppo.engines.base import Request, SamplingParams
    from megatron_dppo.runtime.concurrency import run_loop
    from megatron_dppo.types import Prompt
    from tests.support.word_tokenizers import TOKENIZER

    request = Request("rollout0/a/0+0", (3, 4), (0, 0, 0), prompt=Prompt("a", "", "test", text="1"))
    agents = Agents(config.rollout, config.data)
    with closing(agents), mock.patch.object(Agents, "_wait", return_value="not run"):
        completion = run_loop(agents.converse(TOKENIZER)(request, SamplingParams(2), mock.Mock()))
    assert completion.episode is not None and completion.episode.fault is not None


def serve(config: Config, runtime: Runtime) -> None:
    """Everything that stands before servers: their commands, an engine that asks them once, each transport.

    Only the servers are not real: SGLang is not installed where this runs.
    """
    from megatron_dppo.engines.base import Request, SamplingParams
    from megatron_dppo.engines.sglang.server import own_servers
    from megatron_dppo.engines.weight_sync.factory import build_sync, build_transport, release_servers
    from megatron_dppo.engines.weight_sync.fleet import RunServers
    from megatron_dppo.rollout.rollouts import build_engine

    with _servers() as stand_in, own_servers(config, runtime):
        engine: Any = build_engine(config, config.model.load, runtime.device)
        engine.generate([Request("rollout0/a/0+0", (3, 4), (0, 0, 0))], SamplingParams(2))
        assert stand_in.num_asked
        owner = cast(Any, _Owner(config.model.load))
        with mock.patch.object(RunServers, "release"):  # there is nothing to release
            release_servers(config, runtime)
        build_sync(config, owner, engine, runtime)
        for way in ("distributed", "tensor"):
            options = config.rollout.sglang.model_copy(update={"weight_sync": way})
            rollout = config.rollout.model_copy(update={"sglang": options})
            build_transport(config.model_copy(update={"rollout": rollout}), owner, runtime)


@contextmanager
def _servers() -> Iterator[Any]:
    """Start one stand-in server for each server that the run starts."""
    from megatron_dppo.engines.sglang import server
    from megatron_dppo.engines.sglang.options import shipped_options
    from megatron_dppo.engines.sglang.records import ServerRecord
    from tests.support.sglang_stand_in import StandIn

    def start(self: server.Server, timeout_s: float, ended: threading.Event | None = None) -> None:
        record = ServerRecord(self.record.stem, stand_in.url, "here", 1, "0.5.23", "now", 1)
        write_jsonl(self.record, [asdict(record)])

    with StandIn().running() as stand_in, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.Server, "start", start)
        patch.setattr(server.Server, "status", lambda self: None)
        patch.setattr(server.Server, "stop", lambda self, grace_s=0.0: None)
        patch.setattr(server, "read_options", lambda python: shipped_options("0.5.23"))
        patch.setattr(server, "installed_version", lambda python: "0.5.23")
        yield stand_in


SCENARIOS = {
    "whole": Scenario(whole, train),
    "resumed": Scenario(resumed, train_stop_and_resume),
    "turns": Scenario(turns, train),
    "agents": Scenario(agents, open_episode),
    "skipped": Scenario(skipped, skip_every_step),
    "served": Scenario(served, serve),
    "experts": Scenario(split(tensor=2, expert=2, expert_tensor=1), build_actor, world_size=2),
    "stages": Scenario(split(pipeline=2, virtual_pipeline=2), build_actor, world_size=2),
    "context": Scenario(
        split(context=2, overlap_grad_reduce=True, overlap_param_gather=True), build_actor, world_size=2
    ),
}

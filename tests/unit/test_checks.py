"""Every rule has a config that breaks it, and only that rule finds the fault."""

import fcntl
import functools
import importlib.util
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import megatron_dppo
from megatron_dppo.algorithms import PRESETS
from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.checkpoints.block_fp8 import BlockFP8
from megatron_dppo.checkpoints.checkpoint_folder import sums_of, write_sums
from megatron_dppo.checks import (
    AT_ONCE,
    RULES,
    check,
    folder_remarks,
    gather_facts,
    megatron_rules,
    model_facts,
    not_checked,
    period_remarks,
    problems_of,
    remarks,
    require_evaluable,
    require_valid,
    stop_remarks,
)
from megatron_dppo.checks.facts import TRAINING, Need, prompt_files, section_of
from megatron_dppo.checks.run_rules import checkpoint_bytes
from megatron_dppo.cli import app
from megatron_dppo.config import Config, dump_config, load_config
from megatron_dppo.config.sections import is_due
from megatron_dppo.data.prompts.survey import FaultyRows
from megatron_dppo.engines.sglang import options
from megatron_dppo.errors import ConfigError
from megatron_dppo.rollout.evaluation import evaluation_sets
from megatron_dppo.run.state import TrainingState
from megatron_dppo.run_folder.lock import LOCK
from megatron_dppo.run_folder.trackers import WEBHOOK
from megatron_dppo.runtime.process import Runtime
from tests.support.refusals import refused
from tests.support.tiny_families import config_of
from tests.unit.test_architectures import LLAMA3

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


MEGATRON = {
    "moe_z_loss_coeff": ["float", "none"],
    "moe_aux_loss_coeff": ["float", "list"],
    "moe_router_load_balancing_type": ["str", "list"],
    "moe_router_bias_update_rate": ["float"],
    "moe_router_fusion": ["bool"],
    "moe_permute_fusion": ["bool"],
    "moe_token_dispatcher_type": ["str"],
    "moe_flex_dispatcher_backend": ["str"],
    "recompute_granularity": ['"full"', '"selective"', "none"],
}
_MESSAGE = {"role": "user", "content": "1"}


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n")


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of a few words, whose last id lies beyond the model's vocabulary."""
    words = {word: number for number, word in enumerate(["1", "2", "+", "=", "\\boxed", "Answer:", "?"])}
    tokenizer = Tokenizer(models.WordLevel({**words, "beyond": 40}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


# Megatron's objections to a config take seconds of another process: once for equal configs.
_last_line_of = functools.cache(megatron_rules._last_line)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_file: Path) -> Path:
    """A current directory with a model, prompts for training and evaluation, and its own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(megatron_rules, "_last_line", _last_line_of)
    monkeypatch.setattr(megatron_rules, "_read_fields", lambda: MEGATRON)
    monkeypatch.setattr(options, "trainer_nccl", lambda: {"NCCL": "2.29.7"})  # of a torch for GPUs
    _write_json(Path("model/config.json"), MODEL)
    Path("model/model.safetensors").touch()
    shutil.copy(tokenizer_file, "model/tokenizer.json")
    _write_json(Path("model/tokenizer_config.json"), {"tokenizer_class": "PreTrainedTokenizerFast"})
    _write_json(Path("prompts.jsonl"), {"prompt": "1 + 1 =", "answer": "2"})
    _write_json(Path("held_out.jsonl"), {"prompt": "1 + 2 =", "answer": "3"})
    return tmp_path


def _config(changes: Mapping[str, Any]) -> Config:
    """A valid config with some keys changed."""
    valid: dict[str, Any] = {
        "data.reward": "arithmetic",
        "data.max_prompt_tokens": 16,
        "rollout.max_response_tokens": 32,
        "evaluation.sets": {"held_out": {"prompts": "held_out.jsonl"}},
        "megatron.moe_permute_fusion": False,
    }
    tables: dict[str, dict[str, Any]] = {}
    for key, value in {**valid, **changes}.items():
        section, name = key.split(".")
        tables.setdefault(section, {})[name] = value
    return Config.model_validate(tables)


def _nothing() -> None: ...


@dataclass(frozen=True)
class Example:
    """A config that breaks one rule.

    Attributes:
        where: Key that the problem must name.
        changes: Keys of the valid config to change.
        on_disk: Spoils a file first.
        world_size: Processes.
        also: Rules that this config cannot help breaking as well.
    """

    where: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    on_disk: Callable[[], object] = _nothing
    world_size: int = 1
    also: frozenset[str] = frozenset()


def _model(**changes: Any) -> Callable[[], None]:
    return lambda: _write_json(Path("model/config.json"), {**MODEL, **changes})


def _gpt_oss(**changes: Any) -> Callable[[], None]:
    own = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "head_dim": 16}
    content = {key: value for key, value in MODEL.items() if key != "rope_parameters"}
    return lambda: _write_json(Path("model/config.json"), {**content, **own, **changes})


def _dense(architecture: str, **changes: Any) -> Callable[[], None]:
    experts = {"moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"}
    content = {key: value for key, value in MODEL.items() if key not in experts}
    return lambda: _write_json(
        Path("model/config.json"), {**content, "architectures": [architecture], **changes}
    )


def _blocks(
    changes: Mapping[str, Any] | None = None, *, heads: int = 8, ignored: Sequence[str] = ()
) -> Callable[[], None]:
    """A model whose linears have whole blocks, and the folder fp8 with its quantised form, changed."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 16}
    own = {**MODEL, **sizes, "moe_intermediate_size": 128}
    form = BlockFP8(tuple(ignored)).described()

    def write() -> None:
        _write_json(Path("model/config.json"), own)
        _write_json(Path("fp8/config.json"), {**own, **(changes or {}), "quantization_config": form})

    return write


def _tokenizer(**content: Any) -> Callable[[], None]:
    return lambda: _write_json(Path("model/tokenizer_config.json"), content)


def _no_tokenizer() -> None:
    for file in Path("model").glob("tokenizer*"):
        file.unlink()


def _named_in_config() -> None:
    """The tokenizer's class, in config.json alone."""
    Path("model/tokenizer_config.json").unlink()
    _model(tokenizer_class="AutoProcessor")()


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in MODEL.items() if name != key}


def _checkpoint(config: str = "optimizer.lr = 1e-6", prompts_digest: str = "") -> None:
    """What a run left."""
    content = {"state": {"rollout": 2}, "prompts_digest": prompts_digest, "config": config}
    checkpoint = Path("runs/run/checkpoints/step_00000008")
    _write_json(checkpoint / "state.json", content)
    write_sums(checkpoint, sums_of([checkpoint / "state.json"], checkpoint))


def _checkpoint_in_other_prompts() -> None:
    _checkpoint(dump_config(_config({})), prompts_digest="0" * 32)


def _write(name: str, text: str) -> None:
    Path(name).write_text(text)


def _held() -> None:
    """A run folder that a live process holds: here this one, by another descriptor."""
    Path("runs/run").mkdir(parents=True)
    stream = Path("runs/run", LOCK).open("w")  # noqa: SIM115 - the lock ends with it
    fcntl.flock(stream, fcntl.LOCK_EX)
    stream.write(json.dumps({"host": socket.gethostname(), "pid": 7, "beat": 0}))
    stream.flush()
    _HELD.append(stream)


_HELD: list[Any] = []


def _prompts(*rows: object, name: str = "prompts.jsonl") -> Callable[[], None]:
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    return partial(_write, name, text)


def _asking(words: str, **columns: str) -> dict[str, str]:
    return {"prompt": f"1 + 1 = {words}", "answer": "2", **columns}


def _module(name: str, text: str) -> Callable[[], None]:
    """A module of the working directory, which is where workers find it."""
    return partial(_write, f"{name}.py", text)


def _among_models() -> None:
    shutil.copytree("model", "all/qwen3")


def _full_disk() -> None:
    """A model too large for any disk."""
    _model(vocab_size=10**9, hidden_size=1 << 20)()


def _small_host() -> None:
    """Such a model in a job, which a launcher started on this host."""
    _full_disk()
    os.environ["LOCAL_WORLD_SIZE"] = "1"


_CHATS = frozenset({"agent"})  # the tokenizer has no chat template
_AHEAD = {"rollout.engine": "sglang", "rollout.max_staleness": 1}


def _sglang(version: str = "1.2.3", nccl: str = "") -> None:
    """An interpreter whose SGLang takes one argument, and whose torch has this NCCL."""
    arguments = {"tp_size": {"flag": "--tp-size", "kind": "one", "type": "int", "choices": None}}
    python = Path("env/python")
    python.parent.mkdir()
    python.write_text(
        f"#!/bin/sh\ncase \"$4\" in *ServerArgs*) echo '{json.dumps(arguments)}';; *nccl*) echo {nccl};; "
        f"*) echo {version};; esac\n"
    )
    python.chmod(0o755)


_SERVED = {"rollout.engine": "sglang"}
_AGENT = {"harness": "json:loads"}
_COLOCATED = _SERVED | {"rollout.sglang": {"colocated": True, "weight_sync": "tensor"}}
_FP8 = {**_SERVED, "sglang.model_path": "fp8"}
_ROUTES_OF_THE_ANCHOR = {"algorithm.preset": "minirl", "algorithm.replay_recomputed_routes": True}
_ROUTED = {**_SERVED, "rollout.routing_replay": "replay"}
_SIGMOID: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_PUBLISHED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def _sigmoid(architecture: str, **changes: Any) -> Callable[[], None]:
    return _model(architectures=[architecture], **{**_SIGMOID, **changes})


def _hybrid() -> None:
    """A model with linear attention in its first layer."""
    sizes = {"full_attention_interval": 2, "shared_expert_intermediate_size": 16}
    _model(architectures=["Qwen3NextForCausalLM"], **sizes)()


def _mixtral(version: str, **changes: Any) -> None:
    _model(architectures=["MixtralForCausalLM"], num_local_experts=8, **changes)()
    _sglang(version)


_KL = {"algorithm.ref_kl_coef": 0.04, "model.reference": "before"}


def _reference(
    changes: dict[str, Any], weights: str = "model.safetensors", folder: str = "before"
) -> Callable[[], None]:
    def write() -> None:
        _write_json(Path(folder) / "config.json", {**MODEL, **changes})
        (Path(folder) / weights).touch()

    return write


def _sets(**sets: dict[str, Any]) -> dict[str, Any]:
    return {"evaluation.sets": {name: {"prompts": "held_out.jsonl"} | own for name, own in sets.items()}}


FLEX = {
    "megatron.moe_token_dispatcher_type": "flex",
    "megatron.moe_permute_fusion": True,
    "parallel.expert": 2,
    "model.dtype": "bfloat16",
}
TOPK = {"algorithm.preset": "dppo_topk_kl", "rollout.num_topk_log_probs": 20}
EXAMPLES: dict[str, list[Example]] = {
    "layer_spec": [Example("model.layer_spec", {"model.layer_spec": "transformer_engine"})],
    "megatron_flex": [
        Example(
            "megatron.moe_token_dispatcher_type",
            FLEX | changes,
            on_disk=on_disk,
            world_size=2,
            also=frozenset({"megatron_flex_library"}),
        )
        for changes, on_disk in (
            ({"parallel.expert": 1}, _nothing),
            ({"model.dtype": "float32"}, _nothing),
            ({"megatron.moe_permute_fusion": False}, _nothing),
            ({"megatron.moe_flex_dispatcher_backend": "hybridep"}, _nothing),
            ({"parallel.expert": 1, "parallel.tensor": 2}, _dense("Qwen3ForCausalLM")),
        )
    ],
    "megatron_flex_library": [Example("megatron.moe_token_dispatcher_type", FLEX, world_size=2)],
    "layer_spec_limits": [
        Example(
            where,
            {"model.layer_spec": "transformer_engine"} | changes,
            world_size=world_size,
            also=frozenset({"layer_spec"}),
        )
        for where, changes, world_size in (
            ("lora.rank", {"lora.rank": 8}, 1),
            ("parallel.context", {"parallel.context": 2}, 2),
            ("parallel.share_prefixes", {"parallel.share_prefixes": True}, 1),
        )
    ]
    + [
        Example(
            "model.layer_spec",
            {"model.layer_spec": "transformer_engine"},
            on_disk=on_disk,
            also=frozenset({"layer_spec"}),
        )
        for on_disk in (_gpt_oss(), _hybrid)
    ],
    "model_folder": [
        Example("model.load", {"model.load": "elsewhere"}),
        Example("model.load", on_disk=lambda: Path("model/config.json").unlink()),
        Example("model.load", on_disk=lambda: Path("model/config.json").write_text("{")),
    ],
    "model_architecture": [
        Example("model.load", on_disk=_model(architectures=["GPT2LMHeadModel"])),
        Example("model.load", on_disk=_model(architectures=None)),
    ],
    "model_sizes": [Example("model.load", on_disk=_model(vocab_size=None))],
    "model_variant": [
        Example("model.load", on_disk=_model(norm_topk_prob=False)),
        Example(
            "model.load", on_disk=lambda: _write_json(Path("model/config.json"), _without("norm_topk_prob"))
        ),
        Example("model.load", on_disk=_model(attention_bias=True)),
        Example("model.load", on_disk=_model(quantization_config={"quant_method": "fp8"})),
        Example("model.load", on_disk=_model(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6})),
        Example("model.load", on_disk=_model(rope_scaling={"type": "yarn"}, rope_parameters=None)),
        Example("model.load", on_disk=_dense("Qwen3ForCausalLM", attention_bias=True)),
        Example("model.load", on_disk=_dense("Qwen2ForCausalLM", use_sliding_window=True)),
        Example("model.load", on_disk=_dense("LlamaForCausalLM", mlp_bias=True)),
    ],
    "lora_targets": [
        Example("lora.targets", {"lora.rank": 8, "lora.targets": ("q_proj", "w1")}),
        Example("lora.targets", {"lora.rank": 8, "lora.targets": ("gate",)}),
        Example("lora.targets", {"lora.rank": 8, "lora.targets": ()}),
    ],
    "lora_experts": [
        Example("lora.rank", {"lora.rank": 4}),
        Example("lora.targets", {"lora.rank": 8, "lora.targets": ("q_proj", "up_proj", "down_proj")}),
        Example("lora.targets", {"lora.rank": 8}, on_disk=_model(mlp_only_layers=[0])),
        Example("lora.targets", {"lora.rank": 8, "lora.targets": ("q_proj", "down_proj")}, on_disk=_gpt_oss()),
    ],
    "model_tokenizer": [Example("model.load", on_disk=_no_tokenizer)],
    "expert_rows": [Example("model.load", on_disk=_model(moe_intermediate_size=12))],
    "model_code": [
        Example("model.load", on_disk=_model(model_type="mine", auto_map={"AutoConfig": "mine.Config"})),
        Example("model.load", on_disk=_tokenizer(auto_map={"AutoTokenizer": [None, "mine.Tokenizer"]})),
        Example("model.load", on_disk=_tokenizer(auto_map=["mine.T", None], tokenizer_class="MineTokenizer")),
        Example("model.load", on_disk=_tokenizer(tokenizer_class="AutoProcessor")),
        Example("model.load", on_disk=_named_in_config),
        Example("model.load", on_disk=lambda: Path("model/tokenizer_config.json").write_text("{")),
    ],
    "model_weights": [
        Example("model.load", on_disk=lambda: Path("model/model.safetensors").unlink()),
        Example("model.load", on_disk=lambda: Path("model/adapter_config.json").touch()),
        Example("model.load", on_disk=lambda: Path("model/model-00001-of-00002.safetensors").touch()),
        Example("model.load", on_disk=lambda: Path("model/model.safetensors.index.json").write_text("{}")),
    ],
    "best_metric": [
        Example(
            "checkpoint.best_metric",
            {"checkpoint.keep_best": 1, "checkpoint.best_metric": "eval/held_out/avg_at_2"},
        ),
    ],
    "evaluation_names": [Example("evaluation.sets", _sets(**{"a/b": {}}))],
    "evaluation_pass_at": [
        Example("evaluation.pass_at", {"evaluation.pass_at": (1, 33)}),
        Example("evaluation.pass_at", {"evaluation.pass_at": (1, 8)} | _sets(aime={"samples_per_prompt": 4})),
    ],
    "evaluation_positions": [
        Example("evaluation.max_response_tokens", {"evaluation.max_response_tokens": 60}),
        Example("evaluation.sets.aime.max_response_tokens", _sets(aime={"max_response_tokens": 60})),
    ],
    "evaluation_reward": [
        Example("evaluation.sets.aime.reward", _sets(aime={"reward": "arithmetics"})),
        Example("evaluation.sets.aime.reward", _sets(aime={"reward": "environment"})),
    ],
    "lag": [
        Example("rollout.lag", {"rollout.lag": 4, "run.num_rollouts": 4}),
    ],
    "rollout_memory": [
        Example("rollout.max_data_gib", {"rollout.max_data_gib": 1e-4}),
        Example("rollout.max_data_gib", {"rollout.max_data_gib": 0.0013, "rollout.routing_replay": "measure"}),
        Example("rollout.max_data_gib", {"rollout.max_data_gib": 0.0013, "rollout.lag": 3}),
        Example(
            "rollout.max_data_gib",
            _AHEAD | {"rollout.over_sampling": 2.0, "rollout.max_data_gib": 0.0017},
        ),
    ],
    "layout": [
        Example(
            "parallel",
            {"parallel.tensor": 2, "parallel.expert": 2, "parallel.expert_tensor": 4},
            world_size=8,
        ),
        Example("parallel.expert", {"parallel.expert": 3, "rollout.prompts_per_rollout": 24}, world_size=3),
    ],
    "sequence_positions": [Example("rollout.max_response_tokens", {"rollout.max_response_tokens": 60})],
    "sequence_budget": [
        Example("parallel.max_tokens_per_microbatch", {"parallel.max_tokens_per_microbatch": 40})
    ],
    "shared_prefixes": [
        Example(
            "parallel.share_prefixes",
            {"parallel.share_prefixes": True, "parallel.context": 2},
            world_size=2,
        ),
        Example("parallel.share_prefixes", {"parallel.share_prefixes": True}, on_disk=_hybrid),
    ],
    "prompts_file": [
        Example("data.prompts", {"data.prompts": "none.jsonl"}),
        Example("data.prompts", {"data.prompts": "prompts.csv"}),
        Example("data.prompts", on_disk=lambda: Path("prompts.jsonl").write_text("{")),
        Example("data.prompts[1]", {"data.prompts": ["prompts.jsonl", "none.jsonl"]}),
        Example("evaluation.sets.held_out.prompts", _sets(held_out={"prompts": "none.jsonl"})),
        Example("evaluation.sets.b.prompts[0]", _sets(b={"prompts": ["none.jsonl", "prompts.jsonl"]})),
        Example("evaluation.sets.held_out.prompts", on_disk=lambda: Path("held_out.jsonl").write_text("")),
    ],
    "prompt_files": [
        Example("data.prompts", {"data.prompts": ["prompts.jsonl", "held_out.jsonl", "./prompts.jsonl"]}),
        Example(
            "data.prompts",
            {"data.prompts": [{"path": "prompts.jsonl", "weight": 2}, {"path": "held_out.jsonl"}]},
        ),
        Example(
            "evaluation.sets.a.prompts[1]",
            _sets(a={"prompts": ["prompts.jsonl", {"path": "held_out.jsonl", "weight": 2}]}),
        ),
    ],
    "prompt_columns": [
        Example("data.prompt_column", {"data.prompt_column": "promt"}),
        Example("data.answer_column", {"data.answer_column": "solution"}),
        Example("data.answer_column", on_disk=lambda: _write_json(Path("held_out.jsonl"), {"prompt": "1"})),
    ],
    "reward": [
        Example("data.reward", {"data.reward": ""}),
        Example("data.reward", {"data.reward": "environment"}),
        Example("data.reward", {"data.reward": {"environment": 1.0, "math": 1.0}}),
        Example("data.reward", {"data.reward": "arithmetics"}),
        Example("data.reward", {"data.reward": "no_such_package.rewards:score"}),
        Example("data.reward", {"data.reward": ":score"}),
        Example("data.reward", {"data.reward": "megatron_dppo.rewards:not one name"}),
        Example("data.reward", {"data.reward": {}}),
        Example("data.reward", {"data.reward": {"math": 0.0}}),
        Example("data.reward", {"data.reward": {"math": 1.0, "mathh": 0.5}}),
        Example("data.reward", {"data.reward": {"megatron_dppo.a:score": 1.0, "megatron_dppo.b:score": 1.0}}),
        Example("data.reward_values", {"data.reward_values": [1.0, -1.0]}),
        Example("data.reward_values", {"data.reward_values": [0.0, float("inf")]}),
        Example(
            "data.reward_values",
            {"data.reward": "megatron_dppo.mine:score", "data.reward_values": [-1.0, 1.0]},
        ),
        Example("data.thinking", {"data.reward": "megatron_dppo.mine:score", "data.thinking": "require"}),
    ],
    "overlong_buffer": [
        Example("data.overlong_buffer_tokens", {"data.overlong_buffer_tokens": 32}),
    ],
    "preset": [Example("algorithm.preset", {"algorithm.preset": "dppo_binary_vt"})],
    "preset_fields": [
        Example("algorithm.delta", {"algorithm.delta": -1.0}),
        Example("algorithm.eps_low", {"algorithm.eps_low": 0.2}),
        Example("algorithm.ratio_cap", {"algorithm.ratio_cap": float("nan")}),
        Example("algorithm.anchor", {**TOPK, "algorithm.anchor": "recomputed"}),
        Example("algorithm.include_other", {**TOPK, "algorithm.include_other": False}),
        Example("algorithm.delta", {"algorithm.preset": "gspo", "algorithm.delta": 0.1}),
        Example("algorithm.delta", {"algorithm.preset": "drpo", "algorithm.delta": 0.0}),
        Example("algorithm.token_kl", {"algorithm.preset": "ipo", "algorithm.token_kl": 0.1}),
        Example("algorithm.log_ratio_coef", {"algorithm.preset": "ipo", "algorithm.log_ratio_coef": -1.0}),
        Example("algorithm.ref_kl_coef", {"algorithm.ref_kl_coef": -0.04}),
        Example("algorithm.ref_kl_coef", {"algorithm.ref_kl_coef": math.inf}),
        Example("algorithm.tau_low", {"algorithm.preset": "sapo", "algorithm.tau_low": math.inf}),
        Example("algorithm.rho_low", {"algorithm.preset": "mis", "algorithm.rho_low": 1.1}),
        Example("algorithm.stale_share", {"algorithm.preset": "sat", "algorithm.stale_share": 2.0}),
        Example("algorithm.decay_low", {"algorithm.preset": "vespo", "algorithm.decay_low": 0.0}),
        Example("algorithm.ratio_cap", {"algorithm.preset": "minpro", "algorithm.ratio_cap": 3.0}),
        Example("algorithm.prefix_delta", {"algorithm.preset": "cppo", "algorithm.prefix_delta": 0.05}),
        Example("algorithm.anchor", {**TOPK, "algorithm.preset": "trm", "algorithm.anchor": "recomputed"}),
    ],
    "own_rule": [
        Example("algorithm.preset", {"algorithm.preset": "tests.support.own_rules:negative"}),
        Example("tracking.shadow_presets", {"tracking.shadow_presets": ["tests.support.own_rules:failing"]}),
    ],
    "reference_in_use": [
        Example("model.reference", {"model.reference": "model"}),
        Example("algorithm.ref_kl", {"algorithm.ref_kl": "k1", "algorithm.ref_kl_coef": 0.0}),
    ],
    "reference_model": [
        Example("model.reference", _KL),
        Example("model.reference", _KL, on_disk=_reference({}, weights="model.bin")),
        *(
            Example("model.reference", _KL, on_disk=_reference(changes))
            for changes in (
                {"architectures": ["Qwen3ForCausalLM"]},
                {"architectures": ["GPT2LMHeadModel"]},
                {"vocab_size": 48},
                {"num_hidden_layers": 1},
                {"attention_bias": True},
            )
        ),
        Example("model.reference", _KL | {"lora.rank": 8}, on_disk=_reference({}, folder="before/hf")),
    ],
    "topk_log_probs": [
        Example("rollout.num_topk_log_probs", {**TOPK, "rollout.num_topk_log_probs": 19}),
        Example("rollout.num_topk_log_probs", {**TOPK, "algorithm.top_k": 21}),
        *(
            Example("rollout.num_topk_log_probs", {"algorithm.preset": preset})
            for preset in ("cppo_topk", "trm", "dppo_topk_kl_predictive")
        ),
    ],
    "topk_vocabulary": [
        Example("algorithm.top_k", {**TOPK, "algorithm.top_k": 41}, also=frozenset({"topk_log_probs"})),
        Example("rollout.num_topk_log_probs", {"rollout.num_topk_log_probs": 41}),
    ],
    "sampling_distribution": [
        Example("rollout.top_p", {"rollout.top_p": 0.9}),
    ],
    "group_size": [Example("rollout.samples_per_prompt", {"rollout.samples_per_prompt": 1})],
    "minibatches": [
        Example("rollout.prompts_per_rollout", {"rollout.prompts_per_rollout": 63}),
        Example(
            "rollout.prompts_per_rollout",
            {"rollout.prompts_per_rollout": 4, "parallel.expert": 2},
            world_size=2,
        ),
    ],
    "replay_needs_experts": [
        Example("rollout.routing_replay", {"rollout.routing_replay": mode}, on_disk=_model(num_experts=0))
        for mode in ("measure", "replay")
    ]
    + [
        Example(
            "rollout.routing_replay",
            {"rollout.routing_replay": "replay"},
            on_disk=_dense("Qwen3ForCausalLM"),
        ),
        Example(
            "algorithm.replay_recomputed_routes", _ROUTES_OF_THE_ANCHOR, on_disk=_dense("Qwen3ForCausalLM")
        ),
    ],
    "replay_without_router_fusion": [
        Example(
            "megatron.moe_router_fusion",
            {"rollout.routing_replay": "replay", "megatron.moe_router_fusion": True},
        ),
        Example("megatron.moe_router_fusion", {**_ROUTES_OF_THE_ANCHOR, "megatron.moe_router_fusion": True}),
    ],
    "routes_of_the_anchor": [
        Example("algorithm.replay_recomputed_routes", {"algorithm.replay_recomputed_routes": True}),
        Example(
            "algorithm.replay_recomputed_routes",
            {**_ROUTES_OF_THE_ANCHOR, "algorithm.anchor": "rollout"},
        ),
        Example(
            "algorithm.replay_recomputed_routes",
            {**_ROUTES_OF_THE_ANCHOR, "rollout.routing_replay": "measure"},
        ),
    ],
    "shadow_presets": [
        Example("tracking.shadow_presets", {"tracking.shadow_presets": [name]})
        for name in ("dppo_binary_tw", "dppo_topk_kl", "minirl", "cppo_topk", "trm", "icepop", "mis")
    ],
    "open_groups": [Example("rollout.over_sampling", _AHEAD | {"rollout.over_sampling": 2.1})],
    "environment": [
        Example("rollout.environment", {"rollout.environment": "single_turns"}),
        Example("rollout.environment", {"rollout.environment": "no_such_module:Class"}),
    ],
    "agent": [
        Example("rollout.agent.harness", {"rollout.agent": {"harness": "no_such_module:function"}}),
        Example("rollout.agent.harness", {"rollout.agent": {"harness": "function"}}),
        Example("rollout.agent.command", {"rollout.agent": {"command": ["no-such-program"]}}),
        Example("rollout.agent", {"rollout.agent": _AGENT}),  # the tokenizer has no chat template
    ],
    "generate": [
        Example("rollout.generate", {"rollout.generate": "no_such_module:function"}),
        Example("rollout.generate", {"rollout.generate": "function"}),
    ],
    "finite_numbers": [
        Example(
            "optimizer.min_lr", {"optimizer.min_lr": float("inf")}, also=frozenset({"learning_rate_floor"})
        ),
        Example("rollout.temperature", {"rollout.temperature": float("inf")}),
    ],
    "learning_rate_floor": [Example("optimizer.min_lr", {"optimizer.min_lr": 1.0})],
    "warmup": [Example("optimizer.warmup_steps", {"optimizer.warmup_steps": 401})],
    "tracking_backends": [Example("tracking.backends", {"tracking.backends": ["wandb"]})],
    "megatron_names": [Example("megatron.moe_z_los_coeff", {"megatron.moe_z_los_coeff": 0.1})],
    "megatron_values": [
        Example("megatron.moe_z_loss_coeff", {"megatron.moe_z_loss_coeff": "much"}),
        Example("megatron.moe_router_fusion", {"megatron.moe_router_fusion": 1}),
    ],
    "megatron_router_losses": [
        Example("megatron.moe_aux_loss_coeff", {"megatron.moe_aux_loss_coeff": 0.01}),
        Example(
            "megatron.moe_aux_loss_coeff",
            {
                "megatron.moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
                "megatron.moe_aux_loss_coeff": [0.1, 0.01],
            },
        ),
        Example(
            "megatron.moe_router_load_balancing_type", {"megatron.moe_router_load_balancing_type": "sinkhorn"}
        ),
        Example("megatron.moe_z_loss_coeff", {"megatron.moe_z_loss_coeff": -0.1}),
        Example(
            "megatron.moe_aux_loss_coeff",
            {
                "megatron.moe_router_load_balancing_type": "seq_aux_loss",
                "megatron.moe_aux_loss_coeff": -0.01,
            },
        ),
        Example(
            "megatron.moe_z_loss_coeff", {"megatron.moe_z_loss_coeff": 0.1}, on_disk=_dense("Qwen3ForCausalLM")
        ),
    ],
    "megatron_expert_bias": [
        Example("megatron.moe_router_bias_update_rate", {"megatron.moe_router_bias_update_rate": 0.001}),
        Example(
            "megatron.moe_router_bias_update_rate",
            {"megatron.moe_router_bias_update_rate": 0.001, "lora.rank": 4, "lora.targets": ["o_proj"]},
            on_disk=_sigmoid("DeepseekV3ForCausalLM", **_PUBLISHED),
        ),
    ],
    "megatron_config": [Example("megatron", {"megatron.recompute_granularity": "full"})],
    "megatron_owned": [
        Example("megatron.num_layers", {"megatron.num_layers": 3}, also=frozenset({"megatron_names"})),
        Example("megatron.bf16", {"megatron.bf16": True}, also=frozenset({"megatron_names"})),
        Example(
            "megatron.overlap_moe_expert_parallel_comm",
            {"megatron.overlap_moe_expert_parallel_comm": True},
            also=frozenset({"megatron_names"}),
        ),
        Example(
            "megatron.mtp_loss_scaling_factor",
            {"megatron.mtp_loss_scaling_factor": 0.1},
            also=frozenset({"megatron_names"}),
        ),
    ],
    "sglang_owned": [
        Example("sglang.weight_version", {"sglang.weight_version": "7"}),
        Example("sglang.rl_on_policy_target", {"sglang.rl_on_policy_target": "fsdp"}),
    ],
    "sglang_environment": [
        Example(
            "the environment",
            {"rollout.engine": "sglang"},
            on_disk=lambda: os.environ.__setitem__("SGLANG_RETURN_ORIGINAL_LOGPROB", "1"),
        ),
        *(
            Example("the environment", _COLOCATED, on_disk=partial(os.environ.__setitem__, name, value))
            for name, value in (
                ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
                ("PYTORCH_ALLOC_CONF", "max_split_size_mb:128, expandable_segments:true"),
            )
        ),
    ],
    "sglang_model": [
        Example("model.load", _SERVED, on_disk=_model(mlp_only_layers=[1])),
        Example("model.load", _SERVED, on_disk=_sigmoid("DeepseekV3ForCausalLM")),
        Example(
            "model.load",
            _SERVED,
            on_disk=_sigmoid("Glm4MoeLiteForCausalLM", mlp_layer_types=["sparse", "dense"]),
        ),
        Example(
            "model.load",
            _SERVED,
            on_disk=_sigmoid(
                "Glm4MoeLiteForCausalLM", first_k_dense_replace=0, mlp_layer_types=["dense", "sparse"]
            ),
        ),
        Example("model.load", _SERVED, on_disk=partial(_mixtral, "0.5.23", head_dim=32)),
        Example("model.load", _SERVED, on_disk=partial(_mixtral, "0.5.23", rope_parameters=LLAMA3)),
    ],
    "sglang_nccl": [
        Example(
            "rollout.sglang.weight_sync",
            {**_SERVED, "sglang.python": "env/python"},
            on_disk=partial(_sglang, "0.5.23", "2.30.7"),
        ),
    ],
    "sglang_parts": [
        Example("sglang.pp_size", {"rollout.engine": "sglang", "sglang.pp_size": 2}),
        Example("sglang.dp_size", {"rollout.engine": "sglang", "sglang.dp_size": 2}),
        Example(
            "sglang.port",
            {"rollout.engine": "sglang", "sglang.port": 30000, "rollout.sglang": {"num_own_servers": 2}},
        ),
    ],
    "run_folder": [
        Example("run.folder", {"run.folder": ""}),
        Example("run.folder", {"run.folder": "/"}),
        Example("run.folder", {"run.folder": "prompts.jsonl"}),
        Example("run.folder", {"run.folder": "prompts.jsonl/run"}),
        Example("run.folder", {"run.folder": "/proc/run"}),
        Example("run.folder", on_disk=partial(os.symlink, "unmounted", "runs")),
        Example("run.folder", {"run.folder": "a_link"}, on_disk=partial(os.symlink, "unmounted/a", "a_link")),
    ],
    "tracking_webhook": [
        Example(WEBHOOK, on_disk=partial(os.environ.__setitem__, WEBHOOK, text))
        for text in (
            "hooks.example.com/a",
            "https:///a",
            "http://host:99999/a",
            "http://two words/a",
            "http://[::1/a",
        )
    ],
    "run_folder_models": [
        Example("run.folder", {"run.folder": "model"}),
        Example("run.folder", {"run.folder": "all"}, on_disk=_among_models),
    ],
    "run_folder_in_use": [Example("run.folder", on_disk=_held)],
    "checkpoint_disk": [Example("run.folder", on_disk=_full_disk)],
    "checkpoint_memory": [
        Example("checkpoint.asynchronous", on_disk=_small_host, also=frozenset({"checkpoint_disk"}))
    ],
    "prompt_rows": [
        Example("data.prompts", on_disk=_prompts(_asking(""), "not JSON\n")),
        Example("data.prompts", on_disk=_prompts(_asking(""), {"prompt": "1 + 1 ="})),
        Example("data.prompts", on_disk=_prompts(_asking(""), {"prompt": [_MESSAGE], "answer": "1"})),
        Example(
            "evaluation.sets.held_out.prompts",
            on_disk=_prompts(_asking(""), {"prompt": "\ud800", "answer": "1"}, name="held_out.jsonl"),
        ),
        Example("model.load", on_disk=partial(_write, "model/tokenizer.json", "{")),
    ],
    "prompt_token_ids": [Example("data.prompts", on_disk=_prompts(_asking("beyond")))],
    "prompt_lengths": [Example("data.prompts", on_disk=_prompts(_asking(""), _asking("1 " * 20)))],
    "prompts_unchanged": [Example("data.prompts", on_disk=_checkpoint_in_other_prompts)],
    "reward_reads_answers": [
        Example("data.reward", {"data.reward": "dapo"}, on_disk=_prompts(_asking("\\boxed"))),
        Example("data.reward", {"data.reward": "dapo"}, on_disk=_prompts(_asking("", template="base"))),
        Example("data.reward", {"data.reward": {"math": 1.0}}, on_disk=_prompts(_asking("", template="dapo"))),
        Example(
            "evaluation.sets.held_out.reward",
            {"evaluation.sets": {"held_out": {"prompts": "held_out.jsonl", "reward": "math"}}},
            on_disk=_prompts(_asking("the form Answer: x"), name="held_out.jsonl"),
        ),
    ],
    "prompt_answers": [
        Example(
            "data.prompts", on_disk=_prompts(*[{"prompt": "1", "answer": "first\nsecond"}] * 2, _asking(""))
        ),
        Example(
            "evaluation.sets.held_out.prompts",
            {"evaluation.sets": {"held_out": {"prompts": "held_out.jsonl", "reward": {"math": 1.0}}}},
            on_disk=_prompts({"prompt": "1", "answer": "one two " * 6}, name="held_out.jsonl"),
        ),
    ],
    "reward_thinking": [
        Example("data.thinking", {"data.thinking": "require", "data.reward": "math"}),
    ],
    "reward_answer_trial": [
        Example(
            "data.prompts",
            {"data.reward": reward},
            on_disk=_prompts({"prompt": "1", "answer": answer}, {"prompt": "2", "answer": answer}, _asking("")),
        )
        for reward, answer in (("math", "9 + 9\n#### 18"), ("dapo", "The answer is 18, since 9 + 9 is."))
    ],
    "reward_trial": [
        Example("data.reward", {"data.reward": "mine:f"}, on_disk=_module("mine", "1 / 0")),
        Example("data.reward", {"data.reward": "mine:g"}, on_disk=_module("mine", "def f(): ...")),
        Example("data.reward", {"data.reward": "mine:f"}, on_disk=_module("mine", "def f(prompt): ...")),
        Example(
            "data.reward", {"data.reward": "mine:f"}, on_disk=_module("mine", "def f(p, r, e): return '1'")
        ),
    ],
    "environment_trial": [
        Example(
            "rollout.environment", {"rollout.environment": "mine:E"}, on_disk=_module("mine", "class E: ...")
        )
    ],
    "agent_trial": [
        Example(
            "rollout.agent.harness",
            {"rollout.agent": {"harness": "mine:f"}},
            on_disk=_module("mine", "def f(*arguments): ..."),
            also=frozenset({"agent"}),
        )
    ],
    "generate_import": [
        Example("rollout.generate", {"rollout.generate": "mine:f"}, on_disk=_module("mine", "import nothing_"))
    ],
    "clashes": [
        Example(
            "rollout.lag",
            {"rollout.lag": 1, "rollout.engine": "sglang", "rollout.over_sampling": 1.5},
        ),
        Example("rollout.lag", {"rollout.lag": 1, "tracking.alarms": "roll_back"}),
        Example(
            "rollout.agent.harness",
            {"rollout.agent": {"harness": "json:loads", "command": ["python"]}},
            also=_CHATS,
        ),
        Example("rollout.agent", {"rollout.agent": _AGENT, "rollout.environment": "sudoku"}, also=_CHATS),
        Example("rollout.agent", {"rollout.agent": _AGENT, "rollout.generate": "json:loads"}, also=_CHATS),
        Example("rollout.generate", {"rollout.generate": "json:loads", "rollout.environment": "sudoku"}),
        Example("rollout.generate", {"rollout.generate": "json:loads", "rollout.max_turn_tokens": 5}),
        Example(
            "rollout.generate",
            {"rollout.engine": "sglang", "rollout.generate": "json:loads", "rollout.over_sampling": 1.5},
        ),
        Example(
            "rollout.agent",
            {"rollout.engine": "sglang", "rollout.agent": _AGENT, "rollout.over_sampling": 1.5},
            also=_CHATS,
        ),
        Example("parallel.overlap_grad_reduce", {"parallel.overlap_param_gather": True}),
        Example(
            "optimizer.distributed",
            {
                "parallel.overlap_param_gather": True,
                "parallel.overlap_grad_reduce": True,
                "optimizer.distributed": False,
            },
        ),
        Example("checkpoint.every", {"tracking.alarms": "roll_back", "checkpoint.every": 0}),
        Example("tracking.paired_routing_every", {"tracking.paired_routing_every": 5}),
        Example(
            "rollout.over_sampling",
            {"rollout.over_sampling": 1.5},
        ),
        Example("rollout.max_staleness", {"rollout.max_staleness": 1}),
        Example(
            "rollout.max_staleness",
            _AHEAD | {"rollout.sglang": {"colocated": True, "weight_sync": "tensor"}},
        ),
        Example("rollout.max_staleness", _AHEAD | {"rollout.generate": "json:loads"}),
        Example("rollout.max_staleness", _AHEAD | {"rollout.lag": 1}),
        Example("rollout.max_turns", {"rollout.max_turns": 2}),
        Example(
            "rollout.environment",
            {"rollout.environment": "sudoku", "rollout.over_sampling": 1.5},
        ),
        Example("rollout.release_trainer", {"rollout.engine": "sglang", "rollout.release_trainer": True}),
        Example(
            "rollout.sglang.weight_sync", {"rollout.engine": "sglang", "rollout.sglang": {"colocated": True}}
        ),
    ],
    "same_experiment": [
        Example("run.folder", {"optimizer.lr": 1e-5}, on_disk=_checkpoint),
    ],
    "same_optimizer_states": [
        Example(
            "optimizer.distributed",
            {"optimizer.distributed": False},
            on_disk=partial(_checkpoint, "optimizer = { lr = 1e-6, distributed = true }"),
            also=frozenset({"same_experiment"}),
        ),
    ],
    "sglang_quantization": [
        Example("sglang.quantization", {**_SERVED, "sglang.quantization": "fp8"}),
        Example(
            "sglang.quantization",
            {**_SERVED, "sglang.quantization": "new"},
            also=frozenset({"sglang_arguments"}),
        ),
        Example("sglang.load_format", {**_SERVED, "sglang.load_format": "flash_rl"}),
        Example("sglang.quantize_and_serve", {**_SERVED, "sglang.quantize_and_serve": True}),
        Example("sglang.model_path", {**_SERVED, "sglang.model_path": "model"}),
        Example("sglang.model_path", {**_SERVED, "sglang.model_path": "elsewhere"}),
        Example("sglang.quantization", {**_FP8, "sglang.quantization": "modelopt_fp4"}, on_disk=_blocks()),
        Example("sglang.model_path", _FP8, on_disk=_blocks({"num_hidden_layers": 3})),
        Example("sglang.model_path", _FP8, on_disk=_blocks(ignored=["layers.0.self_attn.v_proj"])),
        Example("sglang.moe_runner_backend", {**_FP8, "sglang.moe_runner_backend": "auto"}, on_disk=_blocks()),
        Example("sglang.tp_size", {**_FP8, "sglang.tp_size": 2}, on_disk=_blocks(heads=16)),
        Example("sglang.tp_size", {**_FP8, "sglang.tp_size": 2, "sglang.ep_size": 2}, on_disk=_blocks()),
        Example("model.load", _SERVED, on_disk=_gpt_oss(quantization_config={"quant_method": "mxfp4"})),
    ],
    "thresholds": [
        Example("algorithm.delta", {"algorithm.delta": 5.0}),
        Example("algorithm.delta", {"algorithm.delta": 0.0}),
        Example("algorithm.delta_low", {"algorithm.delta_low": 1.0}),
        Example("algorithm.delta", {"algorithm.preset": "dppo_binary_kl", "algorithm.delta": 0.0}),
        Example("algorithm.delta", {"algorithm.preset": "negative_mask", "algorithm.delta": 1.0}),
        Example("algorithm.eps_low", {"algorithm.preset": "grpo", "algorithm.eps_low": 1.0}),
        Example("algorithm.eps_high", {"algorithm.preset": "grpo", "algorithm.eps_high": 0.0}),
        Example("algorithm.alpha", {"algorithm.preset": "relax_both", "algorithm.alpha": 1.0}),
        *(
            Example(f"algorithm.{name}", {"algorithm.preset": preset, f"algorithm.{name}": value})
            for preset, name, value in (
                ("ipo", "delta", 1.0),
                ("cppo", "delta_high", 1.0),
                ("gspo", "eps_low", 1.0),
                ("gspo", "eps_high", 0.0),
                ("icepop", "eps_low", 1.0),
                ("icepop", "rho_low", 1.5),
                ("mis", "rho_high", 0.9999),
            )
        ),
        *(
            Example(f"algorithm.{name}", {**TOPK, "algorithm.preset": preset, f"algorithm.{name}": value})
            for preset, name, value in (
                ("cppo_topk", "delta_low", 2.0),
                ("trm", "token_kl", 0.0),
                ("trm", "response_kl", 0.5),
                ("dppo_topk_kl_predictive", "delta", 0.0),
            )
        ),
    ],
    "sglang_arguments": [
        Example("sglang.tp_sise", {"sglang.tp_sise": 2}),
        Example("sglang.tp_sise", {"sglang.tp_sise": 2, "sglang.python": "env/python"}, on_disk=_sglang),
        Example("sglang.tp_size", {"sglang.tp_size": "2", "sglang.python": "env/python"}, on_disk=_sglang),
    ],
}


@pytest.fixture(autouse=True)
def _no_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker wandb counts as missing, whatever this environment has."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else find_spec(name))


@pytest.fixture(autouse=True)
def _restored_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples set these variables."""
    of_sglang = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in (*of_sglang, WEBHOOK):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")


def test_every_rule_has_an_example() -> None:
    assert set(EXAMPLES) == set(RULES)


def test_a_valid_config_has_no_problems(world: Path) -> None:
    assert check(_config({}), 1) == []
    assert check(_config({"parallel.expert": 2}), 2) == []
    assert (
        check(_config({**TOPK, "rollout.routing_replay": "replay", "tracking.paired_routing_every": 1}), 1)
        == []
    )
    assert check(_config({"lora.rank": 32}), 1) == []
    assert check(_config({"lora.rank": 4, "lora.targets": ("q_proj", "o_proj")}), 1) == []
    require_valid(_config({}), 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid_as_it_is(world: Path, preset: str) -> None:
    assert check(_config({**TOPK, "algorithm.preset": preset}), 1, needs=AT_ONCE) == []


def test_another_aggregation_than_the_papers_is_remarked_on(world: Path) -> None:
    for preset in ("gspo", "icepop", "sapo", "gmpo"):
        (remark,) = remarks(_config({"algorithm.preset": preset}))
        assert f"{preset} was published with 'seq_mean_token_mean'" in remark
    assert remarks(_config({"algorithm.preset": "trm"})) == []
    own = {"algorithm.preset": "gspo", "algorithm.aggregation": "seq_mean_token_mean"}
    assert remarks(_config(own)) == []


@pytest.mark.parametrize(
    "name", ["samples_every", "batches_every", "paired_routing_every", "clipped_tokens_every"]
)
def test_a_period_acts_in_its_multiples_and_one_beyond_the_run_is_remarked_on(world: Path, name: str) -> None:
    assert [rollout + 1 for rollout in range(25) if is_due(10, rollout)] == [10, 20]
    assert [rollout + 1 for rollout in range(7) if is_due(3, rollout)] == [3, 6]
    assert not any(is_due(0, rollout) for rollout in range(25))
    off = {"tracking.samples_every": 0, "run.num_rollouts": 4}
    assert period_remarks(_config({**off, f"tracking.{name}": 4})) == []
    (remark,) = period_remarks(_config({**off, f"tracking.{name}": 5}))
    assert remark.startswith(f"tracking.{name} is 5 and run.num_rollouts 4: it acts in rollouts 5, 10, 15, ...")
    assert period_remarks(_config({"run.num_rollouts": 4})) == [], "a default that nobody set"
    Path("config.toml").write_text(dump_config(_config({"run.num_rollouts": 9})))
    shown = CliRunner().invoke(app, ["check", "config.toml"])
    assert "note: tracking.samples_every is 10 and run.num_rollouts 9: it acts in rollouts 10" in shown.output


_SMALL = {"model.dtype": "float32", "optimizer.lr": 1e-5}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({**_SMALL, "rollout.transformers": {"weights": "bfloat16"}}, "rollout.transformers.weights"),
        ({**_SMALL, "rollout.engine": "sglang", "sglang.dtype": "bfloat16"}, "sglang.dtype"),
        ({"optimizer.lr": 1e-5, "rollout.transformers": {"weights": "modelopt_fp8"}}, "rollout.transformers"),
        ({**_SMALL, "optimizer.lr": 1e-4, "rollout.transformers": {"weights": "bfloat16"}}, None),
        (_SMALL, None),
        ({**_SMALL, "rollout.engine": "sglang"}, None),
        ({"optimizer.lr": 1e-6}, None),
        ({"optimizer.lr": 1e-5, **_FP8}, "the form of fp8"),
        ({"optimizer.lr": 1e-6, "rollout.engine": "sglang", "sglang.dtype": "bfloat16"}, None),
    ],
)
def test_steps_that_the_served_type_rounds_away_are_doubted(
    world: Path, changes: dict[str, Any], key: str | None
) -> None:
    _blocks()()
    found = remarks(_config(changes))
    assert len(found) == (key is not None) and all(remark.startswith(key or "") for remark in found)
    Path("config.toml").write_text(dump_config(_config({"algorithm.preset": "gspo"})))
    shown = CliRunner().invoke(app, ["check", "config.toml"])
    assert shown.exit_code == 0 and "note: algorithm.aggregation is 'token_mean'" in shown.output


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
def test_a_dense_model_is_a_model(world: Path, architecture: str) -> None:
    _dense(architecture)()
    assert check(_config({"lora.rank": 4, "lora.targets": ("gate_proj",)}), 1) == []


@pytest.mark.parametrize(
    ("changes", "heads", "ignored"),
    [
        ({}, 8, ()),
        ({"sglang.tp_size": 2, "sglang.ep_size": 2, "sglang.quantization": "fp8"}, 16, ()),
        ({"sglang.tp_size": 2, "sglang.moe_runner_backend": "deep_gemm"}, 16, ("layers.0.mlp", "layers.1.mlp")),
    ],
)
def test_a_folder_of_blocks_is_served(
    world: Path, changes: dict[str, Any], heads: int, ignored: tuple[str, ...]
) -> None:
    _blocks(heads=heads, ignored=ignored)()
    assert check(_config({**_FP8, **changes}), 1) == []
    (Path("fp8") / "config.json").rename("model/config.json")  # the trained model's folder itself
    assert check(_config({**_SERVED, **changes}), 1) == []


def test_blocks_of_an_architecture_that_drops_their_scales_are_refused(world: Path) -> None:
    _dense("LlamaForCausalLM", quantization_config=BlockFP8().described(), intermediate_size=128)()
    problems = check(_config(_SERVED), 1)
    assert problems[0].where == "sglang.model_path"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_reference_of_the_models_sizes_is_taken(world: Path, architecture: str) -> None:
    """Of every family, also if its sizes have parts: latents, linear attention."""
    for folder in ("model", "before"):
        config_of(architecture, architectures=[architecture]).save_pretrained(folder)
        Path(folder, "model.safetensors").touch()
    rules = {"reference_model": RULES["reference_model"]}
    assert check(_config(_KL), 1, rules) == []
    config_of(architecture, architectures=[architecture], hidden_size=64).save_pretrained("before")
    (problem,) = check(_config(_KL), 1, rules)
    assert problem.found == "before of hidden_size 64"


def test_a_megatron_checkpoint_is_a_model(world: Path) -> None:
    Path("model/model.safetensors").unlink()
    Path("model/hf").mkdir()
    Path("model/config.json").rename("model/hf/config.json")
    Path("model/tokenizer.json").rename("model/hf/tokenizer.json")
    Path("model/tokenizer_config.json").rename("model/hf/tokenizer_config.json")
    assert check(_config({}), 1) == []


def each_example(*needs: str) -> Any:
    """Parametrises a test over the examples of rules with these needs."""
    return pytest.mark.parametrize(
        ("id", "example"),
        [
            pytest.param(id, example, id=f"{id}-{n}")
            for id, examples in EXAMPLES.items()
            for n, example in enumerate(examples)
            if RULES[id].needs in needs
        ],
    )


@each_example(*get_args(Need))
def test_each_rule_and_only_it_finds_its_example(world: Path, id: str, example: Example) -> None:
    example.on_disk()
    config = _config(example.changes)
    needs: tuple[Need, ...] = (*AT_ONCE, RULES[id].needs)
    problems = check(config, example.world_size, needs=needs)
    assert example.where in {problem.where for problem in problems}
    for problem in problems:
        assert problem.found
        assert problem.expected
        assert problem.action.endswith((".", "?"))
    without = {name: rule for name, rule in RULES.items() if name != id and name not in example.also}
    assert check(config, example.world_size, without, needs=needs) == []
    assert example.where in {problem.where for problem in check(config, example.world_size, {id: RULES[id]})}
    with pytest.raises(ConfigError) as raised:
        require_valid(config, example.world_size, needs=needs)
    assert list(raised.value.problems) == problems


@each_example(*AT_ONCE)
def test_what_plan_asks_needs_config_json_alone(
    world: Path, id: str, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` asks where there are no prompts, weights, tokenizer or libraries."""
    example.on_disk()
    config = _config(example.changes)
    asked = {name: rule for name, rule in RULES.items() if rule.needs == "config"}
    expected = check(config, example.world_size, asked)
    assert (id in asked) <= bool(expected)
    for path in (*world.glob("*.jsonl"), *world.glob("model/*")):
        if path.is_file() and path.name != "config.json":
            path.unlink()
    find = importlib.util.find_spec
    own = "tests.support.own_rules"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: find(name) if own.startswith(name) else None)
    monkeypatch.setattr("subprocess.run", None)
    assert problems_of(config, model_facts(config, example.world_size), needs=("config",)) == expected


class Watched:
    """Something whose attributes are noted as they are read."""

    def __init__(self, watched: object, read: set[str]) -> None:
        self._watched, self._read = watched, read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._watched, name)


@each_example("machine")
def test_what_plan_does_not_ask_has_no_say_about_layouts(world: Path, id: str, example: Example) -> None:
    """Or `plan` would admit what `train` refuses."""
    example.on_disk()
    config = _config(example.changes)
    read: set[str] = set()
    facts: Any = Watched(gather_facts(config, example.world_size), read)
    watched: Any = Watched(config, read)
    assert list(RULES[id].check(watched, facts))
    if id in ("checkpoint_disk", "checkpoint_memory"):  # the disk and the memory are the machine's
        read -= {"sizes", "model_sizes", "world_size"}
    assert not read & {"parallel", "world_size", "sizes", "model_sizes"}


def test_the_disk_for_a_small_checkpoint_is_named_in_small_units(world: Path) -> None:
    too_much = _config({"checkpoint.reserve_gib": 1e9})
    (problem,) = check(too_much, 1)
    num_bytes = checkpoint_bytes(too_much, gather_facts(too_much, 1))
    assert num_bytes is not None and 1 << 20 < num_bytes < 1 << 23
    assert f"a checkpoint takes {num_bytes / 2**20:.4g} MiB" in problem.expected


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ((), None),
        (("servers/a.json", "slurm/1/log", "run.lock", "train.log", "job-3.out", ".hidden"), None),
        (("config.toml", "metrics.jsonl", "notes.md", "other/file"), None),
        (("notes.md",), "notes.md"),
        (("a.py", "b.py", "c/d", "e"), "a.py, b.py, c, ..."),
    ],
)
def test_check_names_what_is_in_the_run_folder_and_of_no_run(
    world: Path, files: tuple[str, ...], named: str | None
) -> None:
    for file in files:
        (world / "runs/run" / file).parent.mkdir(parents=True, exist_ok=True)
        (world / "runs/run" / file).write_text("")
    found = f"run.folder: runs/run contains no run, but {named}; the run would write"
    expected = [] if named is None else [found]
    assert [each.removesuffix(" next to them.") for each in folder_remarks(_config({}))] == expected
    assert check(_config({}), 1) == []


def test_check_compares_the_time_to_save_with_the_size_of_a_checkpoint(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SAVE_SECONDS", raising=False)
    assert stop_remarks(_config({}), gather_facts(_config({}), 1)) == []
    _model(vocab_size=10**9)()
    config, facts = _config({}), gather_facts(_config({}), 1)
    num_bytes = checkpoint_bytes(config, facts)
    assert num_bytes is not None
    needed_s = math.ceil(num_bytes / 1e9)
    for given, limit_s in ((None, 480), (str(needed_s - 1), needed_s - 1)):
        if given is not None:
            monkeypatch.setenv("SAVE_SECONDS", given)
        (remark,) = stop_remarks(config, facts)
        assert f"has {limit_s} s for" in remark and f"takes {needed_s} s at 1 GB/s" in remark
        advised = re.search(r"SAVE_SECONDS=(\d+) and --signal=B:USR1@(\d+)", remark)
        assert advised is not None and needed_s < int(advised[1]) < int(advised[2])
    monkeypatch.setenv("SAVE_SECONDS", str(needed_s))
    assert stop_remarks(config, facts) == []


@pytest.mark.parametrize(("column", "is_same"), [("answer", True), ("prompt", False)])
def test_the_column_of_answers_may_be_written_out(world: Path, column: str, is_same: bool) -> None:
    _checkpoint(dump_config(_config({})))
    rules = {"same_experiment": RULES["same_experiment"]}
    assert (check(_config({"data.answer_column": column}), 1, rules) == []) == is_same


def test_code_in_the_folder_that_nothing_needs_is_left_alone(world: Path) -> None:
    _model(model_type="qwen3_moe", auto_map={"AutoConfig": "mine.Config"})()
    _tokenizer(tokenizer_class="Qwen2Tokenizer", auto_map={"AutoTokenizer": [None, "mine.Tokenizer"]})()
    assert check(_config({}), 1, needs=AT_ONCE) == []


def test_all_problems_come_at_once(world: Path) -> None:
    changes = {"data.reward": "x", "rollout.top_p": 0.5, "model.load": "none", "megatron.zzz": 1}
    found = {problem.where for problem in check(_config(changes), 3)}
    assert found == {
        "data.reward",
        "rollout.top_p",
        "model.load",
        "megatron.zzz",
        "rollout.prompts_per_rollout",
    }


def test_misspelt_names_get_a_suggestion(world: Path) -> None:
    changes = {"data.reward": "arithmetics", "algorithm.preset": "grpoo", "data.prompt_column": "promt"}
    problems = check(_config({**changes, "megatron.moe_router_fusoin": True}), 1)
    actions = " ".join(problem.action for problem in problems)
    for name in ("'arithmetic'", "'grpo'", "'prompt'", "megatron.moe_router_fusion"):
        assert f"Did you mean {name}?" in actions


def test_megatron_names_are_read_once_per_version(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert megatron_rules.megatron_fields() == MEGATRON
    monkeypatch.setattr(megatron_rules, "_read_fields", lambda: pytest.fail("the cache was not used"))
    assert megatron_rules.megatron_fields() == MEGATRON
    (cache,) = (world / "cache").rglob("*.json")
    cache.write_text("[")
    monkeypatch.setattr(megatron_rules, "_read_fields", lambda: {"a": ["int"]})
    assert megatron_rules.megatron_fields() == {"a": ["int"]}


def test_without_megatron_names_are_taken_on_trust_and_without_sglang_a_list_stands_in(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_rules, "_read_fields", lambda: None)
    config = _config({"megatron.zzz": 1, "sglang.mem_fraction_sttaic": 0.7, "rollout.engine": "sglang"})
    (problem,) = check(config, 1, needs=AT_ONCE)
    assert problem.where == "sglang.mem_fraction_sttaic"
    assert problem.action == "Did you mean sglang.mem_fraction_static?"
    assert [note.partition(":")[0] for note in not_checked(config)] == ["[megatron]", "[sglang]"]
    assert not_checked(Config()) == []


def test_megatron_itself_names_every_field_that_the_package_owns(tmp_path: Path) -> None:
    names = megatron_rules._read_fields()
    assert names is not None
    added = {
        name for name in megatron_rules._OWNED if name == "use_mup" or "_shards" in name or "_remat_" in name
    }
    is_newer = "use_mup" in names
    absent = {"moe_use_legacy_grouped_gemm"} if is_newer else added
    assert megatron_rules._OWNED.keys() - absent <= names.keys()


def test_checking_imports_neither_megatron_nor_sglang(world: Path) -> None:
    Path("config.toml").write_text(dump_config(_config({})))
    code = """
import sys
from pathlib import Path
from megatron_dppo.checks import check
from megatron_dppo.config import load_config
check(load_config([Path("config.toml")]), 1)
sys.exit(any(name.partition(".")[0] in {"megatron", "sglang"} for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_check_prints_a_summary_and_every_problem(world: Path) -> None:
    """A few lines; all settings with --verbose."""
    Path("config.toml").write_text(dump_config(_config({"rollout.top_p": 0.5, "data.reward": "x"})))
    command = ["check", "config.toml", "--set", "optimizer.lr=2e-6"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert list(lines) == [
        *("model", "layout", "data", "evaluation", "algorithm", "rollout", "training", "run", "checkpoints")
    ]
    assert lines["model"] == "model: Qwen3MoeForCausalLM, 2 layers, 8 experts, 227,712 parameters; bfloat16"
    assert lines["layout"].endswith("; 1 data-parallel, prefixes shared if the layers are torch's")
    exact = CliRunner().invoke(app, [*command, "--set", "model.dtype=float32"]).stdout
    alone = CliRunner().invoke(app, [*command, "--set", "parallel.share_prefixes=false"]).stdout
    assert "1 data-parallel, prefixes shared\n" in exact and "1 data-parallel\n" in alone
    assert lines["data"] == "prompts.jsonl, 1 prompt, of up to 4 tokens; reward x"
    assert "learning rate 2e-06" in lines["training"] and lines["run"] == "runs/run, new"
    assert "lr = 2e-06" not in result.stdout
    assert "lr = 2e-06" in CliRunner().invoke(app, [*command, "--verbose"]).stdout
    assert "2 problems:" in result.stderr
    assert "rollout.top_p" in result.stderr
    assert "data.reward" in result.stderr


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            _sigmoid("DeepseekV3ForCausalLM"),
            "no topk_method, no scoring_func, no moe_layer_freq in config.json of model; expected "
            '"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, which SGLang reads',
        ),
        (
            _sigmoid("Glm4MoeLiteForCausalLM", first_k_dense_replace=None, mlp_layer_types=["dense", "sparse"]),
            "first_k_dense_replace = None in config.json of model",
        ),
        (
            _sigmoid("Glm4MoeLiteForCausalLM", mlp_layer_types=["sparse", "dense"]),
            "model, whose layers [1] are dense; expected dense layers only before all sparse ones",
        ),
        (_model(mlp_only_layers=[0]), "model, whose layers [0] are dense; expected experts in every layer"),
        (
            partial(_mixtral, "0.5.23", head_dim=32),
            "model, whose heads have 32 dimensions; expected 16, hidden_size / num_attention_heads",
        ),
        (
            _dense("Qwen2ForCausalLM", head_dim=32),
            "heads have 32 dimensions; expected 16, hidden_size / num_attention_heads: SGLang derives it for "
            "Qwen2ForCausalLM",
        ),
        (
            partial(_mixtral, "0.5.23", rope_parameters=LLAMA3),
            "model, whose rotary frequencies are llama3's; expected plain ones",
        ),
    ],
)
def test_check_refuses_what_sglang_would_not_serve_as_it_is_trained(
    world: Path, spoil: Callable[[], None], says: str
) -> None:
    spoil()
    Path("config.toml").write_text(dump_config(_config({**_ROUTED, "sglang.python": "env/python"})))
    result = CliRunner().invoke(app, ["check", "config.toml"])
    assert result.exit_code == 1
    assert says in " ".join(result.stderr.split())
    Path("config.toml").write_text(dump_config(_config({})))
    assert CliRunner().invoke(app, ["check", "config.toml"]).exit_code == 0, "the embedded engine has it"


@pytest.mark.parametrize(
    "publish",
    [
        _sigmoid("DeepseekV3ForCausalLM", **_PUBLISHED),
        _sigmoid("Glm4MoeForCausalLM"),
        _sigmoid("Glm4MoeLiteForCausalLM", mlp_layer_types=["dense", "sparse"]),
        partial(_mixtral, "0.5.22"),
    ],
)
def test_check_is_content_with_what_sglang_serves(world: Path, publish: Callable[[], None]) -> None:
    publish()
    assert check(_config({**_ROUTED, "sglang.python": "env/python"}), 1) == []


def test_check_is_content_with_a_valid_config(world: Path) -> None:
    Path("config.toml").write_text(dump_config(_config({"parallel.expert": 2})))
    assert CliRunner().invoke(app, ["check", "config.toml", "--world-size", "2"]).exit_code == 0
    assert CliRunner().invoke(app, ["check", "config.toml"]).exit_code == 1


def test_check_names_each_cause_of_bad_rows_once_and_counts_all(world: Path) -> None:
    bad = ({"prompt": ""}, {"prompt": ["7"], "answer": 2}, {"prompt": "1?", "answer": "1", "images": ["a.png"]})
    rows = [{"prompt": "1 + 1 =", "answer": str(n)} if n % 2 == 0 else bad[n % 3] for n in range(40)]
    _prompts(*rows)()
    Path("config.toml").write_text(dump_config(_config({})))
    said = CliRunner().invoke(app, ["check", "config.toml"]).stderr
    assert "found 20 of 40 rows of prompts.jsonl that cannot be used; expected" in said
    lines = said.splitlines()[2:]
    assert [line.split(":")[0] for line in lines] == [f"  prompts.jsonl, row {n}" for n in (2, 4, 6)]
    more = [line.rpartition("(")[2] for line in lines]
    assert more == [f"{n} more of these rows)" for n in (6, 6, 5)]
    refused = CliRunner().invoke(app, ["train", "config.toml"])
    assert refused.exit_code == 2 and "found 20 of 40 rows" in refused.stderr, "before a model loads"


def test_no_more_than_ten_causes_are_named() -> None:
    faulty = FaultyRows()
    for number, kind in enumerate(11 * "ab" + "cdefghijkl", 1):
        text = "".join(chr(ord("a") + number % 26 - place % 7) for place in range(60))
        faulty.add(
            f"p.jsonl, row {number}: found {text}... (Error{kind}: {number} of '{text}'); expected text."
        )
    assert faulty.num_rows == 32 and faulty.shown == ", the first 10 causes below"
    lines = faulty.lines.splitlines()
    assert len(lines) == 10 and all(lines[n].endswith(" (10 more of these rows)") for n in (0, 1))
    assert not any("more" in line for line in lines[2:])


def test_check_says_once_what_a_reward_should_return(world: Path) -> None:
    _module("mine", "def f(a, b, c): ...")()
    Path("config.toml").write_text(dump_config(_config({"data.reward": "mine:f"})))
    said = CliRunner().invoke(app, ["check", "config.toml"]).stderr
    assert (
        said.count("expected") == 1
        and "a NoneType; expected a number or a RewardResult. Correct the reward.\n" in said
    )


def test_the_command_says_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"megatron-dppo {megatron_dppo.__version__}\n"


def test_check_reports_schema_faults(world: Path) -> None:
    Path("config.toml").write_text("[optimizer]\nlrr = 1\n")
    result = CliRunner().invoke(app, ["check", "config.toml"])
    assert result.exit_code == 1
    assert "Did you mean optimizer.lr?" in result.stderr


def test_training_refuses_with_a_message_and_no_traceback(world: Path) -> None:
    Path("config.toml").write_text(dump_config(_config({"rollout.top_p": 0.5})))
    result = CliRunner().invoke(app, ["train", "config.toml"])
    assert result.exit_code == 2
    assert result.stderr.startswith("ConfigError: rollout.top_p: found 0.5; expected 1.0 (off).")
    assert "Traceback" not in result.stderr


def test_evaluation_alone_asks_nothing_of_training(world: Path) -> None:
    for_training = {"data.prompts": "none.jsonl", "rollout.samples_per_prompt": 1, "parallel.expert": 3}
    require_evaluable(_config(for_training), 1)
    faulty = {"evaluation.pass_at": (64,), "model.load": "none"}
    with pytest.raises(ConfigError) as raised:
        require_evaluable(_config({**for_training, **faulty}), 1)
    assert {problem.where for problem in raised.value.problems} == {"evaluation.pass_at", "model.load"}


def test_an_evaluation_whose_sets_name_their_rewards_needs_no_other(world: Path) -> None:
    for_all = {"data.reward": "", **_sets(near={"reward": "math"}, far={"reward": "dapo"})}
    require_evaluable(_config(for_all), 1)
    with refused("data.reward", "['arithmetic', 'dapo', "):
        require_evaluable(_config({"data.reward": "", **_sets(near={"reward": "math"}, far={})}), 1)


@pytest.mark.parametrize("where", [{"rollout.environment": "sudoku"}, {"rollout.generate": "json:dumps"}])
def test_an_environment_may_give_the_rewards(world: Path, where: dict[str, Any]) -> None:
    assert check(_config({"data.reward": "environment", **where}), 1, needs=AT_ONCE) == []
    assert check(_config({"data.reward": "math", **where}), 1, needs=AT_ONCE) == []
    (problem,) = check(_config({"data.reward": "", **where}), 1, needs=AT_ONCE)
    assert "or just 'environment' if rollout.environment gives the rewards" in problem.expected


def test_evaluate_says_what_it_needs(world: Path) -> None:
    Path("config.toml").write_text(dump_config(_config({})))
    Path("none.toml").write_text(dump_config(_config({"evaluation.sets": {}})))
    for arguments, message in (
        (["none.toml"], "evaluation.sets: found none; expected at least one set."),
        (["config.toml", "--model", "a", "--checkpoint", "b"], "--checkpoint: found --model too;"),
        (["config.toml", "--checkpoint", "model"], "model: found no state.json that can be read"),
    ):
        result = CliRunner().invoke(app, ["evaluate", *arguments])
        assert result.exit_code == 2
        assert message in result.stderr


def test_only_rank_0_speaks_of_the_config(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    result = CliRunner().invoke(app, ["train", "none.toml"])
    assert (result.exit_code, result.stderr) == (2, "")


def test_an_example_trains_without_evaluation_and_its_files(world: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "moe_base" / "base.toml"
    files = {key for key in prompt_files(load_config([example])) if section_of(key) != TRAINING}
    assert files == {"evaluation.sets.aime24.prompts", "evaluation.sets.aime25.prompts"}
    config = load_config([example], ["evaluation.every=0"])
    assert set(map(section_of, prompt_files(config))) == {TRAINING}
    assert evaluation_sets(config) == []
    assert config.evaluation.sets == load_config([example]).evaluation.sets
    assert not check(_config({"evaluation.every": 0} | _sets(absent={"prompts": "absent.jsonl"})), 1)
    (problem,) = check(_config(_sets(absent={"prompts": "absent.jsonl"})), 1)
    assert problem.where == "evaluation.sets.absent.prompts"
    without = TrainingState(config, Runtime(torch.device("cpu"), 0, 1))
    assert not without.is_evaluation_due
    with pytest.raises(ConfigError, match=r"evaluation\.every = 0"):
        require_evaluable(_config({"evaluation.every": 0}), 1)

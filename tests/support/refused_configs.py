"""Configs that a rule refuses, read from the table in tests/unit/data, and functions that spoil files."""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dppo.checkpoints.block_fp8 import BlockFP8
from megatron_dppo.checkpoints.checkpoint_folder import sums_of, write_sums
from megatron_dppo.config import Config, dump_config, load_config
from megatron_dppo.run_folder.lock import LOCK
from megatron_dppo.run_folder.trackers import WEBHOOK

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


SHORT = {
    "AGENT": "rollout.agent.harness=json:loads",
    "AHEAD": "rollout.engine=sglang  rollout.max_staleness=1",
    "AIME": "evaluation.sets.aime.prompts=held_out.jsonl",
    "COLOCATED": "rollout.engine=sglang  rollout.sglang.colocated=true  rollout.sglang.weight_sync=tensor",
    "FLEX": "megatron.moe_token_dispatcher_type=flex  megatron.moe_permute_fusion=true  parallel.expert=2  "
    "model.dtype=bfloat16",
    "FP8": "rollout.engine=sglang  sglang.model_path=fp8",
    "KL": "algorithm.ref_kl_coef=0.04  model.reference=before",
    "MINE": "data.reward=megatron_dppo.mine:score",
    "OVERLAP": "parallel.overlap_param_gather=true  parallel.overlap_grad_reduce=true",
    "R2": "algorithm.preset=minirl  algorithm.replay_recomputed_routes=true",
    "ROUTED": "rollout.engine=sglang  rollout.routing_replay=replay",
    "SERVED": "rollout.engine=sglang",
    "TE": "model.layer_spec=transformer_engine",
    "TOP20": "rollout.num_topk_log_probs=20",
    "TOPK": "algorithm.preset=dppo_topk_kl  rollout.num_topk_log_probs=20",
}


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n")


VALID = """
data = { reward = "arithmetic", max_prompt_tokens = 16 }
rollout.max_response_tokens = 32
evaluation.sets.held_out.prompts = "held_out.jsonl"
megatron.moe_permute_fusion = false
"""


def config_with(sets: str = "", *more: str) -> Config:
    """Return a valid config with overrides, two spaces apart; `*NAME` is one of `SHORT`."""
    Path("valid.toml").write_text(VALID)
    return load_config([Path("valid.toml")], [*_spelt_out(sets), *more])


def _spelt_out(text: str) -> Iterator[str]:
    for part in filter(None, text.split("  ")):
        yield from _spelt_out(SHORT[part[1:]]) if part.startswith("*") else [part]


@dataclass(frozen=True)
class Example:
    """A config that breaks one rule.

    Attributes:
        rule: Name of the rule; "types" if the schema refuses the config.
        key: Key that is refused.
        sets: Overrides of the valid config.
        also: Other rules that the config breaks.
        world_size: Processes.
        writers: Functions that spoil a file first.
    """

    rule: str
    key: str
    sets: tuple[str, ...]
    also: tuple[str, ...]
    world_size: int
    writers: tuple[Callable[[], object], ...]

    def on_disk(self) -> None:
        """Spoil the files."""
        for writer in self.writers:
            writer()

    @property
    def config(self) -> Config:
        """The config; the schema refuses an example of "types"."""
        return config_with("", *self.sets)


def model_without(key: str) -> None:
    write_json(Path("model/config.json"), {k: v for k, v in MODEL.items() if k != key})


def model(**changes: Any) -> None:
    write_json(Path("model/config.json"), {**MODEL, **changes})


def gpt_oss(**changes: Any) -> None:
    own = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "head_dim": 16}
    content = {key: value for key, value in MODEL.items() if key != "rope_parameters"}
    write_json(Path("model/config.json"), {**content, **own, **changes})


def dense(architecture: str, **changes: Any) -> None:
    experts = {"moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"}
    content = {key: value for key, value in MODEL.items() if key not in experts}
    write_json(Path("model/config.json"), {**content, "architectures": [architecture], **changes})


def blocks(changes: Mapping[str, Any] | None = None, *, heads: int = 8, ignored: Sequence[str] = ()) -> None:
    """A model whose linears have whole blocks, and the folder fp8 with its quantised form, changed."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 16}
    own = {**MODEL, **sizes, "moe_intermediate_size": 128}
    form = BlockFP8(tuple(ignored)).described()
    write_json(Path("model/config.json"), own)
    write_json(Path("fp8/config.json"), {**own, **(changes or {}), "quantization_config": form})


def tokenizer(**content: Any) -> None:
    write_json(Path("model/tokenizer_config.json"), content)


def no_tokenizer() -> None:
    for file in Path("model").glob("tokenizer*"):
        file.unlink()


def named_in_config() -> None:
    """The tokenizer's class, in config.json alone."""
    Path("model/tokenizer_config.json").unlink()
    model(tokenizer_class="AutoProcessor")


def saved_run(config: str = "optimizer.lr = 1e-6", prompts_digest: str = "") -> None:
    """What a run left."""
    content = {"state": {"rollout": 2}, "prompts_digest": prompts_digest, "config": config}
    checkpoint = Path("runs/run/checkpoints/step_00000008")
    write_json(checkpoint / "state.json", content)
    write_sums(checkpoint, sums_of([checkpoint / "state.json"], checkpoint))


def checkpoint_in_other_prompts() -> None:
    saved_run(dump_config(config_with()), prompts_digest="0" * 32)


def write(name: str, text: str) -> None:
    Path(name).write_text(text)


def held() -> None:
    """A run folder that a live process holds: here this one, by another descriptor."""
    Path("runs/run").mkdir(parents=True)
    stream = Path("runs/run", LOCK).open("w")  # noqa: SIM115 - the lock ends with it
    fcntl.flock(stream, fcntl.LOCK_EX)
    stream.write(json.dumps({"host": socket.gethostname(), "pid": 7, "beat": 0}))
    stream.flush()
    HELD.append(stream)


HELD: list[Any] = []


def prompts(*rows: object, name: str = "prompts.jsonl") -> None:
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    write(name, text)


def _asking(words: str, **columns: str) -> dict[str, str]:
    return {"prompt": f"1 + 1 = {words}", "answer": "2", **columns}


def module(name: str, text: str) -> None:
    """A module of the working directory, which is where workers find it."""
    write(f"{name}.py", text)


def among_models() -> None:
    shutil.copytree("model", "all/qwen3")


def full_disk() -> None:
    """A model too large for any disk."""
    model(vocab_size=10**9, hidden_size=1 << 20)


def small_host() -> None:
    """Such a model in a job, which a launcher started on this host."""
    full_disk()
    os.environ["LOCAL_WORLD_SIZE"] = "1"


def variable(name: str, value: str) -> None:
    os.environ[name] = value


def answers_of_two(answer: str) -> None:
    prompts({"prompt": "1", "answer": answer}, {"prompt": "2", "answer": answer}, _asking(""))


def reference(weights: str = "model.safetensors", folder: str = "before", **changes: Any) -> None:
    write_json(Path(folder) / "config.json", {**MODEL, **changes})
    (Path(folder) / weights).touch()


def sglang(version: str = "1.2.3", nccl: str = "") -> None:
    """An interpreter whose SGLang takes one argument, and whose torch has this NCCL."""
    arguments = {"tp_size": {"flag": "--tp-size", "kind": "one", "type": "int", "choices": None}}
    python = Path("env/python")
    python.parent.mkdir()
    python.write_text(
        f"#!/bin/sh\ncase \"$4\" in *ServerArgs*) echo '{json.dumps(arguments)}';; *nccl*) echo {nccl};; "
        f"*) echo {version};; esac\n"
    )
    python.chmod(0o755)


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
PUBLISHED = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def sigmoid(architecture: str, is_published: bool = False, **changes: Any) -> None:
    own = _SIGMOID | (PUBLISHED if is_published else {}) | changes
    model(architectures=[architecture], **own)


def hybrid() -> None:
    """A model with linear attention in its first layer."""
    sizes = {"full_attention_interval": 2, "shared_expert_intermediate_size": 16}
    model(architectures=["Qwen3NextForCausalLM"], **sizes)


def mixtral(version: str, **changes: Any) -> None:
    model(architectures=["MixtralForCausalLM"], num_local_experts=8, **changes)
    sglang(version)


def remove(name: str) -> None:
    Path(name).unlink()


def link(target: str, name: str) -> None:
    Path(name).symlink_to(target)


def webhook(url: str) -> None:
    os.environ[WEBHOOK] = url


def examples(table: Path) -> Iterator[Example]:
    """Yield the configs of a table; its first lines say how it is written."""
    rule = ""
    for line in table.read_text().splitlines():
        if line.startswith(" "):
            yield _example(rule, line.removeprefix("    ").split("  "))
        elif not line.startswith("#"):
            rule = line


def _example(rule: str, parts: Sequence[str]) -> Example:
    key, also, world_size, on_disk = "", [], 1, list[Callable[[], object]]()
    sets: list[str] = []
    for part in parts:
        if part.endswith(":"):
            key = part[:-1]
        elif part.startswith("+"):
            also.append(part[1:])
        elif part.startswith("@"):
            world_size = int(part[1:])
        elif part.startswith("!"):
            on_disk.append(_writer(part[1:]))
        else:
            sets.extend(_spelt_out(part))
    key = key or sets[-1].partition("=")[0]
    return Example(rule, key, tuple(sets), tuple(also), world_size, tuple(on_disk))


def _writer(text: str) -> Callable[[], object]:
    name, _, rest = text.partition(" ")
    given: list[Any] = []
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        given, rest = [*given, value], rest[end:].lstrip()
    positional = next((each for each in given if isinstance(each, list)), [])
    return partial(globals()[name], *positional, **next((each for each in given if isinstance(each, dict)), {}))

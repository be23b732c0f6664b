"""The engine's counts reach their rollout's row in metrics.jsonl, summed over ranks."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.prompts import sanity_task
from megatron_dppo.engines.base import EngineCounts
from megatron_dppo.runtime.process import Runtime
from tests.support.ranks import run_ranks
from tests.support.records import metrics_of
from tests.support.sglang_stand_in import MODEL, ROUTING, StandIn
from tests.support.word_tokenizers import TOKENIZER

NUM_PROMPTS, NUM_SAMPLES, NUM_ROLLOUTS = 4, 3, 2


def roll_out(runtime: Runtime, tables: dict[str, Any], url: str) -> None:
    """Evaluate and sample, as the loop does, with an engine of this rank's own; nothing is trained."""
    from megatron_dppo.config.schema import Config
    from megatron_dppo.engines.sglang.client import Patience
    from megatron_dppo.engines.sglang.engine import SglangEngine
    from megatron_dppo.rollout.rollouts import Rollouts
    from megatron_dppo.run.logger import RunLogger

    config = Config.model_validate(tables)
    engine = SglangEngine(url, MODEL, Patience(first_pause_s=0.01))
    share = (runtime.rank, runtime.world_size)
    rollouts = Rollouts(config, Path(tables["model"]["load"]), engine, share=share)
    with RunLogger.open(config, runtime) as logger:
        for rollout in range(NUM_ROLLOUTS):
            rollouts.evaluate(rollout, logger.evaluations)
            sampled = rollouts.next(rollout, engine.weight_version, runtime.all_gather)
            assert sampled is not None
            logger.add_values(logger.describe_rollout(*sampled[:2]))
            logger.write_rollout(rollout, {"total": 1.0})
    rollouts.close()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of two ranks: in the first rollout a sample of each prompt is retracted, in the second one comes late."""
    folder = tmp_path_factory.mktemp("counts")
    TOKENIZER.save_pretrained(folder / "model")
    sizes: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": ROUTING.num_experts}
    sizes |= {"num_hidden_layers": len(ROUTING.layer_numbers)}
    sizes |= {"num_experts_per_tok": ROUTING.top_k, "moe_intermediate_size": 8, "hidden_size": 8}
    sizes |= {"num_attention_heads": 1, "vocab_size": MODEL.vocab_size, "max_position_embeddings": 64}
    (folder / "model" / "config.json").write_text(json.dumps(sizes))
    for name, count in (("prompts", 16), ("held_out", 4)):
        sanity_task.write_prompts(folder / f"{name}.jsonl", count, 0)
    tables = {
        "run": {"folder": str(folder / "run")},
        "model": {"load": str(folder / "model")},
        "data": {"prompts": str(folder / "prompts.jsonl"), "reward": "arithmetic", "max_prompt_tokens": 16},
        "rollout": {
            "engine": "sglang",
            "prompts_per_rollout": NUM_PROMPTS,
            "samples_per_prompt": NUM_SAMPLES,
            "max_response_tokens": 5,
            "routing_replay": "measure",
            "max_dropped_fraction": 0.5,
        },
        "evaluation": {
            "samples_per_prompt": 1,
            "sets": {"held_out": {"prompts": str(folder / "held_out.jsonl")}},
        },
    }
    server = StandIn(
        num_retractions=lambda rid: 2 * (rid.startswith("rollout0/") and rid.endswith("+1")),
        fails_first=lambda rid: rid.startswith("rollout1/") and rid.endswith("+2"),
    )
    with server.running():
        run_ranks(roll_out, 2, folder, tables, server.url)
    return metrics_of(folder / "run")


def test_each_rollout_has_its_own_counts_of_both_ranks(rows: list[dict[str, Any]]) -> None:
    num_asked = NUM_PROMPTS * NUM_SAMPLES  # without the requests of evaluations
    common = {"engine/cached_tokens": num_asked, "rollout/num_response_tokens": 5 * num_asked}
    retracted = {
        "engine/retractions": 2 * NUM_PROMPTS,
        "rollout/retractions": 2 * NUM_PROMPTS,
        "rollout/recomputed_routes": NUM_PROMPTS,
    }
    late = {"engine/retries": NUM_PROMPTS, "engine/maybe_sampled_twice": NUM_PROMPTS}
    for row, found, absent in ((rows[0], retracted, late), (rows[1], late, retracted)):
        expected = common | found | dict.fromkeys(absent, 0)
        assert {name: row[name] for name in expected} == expected


def test_every_count_of_the_engine_is_in_the_row(rows: list[dict[str, Any]]) -> None:
    names = {f"engine/{field.name.removeprefix('num_')}" for field in fields(EngineCounts)}
    assert all({name for name in row if name.startswith("engine/")} == names for row in rows)
    assert all(row["engine/prompt_tokens"] > row["engine/cached_tokens"] for row in rows)

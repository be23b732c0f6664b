"""A checkpoint whose writer is slower than the trainer: it holds the state at the save, bit for bit."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import OpenRollout, RunState
from tests.distributed.test_resharding import stored
from tests.support.ranks import run_ranks
from tests.support.tiny import random_groups, write_model
from tests.support.tiny_families import write_family

FLOAT32 = {"dtype": "float32"}
CASES: dict[str, tuple[int, str, dict[str, dict[str, Any]]]] = {
    "one process": (1, "model", {"model": FLOAT32, "optimizer": {"distributed": False}}),
    "EP2, distributed optimizer": (2, "model", {"model": FLOAT32, "parallel": {"expert": 2}}),
    "adapters": (1, "model", {"model": FLOAT32, "lora": {"rank": 4, "alpha": 8}}),
    "bfloat16, with an expert bias that moves": (
        1,
        "with bias",
        {"model": {"dtype": "bfloat16"}, "megatron": {"moe_router_bias_update_rate": 0.01}},
    ),
}


def save_slowly(
    runtime: Runtime, model: str, folder: str, tables: dict[str, dict[str, Any]]
) -> tuple[bool, list[str]]:
    """Save one state twice, the second time by a writer that begins after two further steps; then save those.

    Returns whether that save was under way all the time, and the folders `at once`, `slowly`, and `later`.
    """
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.checkpoints import megatron_save
    from megatron_dppo.config.schema import CheckpointConfig, Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages
    from megatron_dppo.run.checkpoints import Checkpoints
    from megatron_dppo.run.state import RunPoint

    common: dict[str, Any] = {
        "model": {"load": model},
        "parallel": {"max_tokens_per_microbatch": 60},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
    }
    config = Config.model_validate(
        {name: common.get(name, {}) | tables.get(name, {}) for name in common | tables}
    )
    actor = Actor(config, runtime)
    may_write, write_file = threading.Event(), megatron_save._write_file

    def write_when_allowed(*args: Any) -> Any:
        assert may_write.wait(120)
        return write_file(*args)

    megatron_save._write_file = write_when_allowed
    groups = with_advantages(random_groups(4, routing=actor.routing), normalize_std=False)
    own = [sample for group in groups[runtime.rank :: runtime.world_size] for sample in group.samples]
    shape = BatchShape("token_mean", 16, 60, topk_columns=4, routing=actor.routing)
    (batch,), _ = train_batches([own], shape, actor.data_parallel)

    def checkpoints(name: str, *, is_asynchronous: bool) -> Checkpoints:
        options = CheckpointConfig(asynchronous=is_asynchronous, reserve_gib=0)
        return Checkpoints(Path(folder, name), options, config.model.load, runtime)

    def point(step: int) -> RunPoint:
        opened = OpenRollout(1, step, {"reward/mean": step / 7}, {"total": 3.0 * step})
        return RunPoint(RunState(1, step, 1, {"index": 5}), 11 * step, "digest", opened, 0.5, steps=(batch,))

    actor.train_step(batch, is_first=True)
    may_write.set()
    checkpoints("at once", is_asynchronous=False).save(actor, point(1))
    may_write.clear()
    slow = checkpoints("slowly", is_asynchronous=True)
    slow.save(actor, point(1))
    for _ in range(2):
        torch.rand(3)
        actor.train_step(batch, is_first=False)
        slow.poll()
    is_writing = slow.is_writing
    may_write.set()
    slow.wait()
    checkpoints("later", is_asynchronous=False).save(actor, point(3))
    return is_writing, ["at once", "slowly", "later"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slow_writer")
    write_model(folder / "model")
    write_family(folder / "with bias", "Glm4MoeForCausalLM")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_save_holds_the_state_at_its_beginning_whatever_trains_meanwhile(
    name: str, models: Path, tmp_path: Path
) -> None:
    world_size, model, tables = CASES[name]
    found = run_ranks(save_slowly, world_size, tmp_path, str(models / model), str(tmp_path), tables)
    assert [is_writing for is_writing, _ in found] == [True] * world_size
    at_once, slowly, later = (next(Path(tmp_path, each).glob("step_*")) for each in found[0][1])
    expected, saved, after = map(stored, (at_once, slowly, later))
    assert expected.keys() == saved.keys() == after.keys()
    assert [key for key in expected if not torch.equal(expected[key], saved[key])] == []
    moved = [key for key in expected if not torch.equal(expected[key], after[key])]
    for kind in ("exp_avg", "exp_avg_sq", "fp32_param", "decoder.layers", "expert_bias"):
        assert any(kind in key for key in moved) or not any(kind in key for key in expected), kind
    assert any("exp_avg_sq" in key for key in moved) and any("decoder" in key for key in moved)
    for rank in range(world_size):
        file = f"rng/rank_{rank:05d}.safetensors"
        random, of_slow, of_later = (load_file(each / file) for each in (at_once, slowly, later))
        assert random.keys() == of_slow.keys()
        assert all(torch.equal(random[key], of_slow[key]) for key in random)
        assert any(not torch.equal(random[key], of_later[key]) for key in random)
        remaining = f"remaining/rank_{rank:05d}.safetensors"
        assert (at_once / remaining).read_bytes() == (slowly / remaining).read_bytes()
    states = [json.loads((each / "state.json").read_text()) for each in (at_once, slowly, later)]
    assert states[0] == states[1] and states[1]["state"]["step"] == 1 and states[2]["state"]["step"] == 3

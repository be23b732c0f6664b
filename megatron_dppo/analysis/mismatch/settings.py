"""Derives the measurement's config from a run's: one rollout. Refuses runs that cannot be measured."""

from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.checks import RULES, check
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.runtime.process import world_size_from_launcher

FILES = ("mismatch.json", "tokens.jsonl", "mismatch.html", "mismatch.toml")
OF_TRAINING_ALONE = ("minibatches", "same_experiment", "sglang_weight_sync")
"""Rules that do not bind: no gradient steps of equal size, no run to resume, weights that go by disk."""


def measurement_config(
    configs: Sequence[Path], overrides: Sequence[str], engine: str | None = None, prompts: int | None = None
) -> Config:
    """Return the run's config with one rollout, each token trained once, and routes if it has experts."""
    given = [*overrides, *([f"rollout.engine={engine}"] if engine else [])]
    given += [f"rollout.prompts_per_rollout={prompts}"] if prompts else []
    config = load_config(configs, given)
    routes = "measure" if read_model_sizes(config.model.load).num_experts else "off"
    return load_config(
        configs,
        [
            *given,
            f"rollout.routing_replay={routes}",
            "algorithm.epochs_per_rollout=1",
            "optimizer.warmup_steps=0",
        ],
    )


def with_servers(config: Config, folder: Path, is_serving: bool) -> Config:
    """Return the config with its own server in `folder`, or without one if the run's servers are used."""
    sglang = config.rollout.sglang.model_copy(update={"num_own_servers": int(is_serving)})
    rollout = config.rollout.model_copy(update={"sglang": sglang})
    run = config.run.model_copy(update={"folder": folder}) if is_serving else config.run
    return config.model_copy(update={"rollout": rollout, "run": run})


def require_possible(config: Config, folder: Path, is_serving: bool) -> None:
    """Refuse impossible measurements, before anything loads."""
    rules = {name: rule for name, rule in RULES.items() if name not in OF_TRAINING_ALONE}
    problems = check(config, world_size_from_launcher(), rules)
    if is_serving and config.rollout.engine != "sglang":
        action = "Give --engine sglang, or leave --serve out."
        problems.append(Problem("--serve", f"rollout.engine = {config.rollout.engine!r}", "'sglang'", action))
    if (folder / FILES[0]).exists():
        action = "Give another folder with -o, or remove that file."
        problems.append(Problem("--out", f"{folder}, which holds {FILES[0]}", "no measurement there", action))
    if problems:
        raise ConfigError(problems)

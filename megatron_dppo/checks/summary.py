"""Summarises the run that a config describes in a few lines."""

from collections.abc import Iterator, Sequence

from megatron_dppo.algorithms import preset
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.checks.disk_rules import checkpoint_bytes
from megatron_dppo.checks.facts import TRAINING, Facts, prompt_files
from megatron_dppo.config.schema import Config
from megatron_dppo.config.settings import shown
from megatron_dppo.data.prompts.survey import Survey
from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.rewards import RewardChoice


def summary(config: Config, facts: Facts) -> str:
    """Return the run in lines of text: model, layout, data, algorithm, rollout, folder, checkpoints.

    Parts that could not be read are left out; a problem reports each of them.
    """
    lines = {
        "model": _model(config, facts),
        "layout": _layout(config, facts),
        "data": _data(config, facts),
        "evaluation": _evaluation(config, facts),
        "algorithm": _algorithm(config),
        "rollout": _rollout(config),
        "training": _training(config),
        "run": _run(config, facts),
        "checkpoints": _checkpoints(config, facts),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items() if text)


def _model(config: Config, facts: Facts) -> str:
    sizes = facts.model_sizes
    if sizes is None or isinstance(facts.model, Problem):
        return ""
    size = f", {_count(model_shape(facts.model).num_parameters)} parameters"
    experts = f", {sizes.num_experts} experts" if sizes.num_experts is not None else ""
    adapters = f", LoRA of rank {config.lora.rank}" if config.lora.rank else ""
    layers = f"{sizes.num_layers} layers{experts}{size}{adapters}"
    return f"{config.model.load}: {sizes.architecture}, {layers}; {config.model.dtype}"


def _layout(config: Config, facts: Facts) -> str:
    try:
        layout = Layout.of(config.parallel, facts.world_size)
    except ConfigError:
        processes = "1 process" if facts.world_size == 1 else f"{facts.world_size} processes"
        return f"does not divide {processes} (--world-size names another number)"
    return f"{layout}; {layout.data} data-parallel"


def _data(config: Config, facts: Facts) -> str:
    found = facts.surveys.get(TRAINING)
    reward = config.data.reward
    names = " + ".join(RewardChoice(reward).weights) or "none"
    return f"{_prompts(config, TRAINING, found)}; reward {names}" if found is not None else ""


def _evaluation(config: Config, facts: Facts) -> str:
    sets = [
        f"{key.split('.')[2]}: {_prompts(config, key, found)}"
        for key, found in facts.surveys.items()
        if key != TRAINING
    ]
    if config.evaluation.sets and not config.evaluation.every:
        return f"none: evaluation.every = 0 turns off {', '.join(config.evaluation.sets)}"
    if config.evaluation.sets:
        return "; ".join([*sets, f"after every {config.evaluation.every} rollouts"]) if sets else ""
    idle = sorted(config.evaluation.model_fields_set - {"sets"})
    return f"none; without a set, these do nothing: evaluation.{', evaluation.'.join(idle)}" if idle else "none"


def _prompts(config: Config, key: str, found: Survey) -> str:
    tokens = f", of up to {found.longest} tokens" if found.longest else ""
    too_long = f" ({found.num_too_long} too long)" if found.num_too_long else ""
    prompts = "1 prompt" if found.num_prompts == 1 else f"{found.num_prompts} prompts"
    return f"{prompt_files(config)[key]}, {prompts}{tokens}{too_long}"


def _algorithm(config: Config) -> str:
    overrides = overrides_in(config.algorithm.model_dump())
    try:
        objective = preset(config.algorithm.preset, **overrides)
    except ConfigError:
        return ""
    fields = [field for field in objective.fields_in_use if field != "delta"]
    values = ", ".join(f"{field} {shown(getattr(objective, field))}" for field in fields)
    return f"{config.algorithm.preset}: {values}"


def _rollout(config: Config) -> str:
    options = config.rollout
    num_samples = options.prompts_per_rollout * options.samples_per_prompt
    asked = f"{options.prompts_per_rollout} prompts x {options.samples_per_prompt} = {num_samples} responses"
    routes = f", routing replay {options.routing_replay}" if options.routing_replay != "off" else ""
    return f"{options.engine}, {asked} of up to {options.max_response_tokens} tokens{routes}"


def _training(config: Config) -> str:
    algorithm, optimizer = config.algorithm, config.optimizer
    steps = algorithm.minibatches_per_rollout * algorithm.epochs_per_rollout
    schedule = optimizer.schedule if optimizer.warmup_steps == 0 else f"{optimizer.schedule} after warm-up"
    return (
        f"{config.run.num_rollouts} rollouts x {steps} gradient steps = {config.num_gradient_steps}, "
        f"learning rate {optimizer.lr:g} ({schedule})"
    )


def _run(config: Config, facts: Facts) -> str:
    if facts.saved is None:
        return f"{config.run.folder}, new"
    done = f"{facts.saved.num_rollouts} of {config.run.num_rollouts} rollouts done"
    return f"{config.run.folder}, resumes from {facts.saved.checkpoint.name}: {done}"


def _checkpoints(config: Config, facts: Facts) -> str:
    num_bytes = checkpoint_bytes(config, facts)
    if num_bytes is None:
        return ""
    each = f"at least {_bytes(num_bytes)} each, {_bytes(facts.free_bytes)} free"
    kept = config.checkpoint.keep_last
    return f"{each}; the last {kept} stay" if kept else f"{each}; all stay"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number / 1024:.3g} KiB"


def lines_of(problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the problems as `check` prints them."""
    yield f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}:"
    yield from (f"- {problem}" for problem in problems)

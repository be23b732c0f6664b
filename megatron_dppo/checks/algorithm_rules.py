"""Rules about the objective, sampling and R3."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_dppo.algorithms import DIVERGENCES, PRESETS, Objective, preset
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem, did_you_mean
from megatron_dppo.kernels.encoding import require_compiled
from megatron_dppo.runtime.process import has_gpu


@rule("preset")
def _preset(config: Config, facts: Facts) -> Iterator[Problem]:
    """The preset exists."""
    name = config.algorithm.preset
    if name not in PRESETS:
        action = did_you_mean(name, PRESETS, "Choose one of these.")
        yield Problem("algorithm.preset", repr(name), f"one of {', '.join(PRESETS)}", action)


@rule("preset_fields")
def _preset_fields(config: Config, facts: Facts) -> Iterator[Problem]:
    """The overridden fields make an objective of this preset."""
    objective = _objective(config)
    if isinstance(objective, ConfigError):
        written = overrides_in(config.algorithm.model_dump())
        problems = (_where_written(problem, written) for problem in objective.problems)
        yield from dict.fromkeys(problems)  # one `delta` sets two fields, and would be reported twice


@rule("thresholds")
def _thresholds(config: Config, facts: Facts) -> Iterator[Problem]:
    """Each threshold of the trust region can act, and leaves something to learn; infinity turns one off."""
    objective = _objective(config)
    if not isinstance(objective, Objective):
        return
    written = overrides_in(config.algorithm.model_dump())
    found: list[Problem] = []
    for field, limit in _reached(objective).items():
        value = getattr(objective, field)
        if value == 0 or limit <= value < math.inf:
            effect = "drops whatever moved at all" if value == 0 else "never acts"
            expected = f"above 0 and below {limit:g}" if limit < math.inf else "above 0"
            usual = getattr(PRESETS[objective.name], field)
            action = f"Choose such a value, or inf to turn it off; the preset's own is {usual:g}."
            found.append(Problem(f"algorithm.{field}", f"{value:g}, which {effect}", expected, action))
    yield from dict.fromkeys(_where_written(problem, written) for problem in found)


def _reached(objective: Objective) -> dict[str, float]:
    """Return the thresholds that the objective's rule reads, each with the bound of the compared value."""
    if objective.rule == "divergence":
        limit = DIVERGENCES[objective.divergence].at_most
        return {"delta_low": limit, "delta_high": limit}
    if objective.rule == "negative":
        return {"delta_low": 1.0}  # mu - pi
    if objective.rule == "ratio":
        relaxed = {} if objective.relax == "none" else {"alpha": 1.0}  # mu
        return {"eps_low": 1.0, "eps_high": math.inf} | relaxed  # 1 - pi/mu
    return {}


@rule("known_to_kernels", needs="machine")
def _known_to_kernels(config: Config, facts: Facts) -> Iterator[Problem]:
    """On a GPU, the compiled kernels know the objective's rule and divergence."""
    objective = _objective(config)
    if isinstance(objective, Objective) and has_gpu():
        try:
            require_compiled(objective)
        except ConfigError as error:
            yield from (replace(problem, where="algorithm.preset") for problem in error.problems)


@rule("topk_log_probs")
def _topk_log_probs(config: Config, facts: Facts) -> Iterator[Problem]:
    """The engine returns as many log-probs as a topk_* divergence uses."""
    needed, returned = _top_k(config), config.rollout.num_topk_log_probs
    if needed is not None and returned < needed:
        expected = f"at least {needed}, the top_k of {config.algorithm.preset}"
        yield Problem("rollout.num_topk_log_probs", str(returned), expected, f"Set it to {needed}.")


@rule("topk_vocabulary")
def _topk_vocabulary(config: Config, facts: Facts) -> Iterator[Problem]:
    """No more top-K columns are asked for than the vocabulary has."""
    if facts.model_sizes is None:
        return
    asked = {"algorithm.top_k": _top_k(config), "rollout.num_topk_log_probs": config.rollout.num_topk_log_probs}
    for key, columns in asked.items():
        if columns is not None and columns > facts.model_sizes.vocab_size:
            expected = f"at most the vocabulary, {facts.model_sizes.vocab_size}"
            yield Problem(key, str(columns), expected, "Lower it.")


@rule("sampling_distribution")
def _sampling_distribution(config: Config, facts: Facts) -> Iterator[Problem]:
    """Training samples from mu itself, nothing cut off and nothing penalised."""
    expected_and_found = {
        "rollout.top_p": (1.0, config.rollout.top_p),
        "rollout.top_k": (-1, config.rollout.top_k),
        "rollout.repetition_penalty": (1.0, config.rollout.repetition_penalty),
    }
    action = "Remove it: the ratio pi/mu needs mu to be the distribution that was sampled from."
    for key, (expected, found) in expected_and_found.items():
        if found != expected:
            yield Problem(key, str(found), f"{expected} (off)", action)


@rule("group_size")
def _group_size(config: Config, facts: Facts) -> Iterator[Problem]:
    """Each group has samples to compare."""
    if config.rollout.samples_per_prompt < 2:
        expected = "at least 2: the advantage of a lone sample is always 0"
        action = "Raise it; 8 is usual."
        yield Problem("rollout.samples_per_prompt", str(config.rollout.samples_per_prompt), expected, action)


@rule("minibatches")
def _minibatches(config: Config, facts: Facts) -> Iterator[Problem]:
    """Prompts divide into mini-batches, and those over the data-parallel ranks."""
    try:
        data_parallel = Layout.of(config.parallel, facts.world_size).data
    except ConfigError:
        return
    parts = config.algorithm.minibatches_per_rollout * data_parallel
    if config.rollout.prompts_per_rollout % parts:
        expected = (
            f"a multiple of {parts} (algorithm.minibatches_per_rollout = "
            f"{config.algorithm.minibatches_per_rollout} times {data_parallel} data-parallel ranks)"
        )
        found = str(config.rollout.prompts_per_rollout)
        action = f"Use {-(-config.rollout.prompts_per_rollout // parts) * parts}."
        yield Problem("rollout.prompts_per_rollout", found, expected, action)


@rule("replay_needs_experts")
def _replay_needs_experts(config: Config, facts: Facts) -> Iterator[Problem]:
    """R3 is for models with experts."""
    sizes = facts.model_sizes
    if config.rollout.routing_replay != "off" and sizes is not None and sizes.num_experts is None:
        found = f"{config.rollout.routing_replay!r} on a dense model"
        yield Problem("rollout.routing_replay", found, "'off'", "A dense model has no routes; set it to 'off'.")


@rule("replay_without_router_fusion")
def _replay_without_router_fusion(config: Config, facts: Facts) -> Iterator[Problem]:
    """R3 and Megatron's fused router exclude each other."""
    if config.rollout.routing_replay != "off" and config.megatron.get("moe_router_fusion"):
        found = f"true with rollout.routing_replay = {config.rollout.routing_replay!r}"
        expected = "false: the fused router returns before routes are replayed"
        yield Problem("megatron.moe_router_fusion", found, expected, "Remove it, or turn R3 off.")


@rule("paired_routing")
def _paired_routing(config: Config, facts: Facts) -> Iterator[Problem]:
    """The paired forward has routes to replay."""
    if config.tracking.paired_routing_every and config.rollout.routing_replay == "off":
        found = f"{config.tracking.paired_routing_every} with rollout.routing_replay = 'off'"
        action = "Set rollout.routing_replay to 'measure' or 'replay', which capture routes."
        yield Problem("tracking.paired_routing_every", found, "0", action)


@rule("shadow_presets")
def _shadow_presets(config: Config, facts: Facts) -> Iterator[Problem]:
    """Presets that are evaluated beside the step exist, and the batches hold what they need."""
    objective = _objective(config)
    for name in config.tracking.shadow_presets:
        if name not in PRESETS:
            action = did_you_mean(name, PRESETS, "Choose from these.")
            yield Problem("tracking.shadow_presets", repr(name), f"names among {', '.join(PRESETS)}", action)
        elif PRESETS[name].needs_topk and not config.rollout.num_topk_log_probs:
            found = f"{name!r} with rollout.num_topk_log_probs = 0"
            action = f"Set rollout.num_topk_log_probs to {PRESETS[name].top_k}, or leave it out."
            yield Problem("tracking.shadow_presets", found, "presets that need no Top-K", action)
        elif PRESETS[name].anchor == "recomputed" and getattr(objective, "anchor", None) == "rollout":
            found = f"{name!r} with algorithm.preset = {config.algorithm.preset!r}"
            expected = "presets that need no log-probs recomputed before the step"
            action = "Train with anchor = 'recomputed', which recomputes them, or leave it out."
            yield Problem("tracking.shadow_presets", found, expected, action)


def _objective(config: Config) -> Objective | ConfigError | None:
    """Return the configured objective, or why there is none; None where the preset is unknown."""
    if config.algorithm.preset not in PRESETS:
        return None
    try:
        return preset(config.algorithm.preset, **overrides_in(config.algorithm.model_dump()))
    except ConfigError as error:
        return error


def _where_written(problem: Problem, written: Mapping[str, Any]) -> Problem:
    """Return a preset's problem under the key that the user wrote."""
    field = problem.where.rpartition(".")[2]
    if field not in written and field.startswith("delta_"):
        return replace(problem, where="algorithm.delta", action=problem.action.replace(field, "delta"))
    return replace(problem, where=f"algorithm.{field}")


def _top_k(config: Config) -> int | None:
    """Return the number of columns of mu that the objective uses; None where it uses none."""
    objective = _objective(config)
    return objective.top_k if isinstance(objective, Objective) and objective.needs_topk else None

"""Rules about the objective, its inputs, shadow presets and R3."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron_dppo.algorithms import PRESETS, Objective, preset
from megatron_dppo.algorithms.inputs import RULE_DIVERGENCE, RULE_OVER
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.algorithms.trial import try_objective
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.checks.facts import Facts, rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem, did_you_mean
from megatron_dppo.runtime.user_code import describe_error, problem_with_path


@rule("preset")
def _preset(config: Config, facts: Facts) -> Iterator[Problem]:
    """The preset exists."""
    name = config.algorithm.preset
    if ":" in name:
        problem = problem_with_path("algorithm.preset", name, "package.module:function")
        if problem is not None:
            yield problem
    elif name not in PRESETS:
        action = did_you_mean(name, PRESETS, "Choose one of these.")
        yield Problem("algorithm.preset", repr(name), f"one of {', '.join(PRESETS)}", action)


@rule("preset_fields")
def _preset_fields(config: Config, facts: Facts) -> Iterator[Problem]:
    """The overridden fields make an objective of this preset."""
    objective = objective_of(config)
    if isinstance(objective, ConfigError):
        written = overrides_in(config.algorithm.model_dump())
        problems = (_where_written(problem, written) for problem in objective.problems)
        yield from dict.fromkeys(problems)  # one `delta` sets two fields, and would be reported twice


@rule("own_rule", needs="machine")
def _own_rule(config: Config, facts: Facts) -> Iterator[Problem]:
    """Custom rules, for training or as shadows, return valid weights for the tokens of a small batch."""
    objective = objective_of(config)
    if isinstance(objective, Objective):
        yield from problems_with_own_rule("algorithm.preset", objective)
    for name in config.tracking.shadow_presets:
        shadow = shadow_of(config, name)
        if isinstance(shadow, Objective):
            yield from problems_with_own_rule("tracking.shadow_presets", shadow, how_to_set=_of_shadow(name))


def problems_with_own_rule(
    key: str, objective: Objective, *, how_to_set: Callable[[str, str], str] | None = None
) -> Iterator[Problem]:
    """Yield the problems of a custom rule's weights for a small batch.

    Args:
        key: Setting that names the rule.
        objective: Objective with a built-in or a custom rule.
        how_to_set: Returns a sentence on how to set a field that is not a key of [algorithm].
    """
    if objective.own is None:
        return
    try:
        try_objective(objective)
    except ConfigError as error:
        for problem in error.problems:
            if problem.where not in (RULE_OVER, RULE_DIVERGENCE):
                yield replace(problem, where=key)
            elif how_to_set is None:
                yield problem
            else:
                field, value = problem.where.removeprefix("algorithm."), problem.expected.split("'")[1]
                yield replace(problem, where=key, action=how_to_set(field, value))
    except Exception as error:  # noqa: BLE001  whatever the function raises
        found = f"{objective.name!r}, which fails on a small batch: {describe_error(error)}"
        action = "Correct the function; megatron_dppo/algorithms/README.md shows one."
        yield Problem(key, found, "a weight for each token", action)


def _of_shadow(name: str) -> Callable[[str, str], str]:
    return lambda field, value: f"Set tracking.shadow_options.{name!r}.{field} = {value!r}.".replace("'", '"')


@rule("thresholds")
def _thresholds(config: Config, facts: Facts) -> Iterator[Problem]:
    """Each threshold of the trust region can act, and does not drop all updates; infinity turns it off."""
    objective = objective_of(config)
    if not isinstance(objective, Objective):
        return
    written = overrides_in(config.algorithm.model_dump())
    found: list[Problem] = []
    for field, known in objective.numbers.items():
        limit, value = objective.bound_of(field), getattr(objective, field)
        if limit is None:
            continue
        if (value == 0 and not known.may_be_0) or limit <= value < math.inf:
            effect = "drops whatever moved at all" if value == 0 else "never acts"
            expected = f"above 0 and below {limit:g}" if limit < math.inf else "above 0"
            usual = getattr(PRESETS[objective.name], field)
            action = f"Choose such a value, or inf to turn it off; {objective.name} has {usual:g}."
            found.append(Problem(f"algorithm.{field}", f"{value:g}, which {effect}", expected, action))
    found += _bands_without_1(objective)
    yield from dict.fromkeys(_where_written(problem, written) for problem in found)


def _bands_without_1(objective: Objective) -> Iterator[Problem]:
    """Yield a problem for bounds of pi'/mu that drop tokens on which trainer and engine agree."""
    for field in (field for field, known in objective.numbers.items() if known.around_1):
        is_low, value = field.endswith("_low"), getattr(objective, field)
        expected = "at most 1" if is_low else "at least 1"
        if value > 1 if is_low else 0 < value < 1:
            found = f"{value:g}, which drops tokens on which trainer and engine agree"
            action = f"Choose such a value; {objective.name} has {getattr(PRESETS[objective.name], field):g}."
            yield Problem(f"algorithm.{field}", found, expected, action)


@rule("topk_log_probs")
def _topk_log_probs(config: Config, facts: Facts) -> Iterator[Problem]:
    """The engine returns all the log-probs that a topk_* divergence uses."""
    needed, returned = _top_k(config), config.rollout.num_topk_log_probs
    if needed is not None and returned < needed:
        expected = f"at least {needed}, the top_k of {config.algorithm.preset}"
        yield Problem("rollout.num_topk_log_probs", str(returned), expected, f"Set it to {needed}.")


@rule("topk_vocabulary")
def _topk_vocabulary(config: Config, facts: Facts) -> Iterator[Problem]:
    """The number of top-K columns is at most the vocabulary's size."""
    if facts.model_sizes is None:
        return
    wanted = {
        "algorithm.top_k": _top_k(config),
        "rollout.num_topk_log_probs": config.rollout.num_topk_log_probs,
    }
    for key, columns in wanted.items():
        if columns is not None and columns > facts.model_sizes.vocab_size:
            expected = f"at most the vocabulary, {facts.model_sizes.vocab_size}"
            yield Problem(key, str(columns), expected, "Lower it.")


@rule("minibatches")
def _minibatches(config: Config, facts: Facts) -> Iterator[Problem]:
    """Prompts divide into mini-batches, and mini-batches over the data-parallel ranks."""
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
    """R3 and R2 are for models with experts."""
    sizes = facts.model_sizes
    if sizes is None or sizes.num_experts is not None:
        return
    if config.rollout.routing_replay != "off":
        found = f"{config.rollout.routing_replay!r} on a dense model"
        yield Problem("rollout.routing_replay", found, "'off'", "A dense model has no routes; set it to 'off'.")
    if config.algorithm.replay_recomputed_routes:
        action = "A dense model has no routes; leave it out."
        yield Problem("algorithm.replay_recomputed_routes", "true on a dense model", "false", action)


@rule("routes_of_the_anchor")
def _routes_of_the_anchor(config: Config, facts: Facts) -> Iterator[Problem]:
    """R2 replays the routes of an anchor that is recomputed."""
    where, objective = "algorithm.replay_recomputed_routes", objective_of(config)
    if config.algorithm.replay_recomputed_routes and getattr(objective, "anchor", None) == "rollout":
        found, expected = "true, and no log-probs are recomputed", "algorithm.anchor = 'recomputed'"
        action = (
            "Set algorithm.anchor = 'recomputed', or replay the rollout's: rollout.routing_replay = 'replay'."
        )
        yield Problem(where, found, expected, action)


@rule("replay_without_router_fusion")
def _replay_without_router_fusion(config: Config, facts: Facts) -> Iterator[Problem]:
    """Megatron's fused router excludes R3 and R2."""
    if config.has_routes and config.megatron.get("moe_router_fusion"):
        replay = config.rollout.routing_replay
        key = "rollout.routing_replay" if replay != "off" else "algorithm.replay_recomputed_routes"
        found = f"true with {key} = {repr(replay) if replay != 'off' else 'true'}"
        expected = "false: the fused router returns before routes are replayed"
        yield Problem("megatron.moe_router_fusion", found, expected, f"Remove it, or set {key} to off.")


@rule("shadow_presets")
def _shadow_presets(config: Config, facts: Facts) -> Iterator[Problem]:
    """Shadow presets exist, and the batches have their inputs."""
    objective, names = objective_of(config), config.tracking.shadow_presets
    for name in config.tracking.shadow_options:
        if name not in names:
            action = did_you_mean(name, names, "Add it to tracking.shadow_presets, or remove the table.")
            yield Problem("tracking.shadow_options", repr(name), "names in tracking.shadow_presets", action)
    for name in names:
        shadow = shadow_of(config, name)
        if shadow is None:
            action = did_you_mean(name, PRESETS, "Choose from these.")
            expected = f"names among {', '.join(PRESETS)}, or package.module:function"
            yield Problem("tracking.shadow_presets", repr(name), expected, action)
        elif isinstance(shadow, ConfigError):
            key = f"tracking.shadow_options.{name}" if name in config.tracking.shadow_options else ""
            key = key or "tracking.shadow_presets"
            yield from dict.fromkeys(replace(problem, where=key) for problem in shadow.problems)
        elif shadow.needs_topk and not config.rollout.num_topk_log_probs:
            found = f"{name!r} with rollout.num_topk_log_probs = 0"
            action = f"Set rollout.num_topk_log_probs to {shadow.top_k}, or leave it out."
            yield Problem("tracking.shadow_presets", found, "presets that need no Top-K", action)
        elif shadow.anchor == "recomputed" and getattr(objective, "anchor", None) == "rollout":
            found = f"{name!r} with algorithm.preset = {config.algorithm.preset!r}"
            expected = "presets that need no log-probs recomputed before the step"
            action = "Train with anchor = 'recomputed', which recomputes them, or leave it out."
            yield Problem("tracking.shadow_presets", found, expected, action)


def objective_of(config: Config) -> Objective | ConfigError | None:
    """Return the configured objective, or the error in it; None if the preset is unknown."""
    return _named(config.algorithm.preset, **overrides_in(config.algorithm.model_dump()))


def shadow_of(config: Config, name: str) -> Objective | ConfigError | None:
    """Return the objective of a name in tracking.shadow_presets, with its options, or the error in it."""
    return _named(name, **config.tracking.shadow_options.get(name, {}))


def _named(name: str, **overrides: Any) -> Objective | ConfigError | None:
    """Return an objective by its name, or the error in it; None if no preset or function has this name."""
    if name not in PRESETS and problem_with_path("", name, "package.module:function") is not None:
        return None
    try:
        return preset(name, **overrides)
    except ConfigError as error:
        return error
    except Exception as error:  # noqa: BLE001  whatever the module raises
        found, expected = f"{name!r}, which fails ({describe_error(error)})", "an importable function"
        return ConfigError(Problem("algorithm.preset", found, expected, "Correct the module."))


def _where_written(problem: Problem, written: Mapping[str, Any]) -> Problem:
    """Return a preset's problem under the key that the user wrote."""
    field = problem.where.rpartition(".")[2]
    if field not in written and field.startswith("delta_"):
        return replace(problem, where="algorithm.delta", action=problem.action.replace(field, "delta"))
    return replace(problem, where=f"algorithm.{field}")


def _top_k(config: Config) -> int | None:
    """Return the number of columns of mu that the objective uses; None if it uses none."""
    objective = objective_of(config)
    return objective.top_k if isinstance(objective, Objective) and objective.needs_topk else None

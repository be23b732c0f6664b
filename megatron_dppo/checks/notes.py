"""What `check` prints about a config that it does not refuse: a summary, and notes on data and settings.

`examples/guides/what_the_paper_found.md` lists the findings of the paper (arXiv 2602.04879), and its test reads
the notes about them.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.algorithms import Objective, preset, trial
from megatron_dppo.algorithms.paper_rules import PAPER, Negative
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.megatron_options import may_use_transformer_engine, shares_prefixes
from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.architectures.sizes import config_file, end_tokens
from megatron_dppo.checks.algorithm_rules import objective_of, problems_with_own_rule, shadow_of
from megatron_dppo.checks.data_rules import THINKING_ENDS, find_misread, iterate_surveys, rewards_of
from megatron_dppo.checks.facts import TRAINING, Facts, prompt_files, section_of
from megatron_dppo.checks.model_rules import rounded_part_doubts
from megatron_dppo.checks.run_rules import checkpoint_bytes
from megatron_dppo.checks.sampling_rules import conversation_doubts, rounding_remarks
from megatron_dppo.config.load import shown
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.final_answer import KINDS, excerpt, final_answer, number_of, text_only_doubt
from megatron_dppo.data.prompts.shares import parts_of
from megatron_dppo.data.prompts.survey import Survey
from megatron_dppo.data.prompts.templates import turn_ends
from megatron_dppo.errors import ConfigError, DataError, Problem
from megatron_dppo.rewards import RewardChoice
from megatron_dppo.runtime.files import binary_count


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
    return f"{layout}; {layout.data} data-parallel{_sharing(config, facts)}"


def _sharing(config: Config, facts: Facts) -> str:
    if not shares_prefixes(config, facts.model_sizes):
        return ""
    is_open = may_use_transformer_engine(config, facts.model_sizes)
    return ", prefixes shared" + " if the layers are torch's" * is_open


def _data(config: Config, facts: Facts) -> str:
    found = {key: each for key, each in facts.surveys.items() if section_of(key) == TRAINING}
    names = " + ".join(RewardChoice(config.data.reward).weights) or "none"
    described = [_prompts(config, key, each) for key, each in found.items()]
    if len(files := config.data.prompts) > 1 and len(found) == len(files):
        parts = parts_of(files, [each.num_prompts for each in found.values()])
        total = sum(part.weight for part in parts)
        pairs = zip(parts, described, strict=True)
        described = [f"{part.name} {part.weight / total:.1%}: {text}" for part, text in pairs]
    return f"{'; '.join(described)}; reward {names}" if found else ""


def _evaluation(config: Config, facts: Facts) -> str:
    sets = [
        f"{section_of(key).split('.', 2)[2]}: {_prompts(config, key, found)}"
        for key, found in facts.surveys.items()
        if section_of(key) != TRAINING
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
    prompts = f"{options.prompts_per_rollout} prompts x {options.samples_per_prompt} = {num_samples} responses"
    routes = f", routing replay {options.routing_replay}" if options.routing_replay != "off" else ""
    return f"{options.engine}, {prompts} of up to {options.max_response_tokens} tokens{routes}"


def _training(config: Config) -> str:
    algorithm, optimizer = config.algorithm, config.optimizer
    schedule = optimizer.schedule if optimizer.warmup_steps == 0 else f"{optimizer.schedule} after warm-up"
    return (
        f"{config.run.num_rollouts} rollouts x {algorithm.steps_per_rollout} gradient steps = "
        f"{config.num_gradient_steps}, learning rate {optimizer.lr:g} ({schedule})"
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
    each = f"at least {binary_count(num_bytes)} each, {binary_count(facts.free_bytes)} free"
    kept = config.checkpoint.keep_last
    return f"{each}; the last {kept} stay" if kept else f"{each}; all stay"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def lines_of(problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the problems as `check` prints them."""
    yield f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}:"
    yield from (f"- {problem}" for problem in problems)


_MAY_EARN_NOTHING = "a response with only the right answer may be scored as wrong."


def doubts(config: Config, facts: Facts) -> list[str]:
    """Return doubts about the files of prompts, the tokenizer and the weights, as sentences."""
    found = [doubt for _, path, each in iterate_surveys(config, facts) for doubt in _of_prompts(path, each)]
    found += [x for each in iterate_surveys(config, facts, is_once=False) for x in _of_answers(config, *each)]
    found += [*_of_turn_ends(config, facts), *conversation_doubts(config, facts), *rounded_part_doubts(config)]
    return list(dict.fromkeys(found))


def _of_prompts(path: Path, found: Survey) -> Iterator[str]:
    for oddity, count in found.oddities.items():
        yield f"{count} of {found.num_prompts} prompts of {path} {oddity}."
    if found.unread_columns:
        names = ", ".join(found.unread_columns)
        yield f"columns of {path} that are not read: {names}. Prompt and reward do not depend on them."


def _of_answers(config: Config, key: str, path: Path, found: Survey) -> Iterator[str]:
    rewards = rewards_of(config, key)
    for kind, rows in found.odd_answers.items() if rewards else ():
        count = found.num_answers[kind]
        share = f"{count} of {found.num_prompts} answers of {path} {KINDS[kind]}"
        if kind != "with_words" and 2 * count > found.num_prompts:
            continue  # a rule is about it
        untried = [row for row in rows if final_answer(row.prompt.answer) is None]
        if kind == "with_words":
            untried = [row for row in rows if number_of(row.prompt.answer) is None]
        for row in untried[:1]:
            yield f"{share}, such as {excerpt(row.prompt.answer)} in row {row.number}: {_MAY_EARN_NOTHING}"
        for reward in rewards if not untried else ():
            wrong = find_misread(config, reward, rows)
            if wrong is not None:
                cell, number = excerpt(wrong.row.prompt.answer), wrong.row.number
                yield f"{share}: {reward!r} scores {wrong.response!r} as wrong for {cell} in row {number}."
    if "math" in rewards:
        doubt = text_only_doubt(found.bare_answers, found.num_answers["bare"], f" of {path}")
        yield from [] if doubt is None else [doubt]
    if config.data.thinking == "require" and rewards and 0 < 2 * found.num_closed_thoughts <= found.num_prompts:
        count = found.num_closed_thoughts
        yield (
            f"{count} of {found.num_prompts} prompts of {path} end with {THINKING_ENDS}: with data.thinking = "
            "'require' their responses are wrong unless they write it again."
        )


def _of_turn_ends(config: Config, facts: Facts) -> Iterator[str]:
    tokenizer, file = facts.usable_tokenizer, config_file(config.model.load)
    is_chat = any(found.num_chats for found in facts.surveys.values())
    if not is_chat or file is None or tokenizer is None:
        return
    assert not isinstance(facts.model, Problem), "its tokenizer was loaded"
    try:
        ends = end_tokens(file.parent, facts.model.get("eos_token_id"))
        of_template = turn_ends(tokenizer)
    except (DataError, ValueError, TypeError, AttributeError, json.JSONDecodeError):
        return
    if of_template and not set(of_template) & set(ends):
        generation = file.parent / "generation_config.json"
        where = generation if generation.is_file() else file
        those = ", ".join(_named(tokenizer, token) for token in ends) or "no token"
        yield (
            f"the chat template ends a turn with {_named(tokenizer, of_template[0])}, which ends no response: "
            f"responses end with {those} (eos_token_id of {where}), and continue after the end of a turn. If "
            f"the model was trained to end turns with it, add {of_template[0]} to eos_token_id of {generation}."
        )


def _named(tokenizer: Any, token: int) -> str:
    return f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})"


def remarks(config: Config) -> list[str]:
    """Return notes on settings that may surprise: rounding, findings of the paper, custom rules."""
    objective = objective_of(config)
    found = findings_against(config, objective) if isinstance(objective, Objective) else ()
    own = (_aggregation_remarks, _own_rule_remarks)
    return [*rounding_remarks(config), *found, *(remark for of in own for remark in of(config))]


def _aggregation_remarks(config: Config) -> Iterator[str]:
    preset, aggregation = config.algorithm.preset, config.algorithm.aggregation
    if preset in _OF_RESPONSE_MEANS and aggregation != "seq_mean_token_mean":
        yield f"algorithm.aggregation is {aggregation!r}; {preset} was published with 'seq_mean_token_mean'."


def _own_rule_remarks(config: Config) -> Iterator[str]:
    """Yield the doubts about custom rules that work on a small batch; a rule that fails there is a problem."""
    named = {"algorithm.preset": objective_of(config)}
    named |= {
        f"tracking.shadow_presets {name}": shadow_of(config, name) for name in config.tracking.shadow_presets
    }
    for key, objective in named.items():
        if isinstance(objective, Objective) and not any(problems_with_own_rule(key, objective)):
            yield from (f"{key}: {doubt}" for doubt in trial.doubts(objective))


# The mean over responses of the means over their tokens, in the papers of these presets.
_OF_RESPONSE_MEANS = ("gspo", "icepop", "sapo", "gmpo")
_SMALLEST_CAP = 5.0  # Appendix F has it in all runs
_SAFE_NEGATIVE_DELTA = 0.5  # of section 5.3's minimal mask; the run with 0.8 collapsed
_LR_OF_FULL_WEIGHTS = 1e-6  # Table 1; its LoRA run has 1e-5
_WITHOUT_TRUST_REGION = (
    "The paper's runs without a trust region collapsed, at a learning rate of 1e-6 too "
    "(arXiv 2602.04879, section 5, Takeaway 1)."
)


def findings_against(config: Config, objective: Objective) -> Iterator[str]:
    """Yield a sentence on each finding of the paper that a config goes against.

    Shadow presets train nothing and get no remark.
    """
    yield from _about_the_trust_region(config, objective)
    yield from _about_the_anchor(objective)
    if objective.ratio_cap < _SMALLEST_CAP:
        yield (
            f"algorithm.ratio_cap is {objective.ratio_cap:g}: importance weights pi/mu above it are truncated. "
            "The paper found that truncation harms training (section 5.4). Its large runs have 5 (Appendix F)."
        )
    yield from _about_costs(config, objective)
    if config.algorithm.normalize_advantage_std and config.algorithm.preset in PAPER:
        yield (
            "algorithm.normalize_advantage_std is true. The paper subtracts the group's mean from rewards, and "
            "does not divide by the standard deviation (section 4.1, Appendix D)."
        )
    if config.lora.rank > 0 and config.optimizer.lr <= _LR_OF_FULL_WEIGHTS:
        yield (
            f"lora.rank is {config.lora.rank} and optimizer.lr {config.optimizer.lr:g}. The paper trains "
            "adapters with 1e-5, and full weights with 1e-6 (Table 1, Appendix F)."
        )


def _about_the_trust_region(config: Config, objective: Objective) -> Iterator[str]:
    name = config.algorithm.preset
    num_steps = config.algorithm.steps_per_rollout
    bounds_negative, bounds_positive = objective.bounded_signs()
    if bounds_negative and num_steps == 1 and _compares_with_itself(objective):
        yield (
            f"algorithm.preset {name!r} has no trust region here: with one gradient step per rollout the "
            f"policy is the recomputed anchor, and no token is dropped. {_WITHOUT_TRUST_REGION}"
        )
    elif not bounds_negative and not bounds_positive:
        yield (
            f"algorithm.preset {name!r} has no trust region here: no token is dropped, however far it moves. "
            f"{_WITHOUT_TRUST_REGION}"
        )
    elif not bounds_negative:
        yield (
            f"algorithm.preset {name!r} bounds no token with a negative advantage here. In the paper a few "
            "updates of such tokens, far outside the trust region, cause the collapse (section 5.3, "
            "Takeaway 3)."
        )
    if isinstance(objective, Negative) and _SAFE_NEGATIVE_DELTA < objective.delta_low < math.inf:
        yield (
            f"algorithm.delta is {objective.delta_low:g}. The paper's run with this mask was stable with 0.5 "
            "and collapsed with 0.8 (section 5.3)."
        )


def _about_the_anchor(objective: Objective) -> Iterator[str]:
    if not objective.reads_anchor and objective.anchor == "recomputed":
        yield (
            "algorithm.anchor is 'recomputed', and no mask reads it here. It costs one more forward over each "
            "rollout, about 25 % of the training cost in the paper (section 5.2, Takeaway 2)."
        )
    elif _compares_with_itself(objective):
        yield (
            "algorithm.anchor is 'recomputed'. The paper's runs with this anchor collapsed, and its runs with "
            "the rollout policy as anchor did not. The forward that recomputes log-probs is about 25 % of the "
            "training cost in the paper (section 5.2, Takeaway 2)."
        )


def _about_costs(config: Config, objective: Objective) -> Iterator[str]:
    """Yield remarks on settings that cost more than they gained in the paper."""
    name = config.algorithm.preset
    if name in PAPER and objective.needs_topk:
        binary = name.replace("topk", "binary")
        yield (
            f"algorithm.preset is {name!r}. In the paper Top-K was no better than Binary (Appendix G.2), and "
            f"{binary!r} needs no Top-K log-probs from the engine."
        )
    if name in PAPER and objective.rule in ("none", "ratio") and config.rollout.routing_replay == "replay":
        yield (
            f"rollout.routing_replay is 'replay' with {name!r}. In the paper DPPO without R3 was better than "
            "its baselines with R3 (section 7)."
        )


def _compares_with_itself(objective: Objective) -> bool:
    """Return whether the rule compares the policy only with its own log-probs before the step."""
    return objective.anchor == "recomputed" and objective.reads_anchor and not objective.reads_mu

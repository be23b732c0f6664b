"""Rules about the layer implementation (`model.layer_spec`), and about `[lora]`."""

from collections.abc import Iterator

from megatron_dppo.architectures.registry import FAMILIES, family_of
from megatron_dppo.architectures.spec_choice import library_problems, transformer_engine_limits
from megatron_dppo.architectures.weight_map import linears_of
from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem, did_you_mean


@rule("layer_spec", needs="machine")
def _layer_spec(config: Config, facts: Facts) -> Iterator[Problem]:
    """Transformer Engine can be used if the config selects its layers."""
    if facts.transformer_engine is not None:
        yield from library_problems(facts.transformer_engine)


@rule("layer_spec_limits")
def _layer_spec_limits(config: Config, facts: Facts) -> Iterator[Problem]:
    """Transformer Engine's layers support the config that selects them."""
    if config.model.layer_spec == "transformer_engine":
        yield from transformer_engine_limits(config, facts.model_sizes)


@rule("lora_targets")
def _lora_targets(config: Config, facts: Facts) -> Iterator[Problem]:
    """Every target is a linear of the model, and there is at least one."""
    if not config.lora.rank or isinstance(facts.model, Problem):
        return
    if facts.architecture not in FAMILIES:
        return
    known = list(dict.fromkeys(name for rule in family_of(facts.model).rules for name in linears_of(rule)))
    expected = f"linears of {facts.architecture}: {', '.join(known)}"
    if not config.lora.targets:
        yield Problem("lora.targets", "an empty list", expected, "Name one, or set lora.rank to 0.")
    for name in config.lora.targets:
        if name not in known:
            action = did_you_mean(name, known, "Remove it.")
            yield Problem("lora.targets", f"{name!r}, which matches nothing", expected, action)


@rule("lora_experts")
def _lora_experts(config: Config, facts: Facts) -> Iterator[Problem]:
    """Adapters of experts can be computed, and written so that peft reads all of them."""
    sizes = facts.model_sizes
    if not config.lora.rank or sizes is None or sizes.num_experts is None or isinstance(facts.model, Problem):
        return
    of_experts = [linears_of(each) for each in family_of(facts.model).rules if each.is_expert]
    known = [linear for linears in of_experts for linear in linears]
    targets = set(config.lora.targets) & set(known)
    if not targets:
        return
    if config.lora.rank % 8:
        expected = "a multiple of 8 if experts have adapters: their grouped products need rows of 16 bytes"
        yield Problem("lora.rank", str(config.lora.rank), expected, f"Use {-(-config.lora.rank // 8) * 8}.")
    for fused in of_experts:
        if 0 < len(targets & set(fused)) < len(fused):
            found = f"one of {' and '.join(fused)} on a model with experts"
            expected = "both or neither: in transformers they are one weight, and peft adapts all of it"
            yield Problem("lora.targets", found, expected, "Name both, or neither.")
    others = ["dense layers besides layers with experts"] * (len(sizes.moe_layers) < sizes.num_layers)
    others += ["shared experts"] * bool(sizes.shared_expert_intermediate_size)
    if others:
        named = ", ".join(sorted(targets))
        found = f"{named} on a model that has {' and '.join(others)}"
        expected = "only attention's linears: peft would not read the other adapters"
        yield Problem("lora.targets", found, expected, f"Leave out {', '.join(known[:-1])} and {known[-1]}.")

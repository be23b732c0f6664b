"""Rules about the model, its layers and adapters, the parallel layout, and the reference policy."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace

import torch

from megatron_dppo.architectures.layout import layout_problems
from megatron_dppo.architectures.megatron_options import (
    library_problems,
    shares_prefixes,
    transformer_engine_limits,
)
from megatron_dppo.architectures.published_names import stays_float32
from megatron_dppo.architectures.registry import (
    FAMILIES,
    architecture_problem,
    family_of,
    read_hf_config,
    read_model_sizes,
    variant_problems,
)
from megatron_dppo.architectures.sizes import ModelSizes, architecture_of, config_file
from megatron_dppo.architectures.weight_map import linears_of
from megatron_dppo.checkpoints.convert.sources import source_of
from megatron_dppo.checkpoints.hf_folder import require_one_set
from megatron_dppo.checkpoints.model_files import WeightFilesError
from megatron_dppo.checks.facts import Facts, rule
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.memory import rollout_bytes_bound
from megatron_dppo.errors import CheckpointError, ConfigError, ConversionError, Problem, did_you_mean

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_REFERENCE = "model.reference"
_LAYER = re.compile(r"model\.layers\.\d+\.|(?<=\.experts\.)\d+\.")
_SHOWN = 3  # parts in a sentence
_MAY_DIFFER = ("max_position_embeddings",)


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
    if FAMILIES[sizes.architecture].has_interleaved_stacks:
        found = f"{', '.join(sorted(targets))} on a model of {sizes.architecture}"
        expected = "only attention's linears: peft adapts the columns of gate and up, which take turns, as one"
        yield Problem("lora.targets", found, expected, "Leave out the linears of experts.")
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


@rule("rollout_memory")
def _rollout_memory(config: Config, facts: Facts) -> Iterator[Problem]:
    """The data of rollouts fits into the host memory reserved for it, even if every response is truncated."""
    sizes, parallel = facts.model_sizes, config.parallel
    if sizes is None:
        return
    routing = sizes.routing if config.has_routes else None
    num_groups = max(facts.world_size // (parallel.tensor * parallel.pipeline * parallel.context), 1)
    is_shared = shares_prefixes(config, sizes)
    bound = rollout_bytes_bound(config, facts.world_size, num_groups, routing, shares_prefixes=is_shared)
    bound /= 1 << 30
    if bound > config.rollout.max_data_gib:
        options, lag = config.rollout, config.rollout.lag
        of = f"{lag + 1} rollouts, {lag} of them sampled ahead," if lag else "a rollout"
        if options.max_staleness:
            of = f"a rollout in addition to {options.over_sampling:g} times its number of open groups,"
        first = "rollout.lag, " * bool(lag) + "rollout.over_sampling, " * bool(options.over_sampling > 1)
        yield Problem(
            "rollout.max_data_gib",
            f"{of} of up to {bound:.1f} GiB on each rank",
            f"at most {options.max_data_gib:g} GiB",
            f"Lower {first}rollout.prompts_per_rollout, samples_per_prompt, "
            "max_response_tokens or num_topk_log_probs, use more data-parallel ranks, or raise the limit if "
            "the host has the memory.",
        )


@rule("model_family")
def _model_family(config: Config, facts: Facts) -> Iterator[Problem]:
    """model.load has a readable config.json of a supported family and variant, with all its sizes."""
    if isinstance(facts.model, Problem):
        yield facts.model
    elif (architecture := architecture_of(facts.model)) not in FAMILIES:
        problem = architecture_problem(architecture, FAMILIES)
        yield replace(problem, found=f"{config.model.load} of {architecture}")
    else:
        yield from [facts.sizes] if isinstance(facts.sizes, Problem) else []
        yield from variant_problems(facts.model)


@rule("model_weights", needs="machine")
def _model_weights(config: Config, facts: Facts) -> Iterator[Problem]:
    """A Hugging Face folder contains safetensors, and one set of them."""
    path = config_file(config.model.load)
    if path is None or path.parent != config.model.load:
        return
    if not any(config.model.load.glob("*.safetensors")):
        found = f"{config.model.load} without *.safetensors"
        action = "Download the weights, or save the model again with save_pretrained."
        yield Problem("model.load", found, "weights in safetensors format", action)
        return
    try:
        require_one_set(config.model.load)
    except WeightFilesError as error:
        yield replace(error.problem, where="model.load")
    except ConversionError as error:
        action = "Download the index again."
        yield Problem("model.load", str(error), "an index of the weight files", action)


def rounded_part_doubts(config: Config) -> Iterator[str]:
    """Name the float32 tensors among bfloat16 weights that a trainer in bfloat16 rounds."""
    folders = (config.model.load, config.model.reference) if config.model.dtype == "bfloat16" else ()
    for folder in filter(None, folders):
        try:
            dtypes = {
                name: x.dtype for name, x in source_of(folder).outline().items() if not stays_float32(name)
            }
        except (ConfigError, ConversionError, CheckpointError):  # which rules, or the loading, report
            continue
        parts = Counter(_LAYER.sub("", name) for name, dtype in dtypes.items() if dtype == torch.float32)
        if 0 < parts.total() < len(dtypes):
            rest = f", and {len(parts) - _SHOWN} others" if len(parts) > _SHOWN else ""
            shown = ", ".join(f"{count} x {part}" for part, count in parts.most_common(_SHOWN)) + rest
            yield (
                f"{folder} has {shown} in float32 among other weights. model.dtype = 'bfloat16' rounds them: "
                "in the trainer, in pushes and in checkpoints. model.dtype = 'float32' keeps every bit."
            )


@rule("model_tokenizer", needs="machine")
def _model_tokenizer(config: Config, facts: Facts) -> Iterator[Problem]:
    """A tokenizer is in the folder of config.json."""
    path = config_file(config.model.load)
    if path is not None and not any((path.parent / name).is_file() for name in _TOKENIZER_FILES):
        expected = "one of " + ", ".join(_TOKENIZER_FILES)
        action = "Copy the model's tokenizer files next to its config.json."
        yield Problem("model.load", f"{path.parent} without a tokenizer", expected, action)


@rule("model_code", needs="machine")
def _model_code(config: Config, facts: Facts) -> Iterator[Problem]:
    """The folder's own code is not needed: transformers has the classes of the model and its tokenizer."""
    path = config_file(config.model.load)
    if path is None or isinstance(facts.model, Problem):
        return
    action = "Use a model whose classes are part of transformers; code in a model's folder is never run."
    model_type = facts.model.get("model_type")
    if facts.model.get("auto_map") and not _has_config_class(model_type):
        found = f"auto_map and model_type = {model_type!r} in {path}"
        yield Problem("model.load", found, "a model_type that transformers has", action)
    file = path.parent / "tokenizer_config.json"
    try:
        tokenizer = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        name = tokenizer.get("tokenizer_class") or facts.model.get("tokenizer_class")
    except (OSError, ValueError, AttributeError) as error:
        yield Problem("model.load", f"{file}: {error}", "a JSON object", "Copy or download the model again.")
        return
    # Any other class that transformers finds by this name would be used, and may run the folder's code.
    is_usual = "Tokenizer" in str(name) or name is None
    if (tokenizer.get("auto_map") or not is_usual) and not _has_tokenizer_class(name):
        found = f"tokenizer_class = {name!r}{' and auto_map' * ('auto_map' in tokenizer)} in {path.parent}"
        action = (
            "Convert it to a tokenizer.json first, as examples/moonlight/README.md does, or use another model."
        )
        expected = "the name of a tokenizer that transformers has: code in a model's folder is never run"
        yield Problem("model.load", found, expected, action)


def _has_config_class(model_type: object) -> bool:
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def _has_tokenizer_class(name: object) -> bool:
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    found = [tokenizer_class_from_name(spelt) for spelt in (name, f"{name}Fast") if isinstance(spelt, str)]
    return any(isinstance(each, type) and issubclass(each, PreTrainedTokenizerBase) for each in found)


@rule("layout")
def _layout(config: Config, facts: Facts) -> Iterator[Problem]:
    """The parallel sizes divide the model and the processes, and the layout is proven."""
    yield from layout_problems(config.parallel, facts.world_size, facts.model_sizes)


@rule("sequence_positions")
def _sequence_positions(config: Config, facts: Facts) -> Iterator[Problem]:
    """The longest prompt and response, in training and of each evaluation set, fit the model's positions."""
    options, sizes = config.evaluation, facts.model_sizes
    given = {"rollout": config.rollout.max_response_tokens, "evaluation": options.max_response_tokens}
    given |= {f"evaluation.sets.{name}": own.max_response_tokens for name, own in options.used_sets.items()}
    for section, num_tokens in given.items():
        longest = config.data.max_prompt_tokens + (num_tokens or 0)
        if num_tokens is not None and sizes is not None and longest > sizes.max_position_embeddings:
            found = f"{num_tokens} after prompts of {config.data.max_prompt_tokens} tokens"
            expected = f"at most {sizes.max_position_embeddings} positions in all (config.json)"
            action = "Lower it, or lower data.max_prompt_tokens."
            yield Problem(f"{section}.max_response_tokens", found, expected, action)


@rule("shared_prefixes")
def _shared_prefixes(config: Config, facts: Facts) -> Iterator[Problem]:
    """Prefixes are shared only by layers without state."""
    if config.parallel.share_prefixes and facts.model_sizes is not None and facts.model_sizes.linear_layers:
        found = "true for a model with linear attention"
        expected = "false: its layers do not start a sequence from the recurrent state of another one's prefix"
        yield Problem("parallel.share_prefixes", found, expected, "Set it to false.")


@rule("expert_rows")
def _expert_rows(config: Config, facts: Facts) -> Iterator[Problem]:
    """Grouped products of experts get rows of a multiple of 16 bytes."""
    sizes = facts.model_sizes
    if sizes is None or sizes.num_experts is None:
        return
    unit = 8 if config.model.dtype == "bfloat16" else 4
    parts = config.parallel.expert_tensor or config.parallel.tensor
    for name, width in (
        ("hidden size", sizes.hidden_size),
        ("expert width, on one tensor-parallel rank", sizes.moe_intermediate_size // parts),
    ):
        if width % unit:
            found = f"{name}: {width}"
            expected = f"a multiple of {unit} with model.dtype = {config.model.dtype!r}"
            yield Problem("model.load", found, expected, "Split experts less, or use another model.")


@rule("reference_in_use")
def _reference_in_use(config: Config, facts: Facts) -> Iterator[Problem]:
    """A reference policy or an estimator is named only if the loss has the KL term."""
    if config.algorithm.ref_kl_coef:
        return
    action = "Set algorithm.ref_kl_coef (GRPO was published with 0.04), or remove this."
    for key, value in ((_REFERENCE, config.model.reference), ("algorithm.ref_kl", config.algorithm.ref_kl)):
        if value is not None:
            found = f"{str(value)!r}, which is not used: algorithm.ref_kl_coef is 0"
            yield Problem(key, found, "nothing, or a coefficient above 0", action)


@rule("reference_model", needs="machine")
def _reference_model(config: Config, facts: Facts) -> Iterator[Problem]:
    """The reference has the same architecture, sizes and vocabulary as the trained model."""
    folder = config.model.reference
    if folder is None:
        return
    try:
        sizes = read_model_sizes(config.model.load)
    except ConfigError:  # which the rules about model.load report
        return
    try:
        read_hf_config(folder)
        differing = _differing(read_model_sizes(folder), sizes)
    except ConfigError as error:
        yield from (replace(problem, where=_REFERENCE) for problem in error.problems)
        return
    if differing:
        found = ", ".join(f"{name} {value}" for name, (value, _) in differing.items())
        expected = ", ".join(f"{name} {value}" for name, (_, value) in differing.items())
        action = "Name a model that differs from model.load only in its weights."
        yield Problem(_REFERENCE, f"{folder} of {found}", f"{expected}, as in model.load", action)
    path = config_file(folder)
    is_hugging_face = path is not None and path.parent == folder
    if is_hugging_face and not any(folder.glob("*.safetensors")):
        action = "Download the weights, or save the model again with save_pretrained."
        yield Problem(_REFERENCE, f"{folder} without *.safetensors", "weights in safetensors format", action)
    if config.lora.rank and not is_hugging_face:
        found = f"{folder}, a Megatron checkpoint, with lora.rank = {config.lora.rank}"
        action = "Use megatron-dppo convert to-hf; without it, the model without adapters is the reference."
        yield Problem(_REFERENCE, found, "a Hugging Face folder", action)


def _differing(found: ModelSizes, expected: ModelSizes) -> dict[str, tuple[object, object]]:
    """Return the sizes that differ, by name: found and expected."""
    pairs = ((each.name, (getattr(found, each.name), getattr(expected, each.name))) for each in fields(found))
    return {name: pair for name, pair in pairs if pair[0] != pair[1] and name not in _MAY_DIFFER}

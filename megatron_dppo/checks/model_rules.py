"""Rules about the model folder, the parallel layout, and the memory of a rollout on each process."""

import json
from collections.abc import Iterator
from dataclasses import replace

from megatron_dppo.architectures.layout import layout_problems
from megatron_dppo.architectures.refusals import architecture_problem
from megatron_dppo.architectures.registry import FAMILIES, variant_problems
from megatron_dppo.architectures.sizes import config_file
from megatron_dppo.checkpoints.hf_folder import require_one_set
from megatron_dppo.checkpoints.model_files import WeightFilesError
from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.memory import rollout_bytes_bound
from megatron_dppo.errors import ConversionError, Problem

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@rule("rollout_memory")
def _rollout_memory(config: Config, facts: Facts) -> Iterator[Problem]:
    """The data of rollouts fits into the host memory reserved for it, even if every response is truncated."""
    sizes, parallel = facts.model_sizes, config.parallel
    if sizes is None:
        return
    routing = sizes.routing if config.rollout.routing_replay != "off" else None
    num_groups = max(facts.world_size // (parallel.tensor * parallel.pipeline * parallel.context), 1)
    bound = rollout_bytes_bound(config, facts.world_size, num_groups, routing) / (1 << 30)
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


@rule("model_folder")
def _model_folder(config: Config, facts: Facts) -> Iterator[Problem]:
    """model.load is a Hugging Face folder or a Megatron checkpoint, with a readable config.json."""
    if isinstance(facts.model, Problem):
        yield facts.model


@rule("model_architecture")
def _model_architecture(config: Config, facts: Facts) -> Iterator[Problem]:
    """The model is of a supported family."""
    if facts.architecture is not None and facts.architecture not in FAMILIES:
        problem = architecture_problem(facts.architecture, FAMILIES)
        yield replace(problem, found=f"{config.model.load} of {facts.architecture}")


@rule("model_sizes")
def _model_sizes(config: Config, facts: Facts) -> Iterator[Problem]:
    """config.json names every size of the model."""
    if facts.architecture in FAMILIES and isinstance(facts.sizes, Problem):
        yield facts.sizes


@rule("model_variant")
def _model_variant(config: Config, facts: Facts) -> Iterator[Problem]:
    """The package implements the architecture's variant."""
    if isinstance(facts.model, Problem) or facts.architecture not in FAMILIES:
        return
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


@rule("model_tokenizer", needs="machine")
def _model_tokenizer(config: Config, facts: Facts) -> Iterator[Problem]:
    """A tokenizer is in the folder of config.json."""
    path = config_file(config.model.load)
    if path is not None and not any((path.parent / name).is_file() for name in _TOKENIZER_FILES):
        expected = "one of " + ", ".join(_TOKENIZER_FILES)
        action = "Copy the model's tokenizer files into the folder of its config.json."
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
    # Any other class that transformers finds by this name would be asked, and may run the folder's code.
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
    """The longest prompt and response fit the model's positions."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if facts.model_sizes is not None and longest > facts.model_sizes.max_position_embeddings:
        found = f"{config.rollout.max_response_tokens} after prompts of {config.data.max_prompt_tokens} tokens"
        expected = f"at most {facts.model_sizes.max_position_embeddings} positions in all (config.json)"
        action = "Lower it, or lower data.max_prompt_tokens."
        yield Problem("rollout.max_response_tokens", found, expected, action)


@rule("sequence_budget")
def _sequence_budget(config: Config, facts: Facts) -> Iterator[Problem]:
    """One complete sequence fits a micro-batch."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    budget = config.parallel.max_tokens_per_microbatch
    if longest > budget:
        expected = f"at least {longest}, data.max_prompt_tokens + rollout.max_response_tokens"
        action = "Raise it, or shorten prompts or responses; sequences are never split."
        yield Problem("parallel.max_tokens_per_microbatch", str(budget), expected, action)


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
        ("expert width, on one of its tensor-parallel ranks", sizes.moe_intermediate_size // parts),
    ):
        if width % unit:
            found = f"{name}: {width}"
            expected = f"a multiple of {unit} with model.dtype = {config.model.dtype!r}"
            yield Problem("model.load", found, expected, "Split experts less, or use another model.")

"""Rules about the model folder and how it is split over processes."""

from collections.abc import Iterator

from megatron_dppo.actor.layout import config_file, layout_problems
from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem
from megatron_dppo.models.architectures import SUPPORTED_ARCHITECTURES, variant_problems

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@rule("model_folder")
def _model_folder(config: Config, facts: Facts) -> Iterator[Problem]:
    """model.load is a Hugging Face folder or a Megatron checkpoint, with a readable config.json."""
    if isinstance(facts.model, Problem):
        yield facts.model


@rule("model_architecture")
def _model_architecture(config: Config, facts: Facts) -> Iterator[Problem]:
    """The model is of a family we have."""
    if facts.architecture is not None and facts.architecture not in SUPPORTED_ARCHITECTURES:
        found = f"{config.model.load} of {facts.architecture}"
        yield Problem("model.load", found, " or ".join(SUPPORTED_ARCHITECTURES), "Use a supported model.")


@rule("model_sizes")
def _model_sizes(config: Config, facts: Facts) -> Iterator[Problem]:
    """config.json names every size of the model."""
    if facts.architecture in SUPPORTED_ARCHITECTURES and isinstance(facts.sizes, Problem):
        yield facts.sizes


@rule("model_variant")
def _model_variant(config: Config, facts: Facts) -> Iterator[Problem]:
    """The architecture is used in a variant whose forward pass we have."""
    if isinstance(facts.model, Problem) or facts.architecture not in SUPPORTED_ARCHITECTURES:
        return
    yield from variant_problems(facts.model)


@rule("model_weights")
def _model_weights(config: Config, facts: Facts) -> Iterator[Problem]:
    """A Hugging Face folder holds safetensors."""
    path = config_file(config.model.load)
    is_hugging_face = path is not None and path.parent == config.model.load
    if is_hugging_face and not any(config.model.load.glob("*.safetensors")):
        found = f"{config.model.load} without *.safetensors"
        action = "Download the weights, or save the model again with save_pretrained."
        yield Problem("model.load", found, "weights in safetensors format", action)


@rule("model_tokenizer")
def _model_tokenizer(config: Config, facts: Facts) -> Iterator[Problem]:
    """A tokenizer stands beside config.json."""
    path = config_file(config.model.load)
    if path is not None and not any((path.parent / name).is_file() for name in _TOKENIZER_FILES):
        expected = "one of " + ", ".join(_TOKENIZER_FILES)
        action = "Copy the model's tokenizer files beside its config.json."
        yield Problem("model.load", f"{path.parent} without a tokenizer", expected, action)


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
    """One whole sequence fits a micro-batch."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    budget = config.parallel.max_tokens_per_microbatch
    if longest > budget:
        expected = f"at least {longest}, data.max_prompt_tokens + rollout.max_response_tokens"
        action = "Raise it, or shorten prompts or responses; sequences are never split."
        yield Problem("parallel.max_tokens_per_microbatch", str(budget), expected, action)

"""Rules about the reference policy of the loss's KL term."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from megatron_dppo.architectures.registry import read_hf_config, read_model_sizes
from megatron_dppo.architectures.sizes import ModelSizes, config_file
from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem

_KEY = "model.reference"
_MAY_DIFFER = ("max_position_embeddings",)


@rule("reference_in_use")
def _reference_in_use(config: Config, facts: Facts) -> Iterator[Problem]:
    """A reference policy or an estimator is named only if the loss has the KL term."""
    if config.algorithm.ref_kl_coef:
        return
    action = "Set algorithm.ref_kl_coef (GRPO was published with 0.04), or remove this."
    for key, value in ((_KEY, config.model.reference), ("algorithm.ref_kl", config.algorithm.ref_kl)):
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
        yield from (replace(problem, where=_KEY) for problem in error.problems)
        return
    if differing:
        found = ", ".join(f"{name} {value}" for name, (value, _) in differing.items())
        expected = ", ".join(f"{name} {value}" for name, (_, value) in differing.items())
        action = "Name a model that differs from model.load only in its weights."
        yield Problem(_KEY, f"{folder} of {found}", f"{expected}, as in model.load", action)
    path = config_file(folder)
    is_hugging_face = path is not None and path.parent == folder
    if is_hugging_face and not any(folder.glob("*.safetensors")):
        action = "Download the weights, or save the model again with save_pretrained."
        yield Problem(_KEY, f"{folder} without *.safetensors", "weights in safetensors format", action)
    if config.lora.rank and not is_hugging_face:
        found = f"{folder}, a Megatron checkpoint, with lora.rank = {config.lora.rank}"
        action = "Use megatron-dppo convert to-hf; without it, the model without adapters is the reference."
        yield Problem(_KEY, found, "a Hugging Face folder", action)


def _differing(found: ModelSizes, expected: ModelSizes) -> dict[str, tuple[object, object]]:
    """Return the sizes that differ, by name: found and expected."""
    pairs = ((name, (value, getattr(expected, name))) for name, value in asdict(found).items())
    return {name: pair for name, pair in pairs if pair[0] != pair[1] and name not in _MAY_DIFFER}

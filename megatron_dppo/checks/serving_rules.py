"""Rules about what engines serve: their precision, what SGLang builds of a model, and its routes."""

import math
from collections.abc import Iterator

from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.architectures.sizes import read_model_config
from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.model import model_problems, routes_problem
from megatron_dppo.engines.sglang.options import installed_version, interpreter
from megatron_dppo.engines.sglang.protocol import NEWEST
from megatron_dppo.errors import ConfigError, Problem


@rule("sglang_model")
def _sglang_model(config: Config, facts: Facts) -> Iterator[Problem]:
    """SGLang serves the model as it is trained, and config.json has the keys that it reads."""
    if config.rollout.engine != "sglang" or facts.model_sizes is None or isinstance(facts.model, Problem):
        return
    yield from model_problems(config.model.load, facts.model, facts.model_sizes)


@rule("sglang_routes", needs="machine")
def _sglang_routes(config: Config, facts: Facts) -> Iterator[Problem]:
    """SGLang returns routes of the model's architecture if routing replay needs them."""
    name = facts.architecture
    is_asking = config.rollout.engine == "sglang" and config.rollout.routing_replay != "off"
    if not is_asking or name is None or name not in FAMILIES or not FAMILIES[name].sglang.lacks_routes:
        return
    problem = routes_problem(name, installed_version(interpreter(config)) or NEWEST)
    if problem is not None:
        yield problem


_SPACING = {  # of neighbouring numbers from 1 to 2
    **{"bfloat16": 2.0**-7, "float16": 2.0**-10, "half": 2.0**-10},
    **{"bfloat16_fp8": 2.0**-3, "modelopt_fp8": 2.0**-3, "modelopt_nvfp4": 2.0**-1},
}
_USUAL_SIZE = 0.02  # of a weight: `initializer_range` of most models


def rounding_remarks(config: Config) -> list[str]:
    """Return a doubt if the steps of a rollout are smaller than the rounding of the weights that are served.

    The engine's type must be coarser than the trainer's for that. Adam moves a weight by about the learning
    rate in a step, and weights are taken to be as large as config.json's `initializer_range`.
    """
    is_sglang = config.rollout.engine == "sglang"
    key = "sglang.dtype" if is_sglang else "rollout.transformers.weights"
    served = str(config.sglang.get("dtype", "auto")) if is_sglang else config.embedded_weights
    if served not in _SPACING or _SPACING[served] <= _SPACING.get(config.model.dtype, 0.0):
        return []
    try:
        size = float(read_model_config(config.model.load)[1].get("initializer_range") or _USUAL_SIZE)
    except (ConfigError, TypeError, ValueError):
        size = _USUAL_SIZE
    spacing = _SPACING[served] * 2.0 ** math.floor(math.log2(size))
    num_steps = config.algorithm.minibatches_per_rollout * config.algorithm.epochs_per_rollout
    moved = config.optimizer.lr * num_steps
    if moved >= spacing / 2:
        return []
    return [
        f"{key} is {served!r} and model.dtype {config.model.dtype!r}: served numbers near {size:g} are "
        f"{spacing:.1e} apart, and the gradient steps of a rollout ({num_steps}) move a weight by about "
        f"{moved:.1e}. Most "
        "served weights do not change in a push; sync/changed_weights_fraction counts the embedded engine's. "
        f"Serve {config.model.dtype}, or raise optimizer.lr."
    ]

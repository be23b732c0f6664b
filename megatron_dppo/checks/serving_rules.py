"""Rules about SGLang and the model's family: what servers build of a model, and the routes that they return."""

from collections.abc import Iterator

from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.checks.facts import Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import Problem
from megatron_dppo.rollout.sglang.model import model_problems, routes_problem
from megatron_dppo.rollout.sglang.options import installed_version, interpreter
from megatron_dppo.rollout.sglang.protocol import NEWEST


@rule("sglang_model")
def _sglang_model(config: Config, facts: Facts) -> Iterator[Problem]:
    """SGLang serves the model as it is trained, and finds the keys that it reads of config.json."""
    if config.rollout.engine != "sglang" or facts.model_sizes is None or isinstance(facts.model, Problem):
        return
    yield from model_problems(config.model.load, facts.model, facts.model_sizes)


@rule("sglang_routes", needs="machine")
def _sglang_routes(config: Config, facts: Facts) -> Iterator[Problem]:
    """SGLang returns routes of the model's architecture where they are asked for."""
    name = facts.architecture
    is_asking = config.rollout.engine == "sglang" and config.rollout.routing_replay != "off"
    if not is_asking or name is None or name not in FAMILIES or not FAMILIES[name].sglang.lacks_routes:
        return
    problem = routes_problem(name, installed_version(interpreter(config)) or NEWEST)
    if problem is not None:
        yield problem

"""Rules about sampling: groups, staleness, user code, SGLang's servers and what they serve."""

import math
from collections.abc import Iterator
from contextlib import closing

from megatron_dppo.agents.agents import harness_pool, rendering_of
from megatron_dppo.agents.harness import problem_with_harness
from megatron_dppo.agents.rendering import Rendering, problem_with_renderer
from megatron_dppo.architectures.sizes import read_model_config
from megatron_dppo.checkpoints.block_fp8 import FP8_BLOCK
from megatron_dppo.checks.data_rules import worker_problem
from megatron_dppo.checks.facts import Facts, rule
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.model import model_problems
from megatron_dppo.engines.sglang.options import (
    environment_problems,
    interpreter,
    nccl_problems,
    option_problems,
    read_options,
    shipped_options,
)
from megatron_dppo.engines.sglang.protocol import NEWEST
from megatron_dppo.engines.sglang.quantization import quantization_problems, served_folder, served_form
from megatron_dppo.engines.sglang.sampling_settings import argument_problems
from megatron_dppo.environments import problem_with
from megatron_dppo.errors import AgentFailedError, ConfigError, DataError, Problem
from megatron_dppo.runtime.user_code import problem_with_path


@rule("lag")
def _lag(config: Config, facts: Facts) -> Iterator[Problem]:
    """Not all rollouts are sampled by the first weights."""
    lag, key = config.rollout.lag, "rollout.lag"
    if lag == 0:
        return
    if lag >= config.run.num_rollouts:
        found = f"{lag} with run.num_rollouts = {config.run.num_rollouts}"
        expected = "less than run.num_rollouts: else the first weights sample every rollout"
        yield Problem(key, found, expected, "Lower it, or raise run.num_rollouts.")


@rule("environment", needs="machine")
def _environment(config: Config, facts: Facts) -> Iterator[Problem]:
    """The environment is registered, or its package can be found; a user's module is not imported to check."""
    problem = problem_with(config.rollout.environment)
    if problem is not None:
        yield problem


@rule("agent", needs="machine")
def _agent(config: Config, facts: Facts) -> Iterator[Problem]:
    """An agent's harness can be found, and the tokenizer and the renderer write its chats."""
    agent = config.rollout.agent
    if not agent.is_set:
        return
    problem = problem_with_harness(agent.harness, agent.command)
    if problem is not None:
        yield problem
    tokenizer = facts.tokenizer
    if tokenizer is not None and not isinstance(tokenizer, Problem) and not tokenizer.chat_template:
        action = "Use a chat model, or give its tokenizer a chat template."
        yield Problem("rollout.agent", "a tokenizer without a chat template", "one that writes chats", action)
    elif tokenizer is not None and not isinstance(tokenizer, Problem) and agent.renderer is not None:
        problem = problem_with_renderer(tokenizer, agent.renderer)
        if problem is not None:
            yield problem


def conversation_doubts(config: Config, facts: Facts) -> Iterator[str]:
    """Yield doubts if the chat template does not write the turns of an environment or an agent one by one."""
    tokenizer, agent = facts.tokenizer, config.rollout.agent
    if tokenizer is None or isinstance(tokenizer, Problem):
        return
    if not agent.is_set:
        yield from _thinking_doubts(config, facts)
        return
    try:
        rendering = rendering_of(tokenizer, agent)
        appends, writes_tools = rendering.appends(), rendering.writes_tools()
    except DataError:
        return  # a rule is about it
    if not writes_tools:
        yield (
            "the chat template does not write tools, calls of them, or their results, so the policy does not "
            "see the tools of an agent. Use a model whose template writes them, or an agent without tools."
        )
    if not appends:
        yield (
            "the chat template does not append messages after a response as they are, so calls of the agent "
            "begin new conversations, whose earlier responses are prompts. Name the family's renderer in "
            "rollout.agent.renderer, or set rollout.agent.train = 'tools' so that all of them train."
        )


def _thinking_doubts(config: Config, facts: Facts) -> Iterator[str]:
    """Yield a doubt if an environment's conversations keep thinking that the chat template leaves out."""
    options, is_chat = config.rollout, any(found.num_chats for found in facts.surveys.values())
    has_turns = options.environment != "single_turn" and options.max_turns > 1
    if not has_turns or not is_chat or "thinking" in options.model_fields_set:
        return
    try:
        if Rendering(facts.tokenizer, "template").keeps_thoughts():
            return
    except DataError:
        return  # a rule is about it
    yield (
        "the chat template leaves out the thinking of earlier responses, but conversations of the environment "
        "keep it: the policy trains on histories that no server writes. Set rollout.thinking = 'template' to "
        "train on the template's, or 'keep' if this is meant."
    )


@rule("agent_trial", needs="trial")
def _agent_trial(config: Config, facts: Facts) -> Iterator[Problem]:
    """The harness of an agent is imported in a worker; no episode is run."""
    harness, key = config.rollout.agent.harness, "rollout.agent.harness"
    if harness is None or problem_with_harness(harness, ()) is not None:
        return
    with closing(harness_pool(config.rollout, config.data)) as pool:
        try:
            pool.start()
        except AgentFailedError as error:
            action = "Correct the function; megatron_dppo/agents/README.md has an example."
            yield worker_problem(key, key, error, "an `async def` that runs an episode", action)


@rule("generate", needs="machine")
def _generate(config: Config, facts: Facts) -> Iterator[Problem]:
    """A custom sampling function can be found."""
    options, key = config.rollout, "rollout.generate"
    if options.generate is None:
        return
    problem = problem_with_path(key, options.generate, "package.module:function")
    if problem is not None:
        yield problem


@rule("sglang_owned")
def _sglang_owned(config: Config, facts: Facts) -> Iterator[Problem]:
    """[sglang] has no argument that the package sets, or that changes sampling."""
    yield from argument_problems(config.sglang)


@rule("sglang_environment", needs="machine")
def _sglang_environment(config: Config, facts: Facts) -> Iterator[Problem]:
    """No environment variable that servers would inherit changes what they sample or keeps their memory."""
    if config.rollout.engine == "sglang":
        yield from environment_problems(config)


@rule("sglang_arguments", needs="machine")
def _sglang_arguments(config: Config, facts: Facts) -> Iterator[Problem]:
    """Keys of [sglang] are arguments of SGLang's server, and their values are valid."""
    if config.sglang:
        options = read_options(interpreter(config)) or shipped_options(NEWEST)
        yield from option_problems(config.sglang, options)


@rule("sglang_nccl", needs="machine")
def _sglang_nccl(config: Config, facts: Facts) -> Iterator[Problem]:
    """Trainer and servers have one version of NCCL if it sends the weights."""
    yield from nccl_problems(config)


@rule("sglang_parts")
def _sglang_parts(config: Config, facts: Facts) -> Iterator[Problem]:
    """Weights reach every part of a server, and several servers do not share a port."""
    if config.rollout.engine != "sglang":
        return
    if config.rollout.sglang.num_own_servers > 1 and "port" in config.sglang:
        found = f"{config.sglang['port']!r} with rollout.sglang.num_own_servers > 1"
        yield Problem("sglang.port", found, "none: each server takes a free one", "Remove it.")
    for name in ("pp_size", "dp_size"):
        value = config.sglang.get(name, 1)
        if isinstance(value, int) and value > 1:
            action = f"Remove it; start more servers or raise sglang.tp_size instead of {name}."
            yield Problem(f"sglang.{name}", str(value), "1: updates reach tensor-parallel ranks only", action)


@rule("sglang_quantization")
def _sglang_quantization(config: Config, facts: Facts) -> Iterator[Problem]:
    """Servers keep their weights in a form that a push can replace, and serve model.load."""
    if config.rollout.engine == "sglang":
        yield from quantization_problems(config)


@rule("sglang_model")
def _sglang_model(config: Config, facts: Facts) -> Iterator[Problem]:
    """SGLang serves the model as it is trained, and config.json has the keys that it reads."""
    if config.rollout.engine != "sglang" or facts.model_sizes is None or isinstance(facts.model, Problem):
        return
    yield from model_problems(config.model.load, facts.model, facts.model_sizes)


_SPACING = {  # of neighbouring numbers from 1 to 2
    **{"bfloat16": 2.0**-7, "float16": 2.0**-10, "half": 2.0**-10},
    **{FP8_BLOCK: 2.0**-3, "bfloat16_fp8": 2.0**-3, "modelopt_fp8": 2.0**-3, "modelopt_nvfp4": 2.0**-1},
}
_USUAL_SIZE = 0.02  # usual magnitude of a weight: `initializer_range` of most models


def rounding_remarks(config: Config) -> list[str]:
    """Return a doubt if the steps of a rollout are smaller than the rounding of the weights that are served.

    The engine's type must be coarser than the trainer's for that. Adam moves a weight by about the learning
    rate in a step, and weights are taken to be as large as config.json's `initializer_range`.
    """
    is_sglang = config.rollout.engine == "sglang"
    key = "sglang.dtype" if is_sglang else "rollout.transformers.weights"
    served = str(config.sglang.get("dtype", "auto")) if is_sglang else config.embedded_weights
    if is_sglang and served_form(config) is not None:
        key, served = f"the form of {served_folder(config)}", FP8_BLOCK
    if served not in _SPACING or _SPACING[served] <= _SPACING.get(config.model.dtype, 0.0):
        return []
    try:
        size = float(read_model_config(config.model.load)[1].get("initializer_range") or _USUAL_SIZE)
    except (ConfigError, TypeError, ValueError):
        size = _USUAL_SIZE
    spacing = _SPACING[served] * 2.0 ** math.floor(math.log2(size))
    num_steps = config.algorithm.steps_per_rollout
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


@rule("open_groups")
def _open_groups(config: Config, facts: Facts) -> Iterator[Problem]:
    """Over-sampling starts only groups that rollouts can train on within max_staleness."""
    options = config.rollout
    if options.max_staleness and options.over_sampling > options.max_staleness + 1:
        found = f"{options.over_sampling:g} with rollout.max_staleness = {options.max_staleness}"
        expected = (
            f"1 to {options.max_staleness + 1}: further groups would be older than "
            "max_staleness when they are trained on"
        )
        yield Problem("rollout.over_sampling", found, expected, "Lower it, or raise rollout.max_staleness.")

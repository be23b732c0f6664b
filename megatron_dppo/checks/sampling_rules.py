"""Rules about sampling: groups, staleness, user code, SGLang's servers and what they serve."""

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from megatron_dppo.agents.agents import harness_pool, rendering_of
from megatron_dppo.agents.harness import KEY as HARNESS
from megatron_dppo.agents.harness import problem_with_agent
from megatron_dppo.agents.rendering import Rendering, problem_with_renderer
from megatron_dppo.architectures.sizes import read_model_config
from megatron_dppo.checkpoints.block_fp8 import FP8_BLOCK
from megatron_dppo.checks.data_rules import worker_problem
from megatron_dppo.checks.facts import TRAINING, Facts, rule
from megatron_dppo.config.rollout import (
    AgentConfig,
    AgentSource,
    CommandSource,
    EnvironmentSource,
    GenerateSource,
    HarnessSource,
    RolloutConfig,
    SingleTurnSource,
    Source,
)
from megatron_dppo.config.schema import Config
from megatron_dppo.config.sections import DataConfig
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
from megatron_dppo.errors import AgentFailedError, ConfigError, DataError, EnvironmentFailedError, Problem
from megatron_dppo.rollout.trajectories import environment_pool, try_environment
from megatron_dppo.runtime.user_code import problem_with_import, problem_with_path
from megatron_dppo.types import Prompt

_GENERATE = "rollout.generate"


@rule("source", needs="machine")
def _source(config: Config, facts: Facts) -> Iterator[Problem]:
    """The source of responses can be found, and an agent's chats can be written; no user code is imported."""
    source = config.rollout.source
    if (problem := _problem_with_name(source)) is not None:
        yield problem
    if isinstance(source, AgentSource):
        yield from _chat_problems(config.rollout.agent, facts.usable_tokenizer)


def _problem_with_name(source: Source) -> Problem | None:
    match source:
        case EnvironmentSource(name):
            return problem_with(name)
        case GenerateSource(name):
            return problem_with_path(_GENERATE, name, "package.module:function")
        case HarnessSource() | CommandSource():
            return problem_with_agent(source)
        case SingleTurnSource():
            return None


def _chat_problems(agent: AgentConfig, tokenizer: Any | None) -> Iterator[Problem]:
    """Yield the problem with the chat template of an agent's tokenizer, or with its renderer."""
    if tokenizer is not None and not tokenizer.chat_template:
        action = "Use a chat model, or give its tokenizer a chat template."
        yield Problem("rollout.agent", "a tokenizer without a chat template", "one that writes chats", action)
    elif tokenizer is not None and agent.renderer is not None:
        problem = problem_with_renderer(tokenizer, agent.renderer)
        yield from [] if problem is None else [problem]


@rule("source_trial", needs="trial")
def _source_trial(config: Config, facts: Facts) -> Iterator[Problem]:
    """User code that gives responses can be imported; an environment replies once, and no episode is run."""
    if _problem_with_name(config.rollout.source) is not None:
        return
    match config.rollout.source:
        case EnvironmentSource(name):
            yield from _environment_problems(name, config.data, facts.first_prompt(TRAINING))
        case GenerateSource(name):
            problem = problem_with_import(_GENERATE, name)
            yield from [] if problem is None else [problem]
        case HarnessSource() as source:
            yield from _harness_problems(source, config.data)
        case CommandSource() | SingleTurnSource():
            pass


def _environment_problems(name: str, data: DataConfig, first: Prompt | None) -> Iterator[Problem]:
    if first is None:
        return
    with closing(environment_pool(name, data)) as pool:
        try:
            try_environment(pool, first)
        except EnvironmentFailedError as error:
            action = "Correct the class; megatron_dppo/environments/README.md documents its methods."
            key = "rollout.environment"
            yield worker_problem(key, key, error, "an environment that replies to a response", action)


def _harness_problems(source: HarnessSource, data: DataConfig) -> Iterator[Problem]:
    with closing(harness_pool(source, data)) as pool:
        try:
            pool.start()
        except AgentFailedError as error:
            action = "Correct the function; megatron_dppo/agents/README.md has an example."
            yield worker_problem(HARNESS, HARNESS, error, "an `async def` that runs an episode", action)


def conversation_doubts(config: Config, facts: Facts) -> Iterator[str]:
    """Yield doubts if the chat template does not write the turns of an environment or an agent one by one."""
    if (tokenizer := facts.usable_tokenizer) is None:
        return
    if isinstance(config.rollout.source, EnvironmentSource):
        yield from _thinking_doubts(config.rollout, facts)
    if not isinstance(config.rollout.source, AgentSource):
        return
    try:
        rendering = rendering_of(tokenizer, config.rollout.agent)
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


def _thinking_doubts(options: RolloutConfig, facts: Facts) -> Iterator[str]:
    """Yield a doubt if an environment's conversations keep thinking that the chat template leaves out."""
    is_chat = any(found.num_chats for found in facts.surveys.values())
    if options.max_turns == 1 or not is_chat or "thinking" in options.model_fields_set:
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


@rule("sglang_owned")
def _sglang_owned(config: Config, facts: Facts) -> Iterator[Problem]:
    """[sglang] has no argument that the package sets, or that changes sampling."""
    yield from argument_problems(config.sglang)


@rule("sglang_host", needs="machine")
def _sglang_host(config: Config, facts: Facts) -> Iterator[Problem]:
    """No inherited environment variable changes what servers sample or keep, and NCCL's versions agree."""
    if config.rollout.engine == "sglang":
        yield from environment_problems(config)
        yield from nccl_problems(config)


@rule("sglang_arguments", needs="machine")
def _sglang_arguments(config: Config, facts: Facts) -> Iterator[Problem]:
    """Keys of [sglang] are arguments of SGLang's server, and their values are valid."""
    if config.sglang:
        options = read_options(interpreter(config)) or shipped_options(NEWEST)
        yield from option_problems(config.sglang, options)


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

"""Rules that run user code once, in a separate process: rewards, environments, `rollout.generate`."""

import re
from collections.abc import Iterator
from contextlib import closing

from megatron_dppo.checks.answer_trial import misread
from megatron_dppo.checks.data_rules import rewards_of, surveyed
from megatron_dppo.checks.facts import TRAINING, Facts
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.final_answer import excerpt
from megatron_dppo.environments import problem_with
from megatron_dppo.errors import EnvironmentFailedError, Problem, RewardError
from megatron_dppo.rewards import RewardChoice, problems_with
from megatron_dppo.rollout.evaluation import evaluation_sets
from megatron_dppo.rollout.scoring import RewardPools, training_reward
from megatron_dppo.rollout.trajectories import environment_pool, try_environment
from megatron_dppo.runtime.user_code import problem_with_import, problem_with_path

_WHOLE = re.compile(r"(.*?)found (.*?); expected (.*?)\. (.*)", re.DOTALL)
"""A sentence of `Problem`, without its location, and the text before it."""


@rule("reward_trial", needs="trial")
def _reward_trial(config: Config, facts: Facts) -> Iterator[Problem]:
    """Each reward is imported in a worker, and scores the reference answer of the first prompt."""
    keys = {training_reward(config): ("data.reward", TRAINING)}
    for each in evaluation_sets(config):
        where = f"evaluation.sets.{each.name}"
        keys.setdefault(each.reward, (f"{where}.reward", f"{where}.prompts"))
    for reward, (where, key) in keys.items():
        found = facts.surveys.get(key)
        choice = RewardChoice.read(reward)
        if found is None or found.first is None or choice.is_environment or any(problems_with(choice)):
            continue
        with closing(RewardPools(config.data, [reward])) as pools:
            try:
                pools.start({reward: found.first})
            except RewardError as error:
                action = "Correct the function; megatron_dppo/rewards/README.md documents its signature."
                yield _told(where, "data.reward", error, "a reward that scores a response", action)


@rule("reward_answer_trial", needs="trial")
def _reward_answer_trial(config: Config, facts: Facts) -> Iterator[Problem]:
    """If most answers are texts around a final answer, a response with this answer is right."""
    for key, path, found in surveyed(config, facts, is_once=False):
        num_texts = found.num_answers.get("marked", 0)
        for reward in rewards_of(config, key) if 2 * num_texts > found.num_prompts else ():
            wrong = misread(config, reward, found.odd_answers["marked"])
            if wrong is not None and 2 * wrong.num_wrong > wrong.num_tried:
                cell, row = excerpt(wrong.row.prompt.answer), wrong.row.number
                yield Problem(
                    key,
                    f"{num_texts} of {found.num_prompts} answers of {path} that are texts around a final "
                    f"answer: {reward!r} scores {wrong.response!r} as wrong for {cell} in row {row}",
                    "bare answers",
                    "Make the file with megatron-dppo prepare-data, which extracts final answers, or "
                    "name a column of bare answers in data.answer_column.",
                )


@rule("environment_trial", needs="trial")
def _environment_trial(config: Config, facts: Facts) -> Iterator[Problem]:
    """The environment is imported in a worker, starts with the first prompt, and replies to one response."""
    name, found = config.rollout.environment, facts.surveys.get(TRAINING)
    if found is None or found.first is None or problem_with(name) is not None:
        return
    pool = environment_pool(name, config.data)
    if pool is None:
        return
    with closing(pool):
        try:
            try_environment(pool, found.first)
        except EnvironmentFailedError as error:
            action = "Correct the class; megatron_dppo/environments/README.md documents its methods."
            key = "rollout.environment"
            yield _told(key, key, error, "an environment that replies to a response", action)


@rule("generate_import", needs="trial")
def _generate_import(config: Config, facts: Facts) -> Iterator[Problem]:
    """A custom sampling function can be imported."""
    key, name = "rollout.generate", config.rollout.generate
    if name is not None and problem_with_path(key, name, "package.module:function") is None:
        problem = problem_with_import(key, name)
        if problem is not None:
            yield problem


def _told(where: str, key: str, error: Exception, expected: str, action: str) -> Problem:
    """Return a worker's error as a problem; the error may include the expected value and the action."""
    said = str(error).removeprefix(f"{key}: ")
    whole = _WHOLE.fullmatch(said)
    if whole is None:
        return Problem(where, said, expected, action)
    before, found, expected, action = whole.groups()
    return Problem(where, before + found, expected, action)

"""Rules about files of prompts, and the rewards that go with them."""

from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.checks.facts import TRAINING, Facts, prompt_files
from megatron_dppo.checks.registry import rule
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.schemas import TRAINING_SCHEMAS, detect, has
from megatron_dppo.data.prompts.survey import Survey
from megatron_dppo.errors import Problem, did_you_mean
from megatron_dppo.rewards import REWARDS, RewardChoice, answer_form, problems_with
from megatron_dppo.types import AnswerForm

_ASKED: dict[AnswerForm, str] = {
    "boxed": "an answer in \\boxed{}",
    "answer_line": "a last line 'Answer: ...'",
}


@rule("prompts_file", needs="machine")
def _prompts_file(config: Config, facts: Facts) -> Iterator[Problem]:
    """The prompt files of training and evaluation are there and can be read."""
    yield from (found for found in facts.columns.values() if isinstance(found, Problem))


@rule("prompt_columns", needs="machine")
def _prompt_columns(config: Config, facts: Facts) -> Iterator[Problem]:
    """The prompt files have the named columns."""
    for source, columns in facts.columns.items():
        if not isinstance(columns, Problem):
            yield from _missing_columns(config, source, columns)


def _missing_columns(config: Config, source: str, columns: list[str]) -> Iterator[Problem]:
    prompt, answer = config.data.prompt_column, config.data.answer_column
    for key, name in {"data.prompt_column": prompt, "data.answer_column": answer}.items():
        if name is not None and not has(columns, name):
            action = did_you_mean(name, columns, f"Set {key} to one of them.")
            yield Problem(key, f"{name!r}, which {source} lacks", f"one of {columns}", action)
    if answer is None and has(columns, prompt) and detect(columns, TRAINING_SCHEMAS, prompt) is None:
        expected = " or ".join(schema.answer for schema in TRAINING_SCHEMAS)
        action = "Set it, or make a file of prompts with megatron-dppo prepare-data."
        yield Problem("data.answer_column", f"none, with columns {columns} in {source}", expected, action)


@rule("prompt_rows", needs="data")
def _prompt_rows(config: Config, facts: Facts) -> Iterator[Problem]:
    """Every row of the prompt files holds a prompt that has tokens, and an answer."""
    if isinstance(facts.tokenizer, Problem):
        yield facts.tokenizer
    for key, path, found in _surveyed(config, facts):
        if found.num_faulty:
            shown = f", the first {len(found.faults)} below" if len(found.faults) < found.num_faulty else ""
            yield Problem(
                key,
                f"{found.num_faulty} of {found.num_rows} rows of {path} that cannot be used{shown}",
                "a prompt that the model's tokenizer encodes, and an answer, in each row",
                "Correct these rows, or leave them out.",
                "\n".join(f"  {fault}" for fault in found.faults),
            )


@rule("prompt_token_ids", needs="data")
def _prompt_token_ids(config: Config, facts: Facts) -> Iterator[Problem]:
    """The tokenizer's ids are rows of the model's embedding."""
    for key, _, found in _surveyed(config, facts):
        if facts.model_sizes is not None and found.largest_id >= facts.model_sizes.vocab_size:
            yield Problem(
                key,
                f"token id {found.largest_id} in a prompt",
                f"ids below the model's vocabulary, {facts.model_sizes.vocab_size} (config.json)",
                f"Copy the model's own tokenizer files into {config.model.load}.",
            )


@rule("prompt_lengths", needs="data")
def _prompt_lengths(config: Config, facts: Facts) -> Iterator[Problem]:
    """No more prompts are too long than a rollout may lose samples."""
    longest, limit = config.data.max_prompt_tokens, config.rollout.max_dropped_fraction
    for key, path, found in _surveyed(config, facts):
        if found.num_too_long > limit * found.num_prompts:
            yield Problem(
                key,
                f"{found.num_too_long} of {found.num_prompts} prompts of {path} longer than "
                f"data.max_prompt_tokens = {longest}; the longest has {found.longest} tokens",
                f"at most {limit:.2%} of them (rollout.max_dropped_fraction)",
                "Raise data.max_prompt_tokens, or leave long prompts out of the file "
                "(megatron-dppo prepare-data --max-prompt-tokens).",
            )


@rule("prompts_unchanged", needs="data")
def _prompts_unchanged(config: Config, facts: Facts) -> Iterator[Problem]:
    """A resumed run has the prompts that its place in them was counted in."""
    saved, found = facts.saved, facts.surveys.get(TRAINING)
    if saved is None or not saved.is_in_prompts or found is None or found.num_faulty:
        return
    if saved.prompts_digest != found.digest:
        yield Problem(
            TRAINING,
            f"{config.data.prompts}, which has changed since {saved.checkpoint} was saved",
            "the same prompts in the same order: the run's place in them is lost",
            "Restore the file, or start a new run.folder from the checkpoint's weights (model.load).",
        )


@rule("reward", needs="machine")
def _reward(config: Config, facts: Facts) -> Iterator[Problem]:
    """The reward is named, and registered or its package found; a user's module is not imported to check."""
    data = config.data
    yield from reward_problems(RewardChoice(data.reward, data.reward_values, data.thinking), config)


def reward_problems(choice: RewardChoice, config: Config) -> Iterator[Problem]:
    """Yield what is wrong with a reward that training or an evaluation set names."""
    yield from problems_with(choice)
    if choice.is_environment and not gives_rewards(config):
        yield Problem(
            "data.reward",
            "'environment', where rollout.environment = 'single_turn' gives no reward",
            f"one of {sorted(REWARDS)}, or 'package.module:function'",
            "Name the reward that scores a response, or the environment that gives rewards.",
        )


def gives_rewards(config: Config) -> bool:
    """Return whether the environment, or a user's `rollout.generate`, can give rewards."""
    return config.rollout.environment != "single_turn" or config.rollout.generate is not None


@rule("reward_reads_answers", needs="data")
def _reward_reads_answers(config: Config, facts: Facts) -> Iterator[Problem]:
    """Prompts ask for an answer in the form that their reward reads."""
    own = {f"evaluation.sets.{name}": each.reward for name, each in config.evaluation.used_sets.items()}
    for key, path, found in _surveyed(config, facts, is_once=False):
        where = "data.reward" if key == TRAINING else f"{key.removesuffix('.prompts')}.reward"
        reward = own.get(key.removesuffix(".prompts")) or config.data.reward
        for name in RewardChoice(reward).weights:
            form = answer_form(name)
            for asked, count in found.num_asking.items():
                if form is not None and asked != form:
                    fits = [other for other in REWARDS if answer_form(other) == asked]
                    yield Problem(
                        where,
                        f"{name!r}, which reads {_ASKED[form]}, where {count} of {found.num_prompts} prompts "
                        f"of {path} ask for {_ASKED[asked]}: nearly all of their responses are wrong",
                        f"a reward and prompts that fit: {' or '.join(map(repr, fits))} for these",
                        "Set the reward, or make the prompts with another --template "
                        "of megatron-dppo prepare-data.",
                    )


@rule("overlong_buffer")
def _overlong_buffer(config: Config, facts: Facts) -> Iterator[Problem]:
    """Some length of a response costs nothing."""
    buffer, longest = config.data.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer >= longest:
        expected = f"fewer than rollout.max_response_tokens = {longest}"
        yield Problem("data.overlong_buffer_tokens", str(buffer), expected, "Lower it.")


def _surveyed(config: Config, facts: Facts, *, is_once: bool = True) -> Iterator[tuple[str, Path, Survey]]:
    """The key of each file of prompts, its path, and what it holds; once where several keys name it."""
    seen: set[Path] = set()
    for key, path in prompt_files(config).items():
        if key in facts.surveys and not (is_once and path in seen):
            seen.add(path)
            yield key, path, facts.surveys[key]

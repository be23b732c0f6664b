"""Rules about prompts and rewards; some run user code once, in a separate process."""

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.checks.facts import TRAINING, Facts, prompt_files, rule, section_of
from megatron_dppo.config.rollout import SingleTurnSource
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.final_answer import answer_kind, excerpt, final_answer, number_of
from megatron_dppo.data.prompts.prompts import PromptRow
from megatron_dppo.data.prompts.rows import TRAINING_SCHEMAS, detect, has
from megatron_dppo.data.prompts.shares import digest_of, parts_of
from megatron_dppo.data.prompts.survey import Survey, special_ids
from megatron_dppo.errors import Problem, RewardError, did_you_mean
from megatron_dppo.rewards import REWARDS, RewardChoice, RewardRequest, RewardResult, answer_form, problems_with
from megatron_dppo.rollout.evaluation import evaluation_sets
from megatron_dppo.rollout.scoring import RewardPools, training_reward
from megatron_dppo.types import AnswerForm

_WHOLE = re.compile(r"(.*?)found (.*?); expected (.*?)\. (.*)", re.DOTALL)
"""A sentence of `Problem`, without its location, and the text before it."""

THINKING_ENDS = "</think>"
_FORMS: dict[AnswerForm, str] = {
    "boxed": "an answer in \\boxed{}",
    "answer_line": "a last line 'Answer: ...'",
}


@rule("prompts_file", needs="machine")
def _prompts_file(config: Config, facts: Facts) -> Iterator[Problem]:
    """The prompt files of training and evaluation are there and can be read."""
    yield from (found for found in facts.columns.values() if isinstance(found, Problem))


@rule("prompt_files")
def _prompt_files(config: Config, facts: Facts) -> Iterator[Problem]:
    """Several prompt files have different names in metrics, and all or none of them a weight."""
    files = config.data.prompts
    for label in dict.fromkeys(file.label for file in files):
        same = [str(file.path) for file in files if file.label == label]
        if len(same) > 1:
            expected = "a different name for each file: metrics and the order of its prompts depend on it"
            found = f"{len(same)} files called {label!r}: {', '.join(same)}"
            yield Problem("data.prompts", found, expected, "Give each file a name: {path, name}.")
    without = [str(file.path) for file in files if file.weight is None]
    if 0 < len(without) < len(files):
        expected = "a weight for each file, or for none, if a file's number of prompts is its weight"
        yield Problem(
            "data.prompts", f"no weight for {', '.join(without)}", expected, "Add it: {path, weight}."
        )
    for name, own in config.evaluation.used_sets.items():
        for number, file in enumerate(own.prompts):
            if file.weight is not None or file.name is not None:
                where = f"evaluation.sets.{name}.prompts[{number}]"
                found = f"{file.path} with a weight or a name"
                action = "Write only its path; files with scores of their own are sets of their own."
                yield Problem(where, found, "a path: each prompt of a set is scored once", action)


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
    """Every row of the prompt files has a prompt with tokens, and an answer."""
    if isinstance(facts.tokenizer, Problem):
        yield facts.tokenizer
    for key, path, found in iterate_surveys(config, facts):
        if rows := found.num_faulty:
            yield Problem(
                key,
                f"{rows} of {found.num_rows} rows of {path} that cannot be used{found.faulty.shown}",
                "a prompt that the model's tokenizer encodes, and an answer, in each row",
                "Correct these rows, or leave them out.",
                found.faulty.lines,
            )


@rule("prompt_token_ids", needs="data")
def _prompt_token_ids(config: Config, facts: Facts) -> Iterator[Problem]:
    """The tokenizer's ids are rows of the model's embedding."""
    for key, _, found in iterate_surveys(config, facts):
        if facts.model_sizes is not None and found.largest_id >= facts.model_sizes.vocab_size:
            yield Problem(
                key,
                f"token id {found.largest_id} in a prompt",
                f"ids below the model's vocabulary, {facts.model_sizes.vocab_size} (config.json)",
                f"Copy the model's own tokenizer files into {config.model.load}.",
            )


@rule("prompt_lengths", needs="data")
def _prompt_lengths(config: Config, facts: Facts) -> Iterator[Problem]:
    """The share of prompts that are too long is at most the share of samples that a rollout may drop."""
    longest, limit = config.data.max_prompt_tokens, config.rollout.max_dropped_fraction
    for key, path, found in iterate_surveys(config, facts):
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
    """A resumed run has the same prompts, because its position is counted in them."""
    saved, found, files = facts.saved, facts.surveys_of(TRAINING), config.data.prompts
    is_known = len(found) == len(files) and not any(each.num_faulty for each in found)
    if saved is None or not saved.is_in_prompts or not is_known:
        return
    parts = parts_of(files, [each.num_prompts for each in found])
    if saved.prompts_digest != digest_of(parts, [each.digest for each in found]):
        names = " and ".join(str(file.path) for file in files)
        yield Problem(
            "data.prompts",
            f"{names}, which changed in content, name or weight since {saved.checkpoint} was saved",
            "the same prompts in the same order: the run's position in them is lost",
            "Restore the files, or start a new run.folder from the checkpoint's weights (model.load).",
        )


@rule("reward", needs="machine")
def _reward(config: Config, facts: Facts) -> Iterator[Problem]:
    """The reward is named, and registered or its package found; a user's module is not imported to check."""
    data = config.data
    yield from reward_problems(RewardChoice(data.reward, data.reward_values, data.thinking), config)


def reward_problems(choice: RewardChoice, config: Config) -> Iterator[Problem]:
    """Yield the problems of a reward that training or an evaluation set names."""
    yield from problems_with(choice)
    if choice.is_environment and config.rollout.source == SingleTurnSource():
        yield Problem(
            "data.reward",
            "'environment', but rollout.environment = 'single_turn' gives no reward",
            f"one of {sorted(REWARDS)}, or 'package.module:function'",
            "Name the reward that scores a response, or the environment that gives rewards.",
        )


@rule("reward_reads_answers", needs="data")
def _reward_reads_answers(config: Config, facts: Facts) -> Iterator[Problem]:
    """Prompts ask for an answer in the form that their reward reads."""
    own = {f"evaluation.sets.{name}": each.reward for name, each in config.evaluation.used_sets.items()}
    for key, path, found in iterate_surveys(config, facts, is_once=False):
        where = f"{section_of(key)}.reward"
        reward = own.get(section_of(key)) or config.data.reward
        for name in RewardChoice(reward).weights:
            form = answer_form(name)
            for requested, count in found.num_asking.items():
                if form is not None and requested != form:
                    fits = [other for other in REWARDS if answer_form(other) == requested]
                    yield Problem(
                        where,
                        f"{name!r}, which reads {_FORMS[form]}, but {count} of {found.num_prompts} prompts "
                        f"of {path} ask for {_FORMS[requested]}: nearly all of their responses are wrong",
                        f"a reward and prompts that fit: {' or '.join(map(repr, fits))} for these",
                        "Set the reward, or make the prompts with another --template "
                        "of megatron-dppo prepare-data.",
                    )


def rewards_of(config: Config, key: str) -> list[str]:
    """Return the registered rewards that score responses to a file of prompts."""
    own = {f"evaluation.sets.{name}": each.reward for name, each in config.evaluation.used_sets.items()}
    reward = own.get(section_of(key)) or config.data.reward
    return [name for name in RewardChoice(reward).weights if name in REWARDS]


@rule("prompt_answers", needs="data")
def _prompt_answers(config: Config, facts: Facts) -> Iterator[Problem]:
    """Most answers are not texts: a registered reward compares a response's answer with the complete cell."""
    for key, path, found in iterate_surveys(config, facts, is_once=False):
        num_texts, names = found.num_answers.get("prose", 0), rewards_of(config, key)
        if names and 2 * num_texts > found.num_prompts:
            first = found.odd_answers["prose"][0]
            yield Problem(
                key,
                f"{num_texts} of {found.num_prompts} answers of {path} that are texts without a marked final "
                f"answer, such as {excerpt(first.prompt.answer)} in row {first.number}",
                f"bare answers, which {' and '.join(map(repr, names))} can compare",
                "Name a column of bare answers in data.answer_column, or a reward of your own.",
            )


@rule("reward_thinking", needs="data")
def _reward_thinking(config: Config, facts: Facts) -> Iterator[Problem]:
    """If thinking is required, a response can end it: prompts leave it open, and texts keep `</think>`."""
    tokenizer = facts.usable_tokenizer
    files = [each for each in iterate_surveys(config, facts, is_once=False) if rewards_of(config, each[0])]
    if config.data.thinking != "require" or not files or tokenizer is None:
        return
    ignore = "data.thinking = 'ignore'"
    if THINKING_ENDS not in _decode_again(tokenizer, f"1{THINKING_ENDS}1"):
        is_special = tokenizer.convert_tokens_to_ids(THINKING_ENDS) in special_ids(tokenizer)
        why = "is a special token, which responses omit" if is_special else "cannot be written"
        action = f'Give it "special": false in the tokenizer\'s files, or set {ignore}.'
        found = f"'require' with a tokenizer in which {THINKING_ENDS} {why}: no response can be right"
        yield Problem("data.thinking", found, "a text that keeps it", action)
    for _, path, found in files:
        if 2 * found.num_closed_thoughts > found.num_prompts:
            yield Problem(
                "data.thinking",
                f"'require' with {found.num_closed_thoughts} of {found.num_prompts} prompts of {path} that end "
                f"with {THINKING_ENDS}: nearly all of their responses are wrong, because they do not think",
                "prompts that leave the thinking to the response",
                f"Let the chat template think (chat_template_kwargs, enable_thinking), or set {ignore}.",
            )


def _decode_again(tokenizer: Any, text: str) -> str:
    """Return a text as it comes back from token ids, without special tokens; "" if none can encode it."""
    try:
        ids = tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # noqa: BLE001  a tokenizer without an unknown token raises no narrower one
        return ""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def iterate_surveys(
    config: Config, facts: Facts, *, is_once: bool = True
) -> Iterator[tuple[str, Path, Survey]]:
    """Yield the key of each file of prompts, its path and its survey; once if several keys name the file."""
    seen: set[Path] = set()
    for key, path in prompt_files(config).items():
        if key in facts.surveys and not (is_once and path in seen):
            seen.add(path)
            yield key, path, facts.surveys[key]


@rule("reward_trial", needs="trial")
def _reward_trial(config: Config, facts: Facts) -> Iterator[Problem]:
    """Each reward is imported in a worker, and scores the reference answer of the first prompt."""
    sections = {training_reward(config): TRAINING}
    for each in evaluation_sets(config):
        sections.setdefault(each.reward, f"evaluation.sets.{each.name}")
    for reward, section in sections.items():
        where, first = f"{section}.reward", facts.first_prompt(section)
        choice = RewardChoice.read(reward)
        if first is None or choice.is_environment or any(problems_with(choice)):
            continue
        with closing(RewardPools(config.data, [reward])) as pools:
            try:
                pools.start({reward: first})
            except RewardError as error:
                action = "Correct the function; megatron_dppo/rewards/README.md documents its signature."
                yield worker_problem(where, "data.reward", error, "a reward that scores a response", action)


@rule("reward_answer_trial", needs="trial")
def _reward_answer_trial(config: Config, facts: Facts) -> Iterator[Problem]:
    """If most answers are texts around a final answer, a response with this answer is right."""
    for key, path, found in iterate_surveys(config, facts, is_once=False):
        num_texts = found.num_answers.get("marked", 0)
        for reward in rewards_of(config, key) if 2 * num_texts > found.num_prompts else ():
            wrong = find_misread(config, reward, found.odd_answers["marked"])
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


def worker_problem(where: str, key: str, error: Exception, expected: str, action: str) -> Problem:
    """Return a worker's error as a problem; the error may include the expected value and the action."""
    said = str(error).removeprefix(f"{key}: ")
    whole = _WHOLE.fullmatch(said)
    if whole is None:
        return Problem(where, said, expected, action)
    before, found, expected, action = whole.groups()
    return Problem(where, before + found, expected, action)


@dataclass(frozen=True)
class Misread:
    """Answer cells for which a response with the right final answer is scored as wrong."""

    num_wrong: int
    num_tried: int
    row: PromptRow  # the first of them
    response: str  # to it


def find_misread(config: Config, reward: str, rows: Sequence[PromptRow]) -> Misread | None:
    """Score each cell's final answer, or the number before its words, as a response; None if all are right.

    Args:
        config: Config; its [data] limits the worker that scores.
        reward: Name of a registered reward.
        rows: Rows of the kinds "marked" and "with_words", see `AnswerKind`.
    """
    responses = [(row, response) for row in rows for response in _responses(reward, row)]
    if not responses:
        return None
    text = RewardChoice(reward).text
    with closing(RewardPools(config.data, [text])) as pools:
        requests = [RewardRequest(row.prompt, response, "stop") for row, response in responses]
        results = pools.score(text, requests)
    scored = [(tried, result) for tried, result in zip(responses, results, strict=True)]
    wrong = [tried for tried, result in scored if isinstance(result, RewardResult) and result.value <= 0]
    return Misread(len(wrong), len(responses), *wrong[0]) if wrong else None


def _responses(reward: str, row: PromptRow) -> Iterator[str]:
    """Yield a response with the final answer of a cell, in the form that the reward reads."""
    cell = row.prompt.answer
    answer = number_of(cell) if answer_kind(cell) == "with_words" else final_answer(cell)
    form = answer_form(reward)
    if answer is not None and form is not None:
        yield f"\\boxed{{{answer}}}" if form == "boxed" else f"Answer: {answer}"

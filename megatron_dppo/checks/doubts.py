"""Finds possible faults of prompts and answers, which `check` prints and `train` logs; neither refuses them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_dppo.architectures.sizes import config_file, end_tokens
from megatron_dppo.checks.answer_trial import misread
from megatron_dppo.checks.data_rules import THINKING_ENDS, rewards_of, surveyed
from megatron_dppo.checks.facts import Facts
from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.final_answer import KINDS, excerpt, final_answer, number_of, text_only_doubt
from megatron_dppo.data.prompts.survey import Survey
from megatron_dppo.data.prompts.templates import turn_ends
from megatron_dppo.errors import DataError, Problem

_MAY_EARN_NOTHING = "a response with only the right answer may be scored as wrong."


def doubts(config: Config, facts: Facts) -> list[str]:
    """Return doubts about the files of prompts and the tokenizer, as sentences."""
    found = [doubt for _, path, each in surveyed(config, facts) for doubt in _of_prompts(path, each)]
    for key, path, each in surveyed(config, facts, is_once=False):
        found += _of_answers(config, key, path, each)
    return list(dict.fromkeys([*found, *_of_turn_ends(config, facts)]))


def _of_prompts(path: Path, found: Survey) -> Iterator[str]:
    for oddity, count in found.oddities.items():
        yield f"{count} of {found.num_prompts} prompts of {path} {oddity}."
    if found.unread_columns:
        names = ", ".join(found.unread_columns)
        yield f"columns of {path} that are not read: {names}. Prompt and reward do not depend on them."


def _of_answers(config: Config, key: str, path: Path, found: Survey) -> Iterator[str]:
    rewards = rewards_of(config, key)
    for kind, rows in found.odd_answers.items() if rewards else ():
        count = found.num_answers[kind]
        share = f"{count} of {found.num_prompts} answers of {path} {KINDS[kind]}"
        if kind != "with_words" and 2 * count > found.num_prompts:
            continue  # a rule is about it
        untried = [row for row in rows if final_answer(row.prompt.answer) is None]
        if kind == "with_words":
            untried = [row for row in rows if number_of(row.prompt.answer) is None]
        for row in untried[:1]:
            yield f"{share}, such as {excerpt(row.prompt.answer)} in row {row.number}: {_MAY_EARN_NOTHING}"
        for reward in rewards if not untried else ():
            wrong = misread(config, reward, rows)
            if wrong is not None:
                cell, number = excerpt(wrong.row.prompt.answer), wrong.row.number
                yield f"{share}: {reward!r} scores {wrong.response!r} as wrong for {cell} in row {number}."
    if "math" in rewards:
        doubt = text_only_doubt(found.bare_answers, found.num_answers["bare"], f" of {path}")
        yield from [] if doubt is None else [doubt]
    if config.data.thinking == "require" and rewards and 0 < 2 * found.num_closed_thoughts <= found.num_prompts:
        count = found.num_closed_thoughts
        yield (
            f"{count} of {found.num_prompts} prompts of {path} end with {THINKING_ENDS}: with data.thinking = "
            "'require' their responses are wrong unless they write it again."
        )


def _of_turn_ends(config: Config, facts: Facts) -> Iterator[str]:
    tokenizer, file = facts.tokenizer, config_file(config.model.load)
    is_chat = any(found.num_chats for found in facts.surveys.values())
    if not is_chat or file is None or tokenizer is None or isinstance(tokenizer, Problem):
        return
    assert not isinstance(facts.model, Problem), "its tokenizer was loaded"
    try:
        ends = end_tokens(file.parent, facts.model.get("eos_token_id"))
        of_template = turn_ends(tokenizer)
    except (DataError, ValueError, TypeError, AttributeError, json.JSONDecodeError):
        return
    if of_template and not set(of_template) & set(ends):
        generation = file.parent / "generation_config.json"
        where = generation if generation.is_file() else file
        those = ", ".join(_named(tokenizer, token) for token in ends) or "no token"
        yield (
            f"the chat template ends a turn with {_named(tokenizer, of_template[0])}, which ends no response: "
            f"responses end with {those} (eos_token_id of {where}), and continue after the end of a turn. If "
            f"the model was trained to end turns with it, add {of_template[0]} to eos_token_id of {generation}."
        )


def _named(tokenizer: Any, token: int) -> str:
    return f"{tokenizer.convert_ids_to_tokens(token)!r} ({token})"

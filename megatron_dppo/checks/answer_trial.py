r"""Scores a response with the right final answer for each answer cell, to find cells that a reward misreads."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from megatron_dppo.config.schema import Config
from megatron_dppo.data.prompts.final_answer import answer_kind, final_answer, number_of
from megatron_dppo.data.prompts.prompts import PromptRow
from megatron_dppo.rewards import RewardChoice, RewardRequest, RewardResult, answer_form
from megatron_dppo.rollout.scoring import RewardPools


@dataclass(frozen=True)
class Misread:
    """Answer cells for which a response with the right final answer is scored as wrong."""

    num_wrong: int
    num_tried: int
    row: PromptRow  # the first of them
    response: str  # to it


def misread(config: Config, reward: str, rows: Sequence[PromptRow]) -> Misread | None:
    """Score each cell's final answer, or the number before its words, as a response; None if all are right.

    Args:
        config: Config; its [data] limits the worker that scores.
        reward: Name of a registered reward.
        rows: Rows with answers that are texts around a final answer, or numbers with words.
    """
    responses = [(row, response) for row in rows for response in _responses(reward, row)]
    if not responses:
        return None
    text = RewardChoice(reward).text
    with closing(RewardPools(config.data, [text])) as pools:
        requests = [RewardRequest(row.prompt, response, "stop") for row, response in responses]
        results = pools.of(text).score(requests)
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

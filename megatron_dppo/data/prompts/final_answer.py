r"""Finds the final answer in a cell with more text, by the markers of published math data sets."""

import re
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Literal

from megatron_dppo.errors import DataError, Problem
from megatron_dppo.rewards import is_matched_as_text

AnswerKind = Literal["bare", "marked", "prose", "with_words"]
"""bare: only the answer. marked: text with a marked final answer. prose: text without a marked final answer.
with_words: a number with words, such as "4 cups" or "She has 4 cups"."""

KINDS: dict[AnswerKind, str] = {
    "marked": "are texts around a final answer",
    "prose": "are texts without a marked final answer",
    "with_words": "are a number with words",
}
"""Predicate that describes each kind in a message."""

_DOZEN, _FEW = 12, 3  # words
_NUM_SHOWN = 3  # answers of a message
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace does not count as a brace
_GSM8K = re.compile(r"^[ \t]*####[ \t]*(.+?)\s*\Z", re.MULTILINE)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_SAID = re.compile(
    r"\b(?:(?:the|final|correct|right|my|our)\s+(?:answer|option|choice)\s+is\s*[:：]?|ans(?:wer)?\s*\**\s*[:：=])"
    r"\s*\**\s*([^\n]+)"
    r"|\b(?:option|choice|answer)\s+\(?([A-J])\)?\s+is\s+(?:the\s+)?(?:correct|right)\b"
    r"|(?:答案|答)(?:是|为)?\s*[:：]?\s*([^\n。]+)",
    re.IGNORECASE,
)
_BETWEEN = re.compile(r"[\s$,;]*(?:and|or)?[\s$,;]*")  # boxes of one answer
_SENTENCE_END = re.compile(r"(?<=\S)\.(?=\s+[A-Z]|\s*\Z)")
_NUMBER_WITH_WORDS = re.compile(r"\$?[-+]?\d[\d,.]*(?:/\d+)?\$?(?:\s+[A-Za-z][A-Za-z.]*){1,5}")
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z][a-z']+|[\u3400-\u9fff]{2}")


def final_answer(cell: str) -> str | None:
    r"""Return the final answer that a text marks, or `None` without a marker or if the cell is only the answer.

    If there are several markers, the last one counts. Markers are `#### 18` on the last line (GSM8K), the last
    `\boxed{}` (MATH), `<answer>` tags, and "The answer is 4" or "Answer: 4" up to the end of the sentence.
    """
    found = [each for each in _find_marked(cell) if each[1]]
    answer = max(found, key=itemgetter(0))[1] if found else None
    return answer if answer != cell.strip() else None


def answer_kind(cell: str) -> AnswerKind:
    """Return the kind of an answer cell."""
    text = cell.strip()
    if final_answer(text) is not None:
        return "marked"
    has_lines = "\n" in text and "\\begin{" not in text
    if has_lines or len(_WORD.findall(text)) >= _DOZEN:
        return "prose"
    is_sentence = len(_WORD.findall(text)) >= _FEW and _NUMBER.search(text) is not None
    return "with_words" if is_sentence or _NUMBER_WITH_WORDS.fullmatch(text) else "bare"


def last_boxed(solution: str) -> str:
    r"""Return the content of a solution's last \boxed{} or \fbox{}; empty if that box is not closed."""
    return next((text for _, text in _find_boxed(solution)), "")


def number_of(cell: str) -> str | None:
    """Return the number in an answer with words, or `None` unless there is exactly one."""
    numbers = {number.rstrip(",") for number in _NUMBER.findall(cell)}
    return numbers.pop() if len(numbers) == 1 else None


def text_only_doubt(answers: Sequence[tuple[int, str]], num_answers: int, where: str = "") -> str | None:
    """Return a sentence on the answers that `math` can only match as text, or `None` if it reads all of them.

    Args:
        answers: Row numbers and bare answers: all of them, or a sample.
        num_answers: Their number before sampling.
        where: Words after "answers", such as " of prompts.jsonl".
    """
    unread = {answer for answer in {answer for _, answer in answers} if is_matched_as_text(answer)}
    rows = [(number, answer) for number, answer in answers if answer in unread]
    if not rows:
        return None
    sampled = "" if len(answers) == num_answers else f" that were sampled from {num_answers}"
    first = dict[str, int]()
    for number, answer in rows:
        first.setdefault(answer, number)
    shown = list(first.items())[:_NUM_SHOWN]
    examples = ", ".join(f"{excerpt(answer)} in row {number}" for answer, number in shown)
    return (
        f"{len(rows)} of {len(answers)} bare answers{where}{sampled} have no value that reward 'math' can "
        f"parse, such as {examples}. Only the same text counts as right, and the same "
        "value in another spelling counts as wrong. Write such answers as one value that 'math' can parse "
        "(see docs/reference/rewards.md), or leave these rows out."
    )


def answer_doubts(where: str, answers: Sequence[tuple[int, str]]) -> Iterator[str]:
    """Yield doubts about answer cells with more text than the answer, given as (row number, cell).

    Cells that are mostly texts without a marked final answer are refused.
    """
    odd = dict[AnswerKind, list[tuple[int, str]]]()
    for number, answer in answers:
        odd.setdefault(answer_kind(answer), []).append((number, answer))
    shown = {kind: f"{excerpt(rows[0][1])} in row {rows[0][0]}" for kind, rows in odd.items()}
    num_prose = len(odd.get("prose", []))
    if 2 * num_prose > len(answers):
        found = f"{num_prose} of {len(answers)} answers that {KINDS['prose']}, such as {shown['prose']}"
        expected = r"bare answers, or texts that end in '#### 18', \boxed{18} or 'The answer is 18'"
        action = (
            "Name a column of bare answers with --question-column and --answer-column, or keep these for a "
            "custom reward with --answers as-is."
        )
        raise DataError(Problem(where, found, expected, action))
    for kind, what in KINDS.items():
        if kind in odd:
            share = f"{len(odd[kind])} of {len(answers)} answers {what}, such as {shown[kind]}"
            yield f"{share}: a response with a bare right answer may earn nothing."


def excerpt(cell: str) -> str:
    """Return the end of a cell, for messages."""
    text = cell.strip()
    return repr(text if len(text) <= 60 else "..." + text[-60:])


def _find_marked(cell: str) -> Iterator[tuple[int, str]]:
    """Yield the index and the text of each marked answer."""
    yield from _find_boxed(cell)
    yield from ((match.start(), match[1].strip()) for match in _GSM8K.finditer(cell))
    yield from ((match.start(), match[1].strip()) for match in _TAG.finditer(cell))
    for match in _SAID.finditer(cell):
        said = _without_sentence(match[1] or match[2] or match[3])
        if len(_WORD.findall(said)) < _DOZEN:
            yield match.start(), final_answer(said) or said


def _find_boxed(solution: str) -> Iterator[tuple[int, str]]:
    r"""Yield the last box, if it is closed, with those before it that only "and" separates from it."""
    found = list[tuple[int, str]]()
    end = 0
    for box in _BOX.finditer(solution):
        begin, depth, closed = box.end(), 1, None
        for piece in _BRACE.finditer(solution, begin):
            depth += (piece.group() == "{") - (piece.group() == "}")
            if depth == 0:
                closed = piece.start()
                break
        if box.start() < end or not _BETWEEN.fullmatch(solution[end : box.start()]):
            found.clear()
        if closed is None:
            return
        found.append((box.start(), solution[begin:closed]))
        end = closed + 1
    if found:
        yield found[0][0], ", ".join(dict.fromkeys(text for _, text in found))


def _without_sentence(said: str) -> str:
    """Return the answer at the beginning of a sentence, without Markdown and TeX marks around it."""
    end = _SENTENCE_END.search(said)
    answer = (said if end is None else said[: end.start()]).strip().strip("*").strip()
    is_formula = len(answer) > 1 and answer[0] == answer[-1] == "$" and "$" not in answer[1:-1]
    return answer[1:-1].strip() if is_formula else answer

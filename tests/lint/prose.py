"""Counts habits of language that readers stumble over, in docstrings, comments, messages and Markdown.

python tests/lint/prose.py              # counts, and the files with most
python tests/lint/prose.py README.md    # each place in these files, with what to write instead
"""

import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megatron_dppo", "docs", "examples", "tools")
GOAL = 20  # habits in 1000 lines of prose


class Habit(NamedTuple):
    """A pattern in prose, and what to write instead."""

    pattern: re.Pattern[str]
    advice: str


HABITS = {
    "none": Habit(re.compile(r"; none:|\bnone where\b"), 'write a sentence: "Without ..., ..."'),
    "where": Habit(
        re.compile(r"\bwhere (there|it|they|one|no|that|a|the|nothing|something|someone) ?\w*\b"),
        '"if", "when" or "unless" for a condition',
    ),
    "those of": Habit(re.compile(r"\b(those|that) of\b"), "repeat the noun"),
    "told, asked": Habit(
        re.compile(r"\b(told|asked (of|for)|anew|in vain|gone on|goes on|stands? (for|in|by|where|there))\b"),
        "the plain verb: configured, requested, again, continues, is",
    ),
    "beside": Habit(re.compile(r"\bbeside\b"), '"next to", "in addition to", "compared with"'),
    "own": Habit(re.compile(r"\bof (its|one's|their|ours|yours) own\b"), '"its own ..."'),
    "says": Habit(re.compile(r"\b(says|said)\b"), '"reports", "shows", "is documented in"'),
    "answer": Habit(re.compile(r"\banswers?\b"), '"response" or "reply", unless it is the answer to a problem'),
    "preposition": Habit(
        re.compile(r"^\s*(\w+: )?(Of|As|By|In|With|Behind|For) [a-z`]"), "start with a noun or a verb"
    ),
}


class Place(NamedTuple):
    """A habit in a line of a file."""

    path: Path
    line: int
    habit: str
    text: str


def main(arguments: list[str]) -> int:
    """Print the counts, or the places of the named files. Return 0: it is advice."""
    paths = [Path(name) for name in arguments] or pages()
    places: list[Place] = []
    num_lines = 0
    for path in paths:
        lines = list(prose(path))
        num_lines += len(lines)
        places += [
            Place(path, number, name, text.strip())
            for number, text in lines
            for name, habit in HABITS.items()
            if habit.pattern.search(text)
        ]
    if arguments:
        for place in places:
            print(f"{place.path}:{place.line}: {place.habit}: {place.text}  ({HABITS[place.habit].advice})")
    per_thousand = 1000 * len(places) / max(num_lines, 1)
    print(f"prose:     {len(places)} habits in {num_lines} lines, {per_thousand:.0f} per 1000 (goal {GOAL})")
    if not arguments:
        habits = Counter(place.habit for place in places)
        files = Counter(str(place.path.relative_to(ROOT)) for place in places)
        print("           " + ", ".join(f"{name} {count}" for name, count in habits.most_common()))
        print("           most in " + ", ".join(f"{name} {count}" for name, count in files.most_common(3)))
        print("           python tests/lint/prose.py FILE lists the places of a file")
    return 0


def pages() -> list[Path]:
    """Return the files whose prose is counted."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    return sorted([*ROOT.glob("*.md"), *found])


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line of prose: at least three words of Markdown, a string or a comment."""
    lines = (
        _lines_of_python(path) if path.suffix == ".py" else enumerate(path.read_text("utf-8").splitlines(), 1)
    )
    for number, text in lines:
        if len(text.split()) >= 3:
            yield number, text


def _lines_of_python(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text("utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

r"""One spelling for each notation of an answer, its tokens, and the tree that they are parsed into.

A token is a command, a number, letters, a sign, or a word: `tokens(r"5\text{ cm}")` is `["5", '"cm']`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from operator import methodcaller
from typing import Any
from unicodedata import normalize


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text that blanks separate."""
    return frozenset(text.split())


def spellings(text: str) -> dict[str, str]:
    """Return the first word of its group for each word. A semicolon or a line break ends a group."""
    groups = [group.split() for group in re.split("[;\n]", text)]
    return {word: group[0] for group in groups for word in group}


class Node:
    """An answer or a part of it. Only a `Tree` has a kind and parts."""

    kind: str = ""
    parts: tuple["Node", ...] = ()

    def walk(self) -> Iterator["Node"]:
        """Yield a tree and all trees in it."""
        yield self
        for part in (self.value,) if isinstance(self, Quantity) else self.parts:
            yield from part.walk()

    @property
    def names(self) -> frozenset[str]:
        """Variables of a tree, and its functions with unknown values."""
        nodes = list(self.walk())
        found = {each.text for each in nodes if isinstance(each, Name)} - _NO_VARIABLES
        return frozenset(found | {each.kind[5:] for each in nodes if each.kind.startswith("call ")})

    @property
    def is_relation(self) -> bool:
        """Whether a tree is an equation, an inequality or a chain of them."""
        return bool(self.kind) and all(kind in RELATIONS.values() for kind in self.kind.split())

    @property
    def is_group(self) -> bool:
        """Whether a tree is a list, a set, an interval, a union or a matrix, and so not a number."""
        return self.kind in GROUPS


@dataclass(frozen=True)
class Number(Node):
    """A number, with its count of decimal places if it is a decimal."""

    value: Fraction
    places: int | None = None


@dataclass(frozen=True)
class Name(Node):
    r"""A variable, a constant (`\pi`, `e`, `i`, `\infty`) or a set of numbers (`\mathbb{R}`)."""

    text: str


@dataclass(frozen=True)
class Tree(Node):
    """An operator, a function, a list or a relation, with its operands."""

    kind: str
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Quantity(Node):
    """A value with what is around it: the words behind it, in order, and a mark.

    The mark is a per cent sign, a currency or degrees.
    """

    value: Node
    words: tuple[str, ...] = ()
    mark: str = ""


RELATIONS = spellings(
    r"= \in; ~ \approx; < \lt; > \gt; <= \le \leq \leqslant; >= \ge \geq \geqslant; != \ne \neq"
)
CONSTANTS = frozenset({r"\pi", "e", "i"})
_NO_VARIABLES = CONSTANTS.union({r"\infty", r"\dots"}, (rf"\mathbb{{{letter}}}" for letter in "RZNQC"))
BRACKETS = frozenset({"()", "[]", "(]", "[)"})
LISTS = frozenset({"list", "or"})
GROUPS = frozenset({*BRACKETS, *LISTS, "set", "matrix", "row", "cup", "cap", "setminus"})

TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = words_of("ln lg log exp").union(
    *((name, f"arc{name}", f"{name}h", f"ar{name}h") for name in TRIGONOMETRIC)
)
OF_MANY = words_of("gcd lcm max min")
# Words that may stand behind a value glued to it, or behind a space in plain text; others need four letters.
_GLUED = words_of("th st nd rd cm km mm kg mg ml mph am pm")
_SHORT_WORDS = _GLUED | words_of("""
    mi ft yd oz lb lbs kph hr hrs min mins sec AM PM BC AD CE BCE in inch yr yrs day days men USD EUR""")
_UNIT_LETTERS = frozenset("mshgl")
_SIGNS = spellings(r"""
    \pi π; \sqrt √; \times ×; \div ÷; \cdot · ∙; \le ≤; \ge ≥; \ne ≠; \approx ≈; \infty ∞; \theta θ; \circ ∘
    \cup ∪; \cap ∩; \in ∈; \emptyset ∅; \mathbb{R} ℝ; \mathbb{Z} ℤ; \mathbb{N} ℕ; ^\circ ° º""")
_CHARACTERS = str.maketrans(
    {sign: f"{spelling} " for sign, spelling in _SIGNS.items() if len(sign) == 1}
    | {"℃": r"^\circ C", "℉": r"^\circ F", **dict(zip("−’′⁄。", "-''/.", strict=True))}
    | {chr(code + 0xFEE0): chr(code) for code in range(ord("!"), ord("~"))}  # of full width
)
_COMMANDS = spellings(r"""
    \frac dfrac tfrac cfrac; \binom dbinom tbinom; \cdot cdotp ast; \dots ldots cdots dotsc dotsb
    ^\circ degree degrees textdegree; \emptyset varnothing; \lor vee; \phi varphi; \epsilon varepsilon
    \theta vartheta; | vert lvert rvert; , land wedge; \{ lbrace; \} rbrace; [ lbrack; ] rbrack""")
_FONTS = "text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|bfit)|[mh]box|boldsymbol|bm|underline"
_STYLE = rf"\\(?:{_FONTS}|operatorname)"
_WRAPPED = re.compile(_STYLE + r" ?\{([^{}]*)\}")


def _rules(*rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> list[Any]:
    # unlike a template, a function costs nothing if nothing matches
    return [(re.compile(rule), methodcaller("expand", s) if isinstance(s, str) else s) for rule, s in rules]


_SPELLINGS = _rules(
    ("[¼-¾⅐-⅞]", lambda m: r"\frac{{{}}}{{{}}}".format(*normalize("NFKC", m[0]).split("⁄"))),
    ("⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda m: f"^{{{normalize('NFKC', m[0]).replace('−', '-')}}}"),
    (r"(\\\\)|\\!\s*|(\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s+)", lambda m: m[1] or " " * bool(m[2])),
    ("(?<![0-9])–|–(?![0-9])", "-"),  # an en dash between two numbers is a range
    (r"\\([a-zA-Z]+)", lambda m: f"{_COMMANDS[m[1]]} " if m[1] in _COMMANDS else m[0]),
    (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|[bB]igg?[lr]?)(?![a-zA-Z])", " "),
    (r"\\(?:text)?color ?\{[^{}]*\}|\\tag\*? ?\{[^{}]*\}", ""),
    (r"\\(?:left|right|middle) ?(?=[()\[\]|]|\\[{}|]|\\[lr](?:floor|ceil|angle))", ""),
    (r"\\(?:left|right) ?\.", ""),
    (r"[\[(] ?\\begin\{array\} ?\{[lcr| ]*\}(.*?)\\end\{array\} ?[\])]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"(?<=[0-9])(?:\{,\}|')(?=[0-9]{3}(?![0-9]))", ""),
    (r"\{([,:.])\}", r"\1"),
    (r",? ?(?:\\dots(?![a-z])|…|\.\.\.) ?,?(?=.)", r",\\dots ,"),
    ("=<", "<="),
    (_STYLE + r" ?\{ ?per ?cent(?:age)? ?\}|(?<=[0-9}]) ?per ?cent$|(?<!\\)%", r"\\%"),
    (rf"\^ ?\{{ ?{_STYLE} ?\{{ ?o ?\}} ?\}}|{_STYLE} ?\{{ ?\^ ?\\circ ?\}}", r"^\\circ "),
    (r"\\(angle|triangle) ([A-Za-z][A-Za-z ]*)", lambda m: rf"\{m[1]}{{{m[2].replace(' ', '')}}}"),
    (r"(?<=[0-9])_ ?\{ ?([0-9]+) ?\}", r"_\1"),  # of a number in another base
    (r"(?:\{\})?\^ ?(?:\\circ|\{ ?\\circ ?\}) ?", r"^\\circ "),
    (r"\^ ?\{? ?" + _STYLE + r" ?\{ ?(th|st|nd|rd) ?\} ?\}?", r"\\text{\1}"),
    (r"\{\\(?:rm|bf|it|sf|tt) ?([^{}\\]*)\}", r"\\mathrm{\1}"),
    (rf"\\(?:hat|vec|widehat) ?\{{ ?(?:{_STYLE} ?\{{ ?(\w) ?\}}|\\?([ijk])(?:math)?) ?\}}", r"\\mathbf{\1\2}"),
    (r"([A-Za-z])\. ?([A-Za-z])\.(?![a-zA-Z])", r"\1\2"),  # a.m., B.C.
    (r"(?<![A-Za-z0-9}^_])C ?\( ?([0-9]{1,3}) ?, ?([0-9]{1,3}) ?\)$", r"\\binom{\1}{\2}"),
    (r"(?<![A-Za-z0-9}^_])C ?_ ?\{? ?([0-9]{1,3}) ?\}? ?\^ ?\{? ?([0-9]{1,3}) ?\}?", r"\\binom{\1}{\2}"),
    (r"(?<!\\)\$\$?([^$]*)(?<!\\)\$\$?|(?<!\\)\\[()\[\]]", lambda m: f"{m[1] or ''} "),
    (" +", " "),
)
_END = r"(?:^|[=,]|\\(?:in|cup|cap)(?![a-zA-Z])) ?"  # what is before an interval
_VALUES = _rules(
    (
        r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot) ?"  # a repeating decimal
        r"(?:\{([0-9]{1,20})\}|([0-9]))(?![0-9!^])",
        lambda m: _repeating(m[1], m[2], m[3] or m[4]),
    ),
    (r"(?<![0-9A-Za-z.}/^_])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9A-Za-z!^.({])", r"\1\\frac{\2}{\3}"),
    (rf"({_END})\](?= ?[^\[\]()]+[,;][^\[\]()]+[\[\])])", r"\1("),
    (rf"({_END}[\[(][^\[\]()]+[,;][^\[\]()]+)\[", r"\1)"),
)
_BRACKET = re.compile(r"[,;(\[]|\\\{")
_SCIENTIFIC = re.compile(r"([+-]?(?:[0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})) ?[eE]([+-]?[0-9]{1,4})")
_INTEGER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)")
_THOUSANDS = re.compile(
    r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9,]|\.[0-9]*[, ][0-9])"
)
_DECIMAL = re.compile(r"-?[0-9]+\.(?![0-9]{3}$)[0-9]+")
_INDIAN = re.compile("[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}")
_LOOSE = re.compile(r"(?<![0-9A-Za-z]) +| +(?![0-9A-Za-z])|(?<=[0-9]) +(?=[A-Za-z])|(?<=[A-Za-z]) +(?=[0-9])")
_TOKEN = re.compile(
    rf"\s+|{_STYLE} ?\{{(?P<styled>[^{{}}]*)\}}"
    r"|\\\\|\\[a-zA-Z]+|\\.|[<>]=|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|(?P<run>[a-zA-Z]+)|.",
    re.DOTALL,
)


def tidy(text: str) -> str:
    r"""Return the text with one spelling of spaces, signs, brackets, `\dfrac`, degrees and per cent."""
    text = text.translate(_CHARACTERS)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = text.strip().removeprefix(r"\approx").removeprefix("=").lstrip()
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def spell_out(text: str) -> str:
    r"""Return a tidy value with one spelling of mixed numbers, decimals, brackets and thousands."""
    if found := _SCIENTIFIC.fullmatch(unwrap(text)):
        return rf"{found[1]}\cdot 10^{{{found[2]}}}"
    for pattern, spelling in _VALUES if {"[", "]"} & set(text) else _VALUES[:2]:
        text = pattern.sub(spelling, text)
    if not _BRACKET.search(_THOUSANDS.sub("", text)):  # there is no list and no bracket
        text = _THOUSANDS.sub(lambda match: re.sub("[, ]", "", match[0]), text)
    return text


def _repeating(whole: str, first: str, again: str) -> str:
    numerator = int(whole + first + again) - int(whole + first or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(first) * (10 ** len(again) - 1)}}}"


def unwrap(text: str) -> str:
    r"""Return a text with `\text{...}` and similar commands replaced by their contents."""
    return _WRAPPED.sub(r"\1", text)


def is_same_text(reference: str, answer: str) -> bool:
    r"""Return whether two tidy texts are the same, apart from spaces and `\text{...}`.

    The answer may have a decimal comma or groups as in 12,34,567, and may leave out the base of a number.
    """
    one, other = (_LOOSE.sub("", " ".join(unwrap(text).split())) for text in (reference, answer))
    with_comma = one.replace(".", ",") if _DECIMAL.fullmatch(one) else one
    based = "_" in one and re.fullmatch("([0-9]+)_([0-9]{1,3})", one)
    without_base = based[1] if based and int(max(based[1])) < int(based[2]) else one
    ungrouped = other.replace(",", "") if _INDIAN.fullmatch(other) else other
    return bool(one) and (other in (one, with_comma, without_base) or ungrouped == one)


def integer(text: str) -> Decimal | None:
    """Return the value of a tidy integer with any number of digits, or `None` if it is not an integer."""
    return Decimal(re.sub("[, ]", "", text)) if _INTEGER.fullmatch(text) else None


def tokens(text: str, *, is_words: bool = False) -> list[str]:
    r"""Return the tokens of a tidy text, or of the content of `\text{...}`. A word begins with `"`."""
    found = list[str]()
    has_space = False
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token.isspace():
            has_space = True
            continue
        if match["styled"] is not None:
            found += _styled(token, match["styled"].strip(), found)
        elif match["run"] is not None:
            found += _of_letters(token, found, has_space=has_space, is_words=is_words)
        elif not (is_words and token == "."):
            found.append(token)
        has_space = False
    return found


def _styled(command: str, content: str, before: list[str]) -> list[str]:
    if re.fullmatch(r"[a-z]{1,3}/[a-z]{1,3}(?:\^[23])?", content):
        return [f'"{content}']
    if len(content) == 1 and content.isalpha():
        is_upright = command.startswith((r"\text{", r"\text {", r"\mathrm", r"\mbox", r"\textrm"))
        follows_value = bool(before) and (before[-1][-1].isdigit() or before[-1] == "}")
        return [f'"{content}'] if is_upright and content in _UNIT_LETTERS and follows_value else [content]
    return tokens(content, is_words=True)


def _of_letters(run: str, before: list[str], *, has_space: bool, is_words: bool) -> list[str]:
    """Return a function, a word, a name of several capitals, or a product of letters."""
    if run in FUNCTIONS or run in OF_MANY or run in ("sqrt", "pi"):
        return [f"\\{run}"]
    if run in ("and", "or"):
        return ["," if run == "and" else r"\lor"]
    follows_value = bool(before) and (before[-1][-1].isdigit() or before[-1] in ("}", ")", r"\circ"))
    is_short = run in _GLUED or (run in _SHORT_WORDS and has_space)
    follows_word = bool(before) and before[-1].startswith('"')
    if (is_short and (follows_value or follows_word)) or (is_words and run in _SHORT_WORDS):
        return [f'"{run}']
    if len(run) > 1 and run.isupper():
        return [run]
    is_product = len(run) < 3 or (len(run) < 5 and ord(max(run)) - ord(min(run)) == len(run) - 1)
    if (not is_product) or (is_words and len(run) > 1) or (follows_word and len(run) > 1):
        return [f'"{run if len(run) < 4 else run.casefold()}']  # MW is not mW
    return list(run)


class NotUnderstoodError(Exception):
    """A text is not an expression, list, set, interval, relation or matrix, or it is ambiguous."""


def require(is_understood: bool) -> None:
    """Raise an error if a text is not understood."""
    if not is_understood:
        raise NotUnderstoodError


class Tokens:
    """Tokens of a text, and the place of the next one."""

    def __init__(self, text: str) -> None:
        """Cut a tidy text into tokens."""
        self.tokens, self.place = tokens(text), 0

    @property
    def next(self) -> str:
        """Next token, or an empty string at the end."""
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self, token: str | None = None) -> str:
        """Return the next token and advance. Another one than the given one is not understood."""
        found = self.next
        require(bool(found) and token in (None, found))
        self.place += 1
        return found

    def has(self, *sequence: str) -> bool:
        """Take tokens if they are next, and return whether they are."""
        is_next = self.tokens[self.place : self.place + len(sequence)] == list(sequence)
        self.place += len(sequence) * is_next
        return is_next

    def raw_group(self) -> str:
        """Take a group in braces as text, or one token."""
        if not self.has("{"):
            return self.take().removeprefix('"')
        pieces, depth = list[str](), 1
        while depth:
            pieces.append(self.take().removeprefix('"'))
            depth += {"{": 1, "}": -1}.get(pieces[-1], 0)
        return "".join(pieces[:-1])

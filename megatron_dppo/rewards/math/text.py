r"""One spelling for each notation of an answer, its tokens, and the tree that they are parsed into.

A token is a command, a number, letters, a sign, or a word: `tokens(r"5\text{ cm}")` is `["5", '"cm']`.
"""

import itertools
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Union

Node = Union["Number", "Name", "Tree", "Quantity"]


def words_of(text: str) -> frozenset[str]:
    """Return the words of a text that blanks separate."""
    return frozenset(text.split())


class NotUnderstoodError(Exception):
    """A text is not an expression, list, set, interval, relation or matrix, or it is ambiguous."""


@dataclass(frozen=True)
class Number:
    """A number, with its count of decimal places if it is a decimal."""

    value: Fraction
    places: int | None = None


@dataclass(frozen=True)
class Name:
    r"""A variable, a constant (`\pi`, `e`, `i`, `\infty`) or a set of numbers (`\mathbb{R}`)."""

    text: str


@dataclass(frozen=True)
class Tree:
    """An operator, a function, a list or a relation, with its operands."""

    kind: str
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Quantity:
    """A value with what is around it: the words behind it, in order, and a mark.

    The mark is a per cent sign, a currency, degrees, or the base of a number.
    """

    value: Node
    words: tuple[str, ...] = ()
    mark: str = ""


RELATIONS = {
    **{"=": "=", r"\in": "=", r"\approx": "~", "<": "<", r"\lt": "<", ">": ">", r"\gt": ">"},
    **{r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">="},
    **{r"\ne": "!=", r"\neq": "!="},
}
SETS = frozenset({r"\mathbb{R}", r"\mathbb{Z}", r"\mathbb{N}", r"\mathbb{Q}", r"\mathbb{C}"})
EMPTY = Tree("set", ())
TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
CONSTANTS = frozenset({r"\pi", "e", "i"})
BRACKETS = frozenset({"()", "[]", "(]", "[)"})
LISTS = frozenset({"list", "or"})
GROUPS = frozenset({*BRACKETS, *LISTS, "set", "matrix", "row", "cup", "cap", "setminus"})
ACCENTS = words_of("""
    overline bar vec hat widehat tilde widetilde dot ddot overrightarrow overleftarrow mathcal mathfrak
    mathscr""")
LETTERS = words_of("""
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi
    chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega infty angle triangle ell
    partial prime star dots""")
_MAX_SIGNS = 4  # plus-minus signs of one item
MAX_LENGTH = 1000  # characters of an answer that is compared as a value
FUNCTIONS = frozenset(
    f"{before}{name}{after}"
    for name in ("sin", "cos", "tan", "cot", "sec", "csc")
    for before, after in (("", ""), ("arc", ""), ("", "h"), ("ar", "h"))
) | {"ln", "lg", "log", "exp"}
OF_MANY = frozenset({"gcd", "lcm", "max", "min"})
# Words that may stand behind a value glued to it, or behind a space in plain text; others need four letters.
_SHORT_WORDS = words_of("""
    th st nd rd cm km mm kg mg ml mi ft yd oz lb lbs mph kph hr hrs min mins sec am pm AM PM BC AD CE BCE in
    inch yr yrs day days men USD EUR""")
_GLUED = words_of("th st nd rd cm km mm kg mg ml mph am pm")
_UNIT_LETTERS = frozenset("mshgl")
_CHARACTERS = str.maketrans(
    {
        **{"π": r"\pi ", "√": r"\sqrt ", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "∙": r"\cdot "},
        **{"−": "-", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap "},
        **{"∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}"},
        **{"°": r"^\circ ", "º": r"^\circ ", "⁄": "/", "θ": r"\theta ", "∘": r"\circ ", "≈": r"\approx "},
        **{"’": "'", "′": "'", "（": "(", "）": ")", "，": ",", "。": ".", "：": ":"},
        **{"℃": r"^\circ C", "℉": r"^\circ F", **{chr(0xFF10 + digit): str(digit) for digit in range(10)}},
    }
)
_FRACTION = re.compile("[¼-¾⅐-⅞]")
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_SUPERSCRIPT = re.compile(f"(⁻?)([{_RAISED}]+)")
_SPACING = re.compile(r"(\\\\)|\\!\s*|(\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s+)")
_FONTS = "text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|bfit)|[mh]box|boldsymbol|bm|underline"
_STYLE = rf"\\(?:{_FONTS}|operatorname)"
_WRAPPED = re.compile(_STYLE + r" ?\{([^{}]*)\}")
_COMMANDS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac "),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom "),
    **dict.fromkeys(("displaystyle", "textstyle", "scriptstyle"), " "),
    **dict.fromkeys(("limits", "nolimits", "null", "relax", "nobreak", "strut", "hfill", "centering"), ""),
    **dict.fromkeys((f"{big}{side}" for big in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r")), " "),
    **dict.fromkeys(("vert", "lvert", "rvert"), "|"),
    **dict.fromkeys(("land", "wedge"), ","),
    **dict.fromkeys(("cdotp", "ast"), r"\cdot "),
    **dict.fromkeys(("ldots", "cdots", "dotsc", "dotsb"), r"\dots "),
    **dict.fromkeys(("degree", "degrees", "textdegree"), r"^\circ "),
    **{
        "lbrace": r"\{",
        "rbrace": r"\}",
        "lbrack": "[",
        "rbrack": "]",
        "varnothing": r"\emptyset ",
        "vee": r"\lor ",
    },
    **{"varphi": r"\phi ", "varepsilon": r"\epsilon ", "vartheta": r"\theta ", "imath": "i ", "jmath": "j "},
}
_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\(?:text)?color ?\{[^{}]*\}|\\tag\*? ?\{[^{}]*\}", ""),
        (r"\\(?:left|right|middle) ?(?=[()\[\]|]|\\[{}|]|\\[lr](?:floor|ceil|angle|brace|brack|vert))", ""),
        (r"\\(?:left|right) ?\.", ""),
        (
            r"[\[(] ?\\begin\{array\} ?(?:\{[lcr| ]*\}) ?(.*?)\\end\{array\} ?[\])]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (r"(?<=[0-9])\{,\}(?=[0-9]{3}(?![0-9]))", ""),
        (r"\{([,:.])\}", r"\1"),
        (r"(?<=[0-9])['](?=[0-9]{3}(?![0-9]))", ""),
        (r"\\mathbb ?([A-Z])", r"\\mathbb{\1}"),
        (r",? ?(?:\\dots(?![a-z])|…|\.\.\.) ?,?(?=.)", r",\\dots ,"),
        (r"<=|=<", r"\\le "),
        (r">=", r"\\ge "),
        (_STYLE + r" ?\{ ?per ?cent(?:age)? ?\}|(?<=[0-9}]) ?per ?cent$|(?<!\\)%", r"\\%"),
        (
            r"(?:\{\})?\^ ?(?:\\circ|\{ ?" + _STYLE + r" ?\{ ?(?:o|\^? ?\\circ) ?\} ?\}|\{ ?\\circ ?\}) ?",
            r"^\\circ ",
        ),
        (_STYLE + r" ?\{ ?\^ ?\\circ ?\}", r"^\\circ "),
        (r"\^ ?\{? ?" + _STYLE + r" ?\{ ?(th|st|nd|rd) ?\} ?\}?", r"\\text{\1}"),
        (r"\{\\(?:rm|bf|it|sf|tt) ?([^{}\\]*)\}", r"\\mathrm{\1}"),
        (r"\\(?:hat|vec|widehat) ?\{ ?(?:" + _STYLE + r" ?\{ ?(\w) ?\}|([ijk])) ?\}", r"\\mathbf{\1\2}"),
        (r"([A-Za-z])\. ?([A-Za-z])\.(?![a-zA-Z])", r"\1\2"),  # a.m., B.C.
        (r"(?<![A-Za-z0-9}^_])C ?\( ?([0-9]{1,3}) ?, ?([0-9]{1,3}) ?\)$", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z0-9}^_])C ?_ ?\{? ?([0-9]{1,3}) ?\}? ?\^ ?\{? ?([0-9]{1,3}) ?\}?", r"\\binom{\1}{\2}"),
    )
)
_DOLLARS = re.compile(r"(?<!\\)\$\$?([^$]*)(?<!\\)\$\$?|(?<!\\)\\[()\[\]]")
_MIXED = re.compile(r"(?<![0-9A-Za-z.}/^_])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9A-Za-z!^.({])")
_REPEATING = re.compile(
    r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar|dot) ?(?:\{([0-9]{1,20})\}|([0-9]))(?![0-9!^])"
)
_SCIENTIFIC = re.compile(r"([+-]?(?:[0-9]{1,30}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})) ?[eE]([+-]?[0-9]{1,4})")
_OPEN_ENDS = re.compile(
    r"(^|[=,]|\\(?:in|cup|cap)(?![a-zA-Z])) ?([\[\](]) ?([^\[\]()]+?[,;][^\[\]()]+?) ?([\[\])])"
)
_INTEGER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)")
_THOUSANDS = re.compile(
    r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9,]|\.[0-9]*[, ][0-9])"
)
_LOOSE = re.compile(r"(?<![0-9A-Za-z]) +| +(?![0-9A-Za-z])|(?<=[0-9]) +(?=[A-Za-z])|(?<=[A-Za-z]) +(?=[0-9])")
_TOKEN = re.compile(
    rf"\s+|{_STYLE} ?\{{(?P<styled>[^{{}}]*)\}}"
    r"|\\\\|\\[a-zA-Z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|(?P<run>[a-zA-Z]+)|.",
    re.DOTALL,
)


def tidy(text: str) -> str:
    r"""Return the text with one spelling of spaces, signs, brackets, `\dfrac`, degrees and per cent."""
    text = _FRACTION.sub(_fraction, text)
    text = _SUPERSCRIPT.sub(
        lambda m: f"^{{{'-' * bool(m[1])}{''.join(str(_RAISED.index(d)) for d in m[2])}}}", text
    )
    text = _SPACING.sub(lambda m: m[1] or (" " if m[2] else ""), text.translate(_CHARACTERS))
    text = re.sub(r"(?<![0-9])–|–(?![0-9])", "-", text)  # an en dash between two numbers is a range
    text = re.sub(r"\\([a-zA-Z]+)", lambda m: _COMMANDS.get(m[1], m[0]), text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _DOLLARS.sub(lambda m: f"{m[1]} " if m[1] is not None else " ", text)
    text = re.sub(r" +", " ", text).strip().removeprefix(r"\approx").removeprefix("=").lstrip()
    return text if text.endswith("..") else text.removesuffix(".").rstrip()


def _fraction(match: re.Match[str]) -> str:
    value = Fraction(unicodedata.numeric(match[0])).limit_denominator(10)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def spell_out(text: str) -> str:
    r"""Return a tidy value with one spelling of mixed numbers, decimals, brackets and thousands."""
    if found := _SCIENTIFIC.fullmatch(unwrap(text)):
        return rf"{found[1]}\cdot 10^{{{found[2]}}}"
    text = _REPEATING.sub(_repeating, text)
    text = _MIXED.sub(lambda m: rf"{m[1]}\frac{{{m[2]}}}{{{m[3]}}}", text)
    text = _OPEN_ENDS.sub(_half_open, text)
    without = _THOUSANDS.sub("", text)
    if not ({",", ";"} & set(without) or re.search(r"[(\[]|\\\{", without)):  # there is no list and no bracket
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", "").replace(" ", ""), text)
    return text


def _repeating(match: re.Match[str]) -> str:
    whole, first, again = match[1], match[2], match[3] or match[4]
    numerator = int(whole + first + again) - int(whole + first or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(first) * (10 ** len(again) - 1)}}}"


def _half_open(match: re.Match[str]) -> str:
    before, opener, content, closer = match.groups()
    return before + ("[" if opener == "[" else "(") + content + ("]" if closer == "]" else ")")


def unwrap(text: str) -> str:
    r"""Return a text with `\text{...}` and similar commands replaced by their contents."""
    return _WRAPPED.sub(r"\1", text)


def is_same_text(reference: str, answer: str) -> bool:
    r"""Return whether two tidy texts are the same, apart from spaces and `\text{...}`."""
    one, other = (_LOOSE.sub("", " ".join(unwrap(text).split())) for text in (reference, answer))
    return one == other and bool(one)


def integer(text: str) -> str | None:
    """Return a tidy integer as text without commas and leading zeros, or `None` if it is not an integer."""
    if not _INTEGER.fullmatch(text):
        return None
    digits = text.lstrip("+-").replace(",", "").replace(" ", "").lstrip("0")
    return ("-" if text.startswith("-") and digits else "") + (digits or "0")


def is_regrouped(reference: str, answer: str) -> bool:
    """Return whether an answer is the reference with a decimal comma, or grouped as in 12,34,567."""
    if re.fullmatch(r"-?[0-9]+\.[0-9]+", reference) and len(reference.partition(".")[2]) != 3:
        return answer == reference.replace(".", ",")
    return (
        bool(re.fullmatch(r"[0-9]{1,2}(,[0-9]{2})+,[0-9]{3}", answer)) and answer.replace(",", "") == reference
    )


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
        if not found or (token is not None and found != token):
            raise NotUnderstoodError
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
        while True:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token, 0)
            if depth == 0:
                return "".join(pieces)
            pieces.append(token.removeprefix('"'))


def negative(node: Node) -> Node:
    """Return a tree with a minus before it."""
    if isinstance(node, Number):
        return Number(-node.value, node.places)
    if isinstance(node, Quantity):
        return Quantity(negative(node.value), node.words, node.mark)
    return Tree("-", (node,))


def walk(node: Node) -> Iterator[Node]:
    """Yield a tree and all trees in it."""
    yield node
    for part in node.parts if isinstance(node, Tree) else (node.value,) if isinstance(node, Quantity) else ():
        yield from walk(part)


def names(node: Node) -> frozenset[str]:
    """Return the variables of a tree, and its functions with unknown values."""
    nodes = list(walk(node))
    found = {each.text for each in nodes if isinstance(each, Name)} - CONSTANTS
    calls = {each.kind[5:] for each in nodes if isinstance(each, Tree) and each.kind.startswith("call ")}
    return frozenset(found | calls)


def is_relation(node: Node) -> bool:
    """Return whether a tree is an equation, an inequality or a chain of them."""
    return isinstance(node, Tree) and all(kind in RELATIONS.values() for kind in node.kind.split())


def is_group(node: Node) -> bool:
    """Return whether a tree is a list, a set, an interval, a union or a matrix, and so not a number."""
    return isinstance(node, Tree) and node.kind in GROUPS


def with_both_signs(node: Node) -> list[Node]:
    r"""Return an item once for each choice of the signs `\pm`. With `\mp`, all its signs are one choice."""
    kinds = [each.kind for each in walk(node) if isinstance(each, Tree) and each.kind in (r"\pm", r"\mp")]
    if not kinds:
        return [node]
    if len(kinds) > _MAX_SIGNS:
        raise NotUnderstoodError
    count = 1 if r"\mp" in kinds else len(kinds)
    choices = itertools.product((False, True), repeat=count)
    return [_apply_signs(node, iter(choice * (len(kinds) // count))) for choice in choices]


def _apply_signs(node: Node, choices: Iterator[bool]) -> Node:
    if isinstance(node, Quantity):
        return Quantity(_apply_signs(node.value, choices), node.words, node.mark)
    if not isinstance(node, Tree):
        return node
    if node.kind in (r"\pm", r"\mp"):
        is_minus = next(choices) != (node.kind == r"\mp")
        part = _apply_signs(node.parts[0], choices)
        return negative(part) if is_minus else part
    return Tree(node.kind, tuple(_apply_signs(part, choices) for part in node.parts))

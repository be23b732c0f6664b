r"""Parses an answer into a tree. It is strict: text that it does not understand is an error.

A parser that skips or guesses would accept wrong answers. A list without brackets is a `Tree("list", ...)`.
What is around a value (words, a unit, a per cent sign) is kept in a `Quantity`.
"""

import itertools
import re
from fractions import Fraction
from functools import lru_cache

from megatron_dppo.rewards.math import text as spelling
from megatron_dppo.rewards.math.text import Name, Node, Number, Quantity, Tokens, Tree, require

_CURRENCIES = spelling.spellings(r"dollar \$ $; euro € \euro; yen ¥; rupee ₹; sterling £ \pounds")
_MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 1000, "lakh": 10**5, "million": 10**6, "crore": 10**7}
_MULTIPLIERS.update({"billion": 10**9, "trillion": 10**12})
MAX_LENGTH = 1000  # characters of an answer that is compared as a value
_MAX_SIGNS = 4  # plus-minus signs of one item
_LEAD = spelling.words_of("""
    the a an final correct answer answers is are so therefore thus hence we get have there it equals equal
    to value values result solution solutions total number of way ways""")
_SIGNS = frozenset({"+", "-", r"\pm"})
_OPERATORS = spelling.spellings(r"* \cdot \times; / \div")
_ACCENTS = spelling.words_of("""
    overline bar vec hat widehat tilde widetilde dot ddot overrightarrow overleftarrow mathcal mathfrak
    angle triangle""")
_LETTERS = spelling.words_of("""
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi
    chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega infty ell
    partial prime star dots""")
_FACTORS = spelling.words_of("frac sqrt binom lfloor lceil begin mathbb emptyset").union(
    spelling.FUNCTIONS, spelling.OF_MANY, _LETTERS, _ACCENTS
)
_FACTOR = re.compile("[A-Za-z0-9({.]")
_DATE = re.compile(r"[0-9]{1,2}([/-])[0-9]{1,2}\1[0-9]{2,4}|[0-9]{4}([/-])[0-9]{1,2}\2[0-9]{1,2}")  # 1/2/2020


@lru_cache(maxsize=256)  # all responses to a prompt share the reference
def parsed(text: str) -> Node | None:
    """Return the tree of a tidy text, or `None` if it is not understood completely."""
    value = spelling.spell_out(text)
    try:
        require(len(value) <= MAX_LENGTH and not _DATE.fullmatch(value))
        parser = _Parser(value)
        node = parser.items()
        require(not parser.next)
    except (spelling.NotUnderstoodError, RecursionError):
        return None
    return node


class _Parser(Tokens):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._bars = 0  # open `|`
        self._signs = list[int]()  # places of `\pm` in the current item
        self._is_angle = False
        self._mark = ""  # of the current side: degrees

    def items(self, *, has_choices: bool = True) -> Node:
        r"""Parse items between commas, semicolons or "or", for both signs `\pm`. One item is not a list."""
        separators, items = set[str](), list[Node]()
        while not items or self.next in (",", ";", r"\lor"):
            if items:
                separators.add(self.take())
            while items and self.has(","):  # 1, 2, and 3
                pass
            items += self._for_both_signs() if has_choices else [self._relation()]
        if len(items) == 1:
            return items[0]
        return Tree("or" if separators == {r"\lor"} else "list", tuple(items))

    def _for_both_signs(self) -> list[Node]:
        r"""Parse an item once for each choice of its signs `\pm`."""
        start, before, signs = self.place, self._signs, list[int]()
        self._signs = signs
        found = [self._relation()]
        require(len(signs) <= _MAX_SIGNS)
        written = self.tokens.copy()
        for choice in [*itertools.product("+-", repeat=len(signs))][1:]:  # the first one is found already
            for place, sign in zip(signs, choice, strict=True):
                self.tokens[place] = sign
            self.place = start
            found.append(self._relation())
        self.tokens, self._signs = written, before
        return found

    def _relation(self) -> Node:
        sides, relations = [self._side()], list[str]()
        while self.next in spelling.RELATIONS:
            relations.append(spelling.RELATIONS[self.take()])
            sides.append(self._side())
        return Tree(" ".join(relations), tuple(sides)) if relations else sides[0]

    def _side(self) -> Node:
        words = self._words()
        while words and self.has(","):  # Therefore, the answer is 5
            words += self._words()
        if not {*map(str.casefold, words)} <= _LEAD:
            require(self.next == "=")
            return Name('"' + " ".join(words))
        if words:
            _ = self.has(":") or self.has("=")
        before, self._mark = self._mark, ""
        mark = _CURRENCIES[self.take()] if self.next in _CURRENCIES else ""
        node = self._sum()
        while self.next in (r"\cup", r"\cap", r"\setminus"):
            kind = self.take()[1:]
            parts = node.parts if node.kind == kind != "setminus" else (node,)
            node = Tree(kind, (*parts, self._sum()))
        behind = "%" if self.next == r"\%" else _CURRENCIES.get(self.next, "")
        self.place += bool(behind)
        marks = {mark, self._mark, behind} - {""}
        require(len(marks) <= 1)
        self._mark = before
        words = self._words()
        if words and words[0] in _MULTIPLIERS:
            node = Tree("*", (node, Number(Fraction(_MULTIPLIERS[words.pop(0)]))))
        return Quantity(node, tuple(words), *marks) if words or marks else node

    def _words(self) -> list[str]:
        found = list[str]()
        while self.next.startswith('"'):
            word = self.take()[1:]
            found.append(f"{word}^{self.raw_group()}" if self.has("^") else word)
        return found

    def _sum(self) -> Node:
        terms = [self._signed_term()]
        while self.next in _SIGNS:
            terms.append(self._signed_term())
        return terms[0] if len(terms) == 1 else Tree("+", tuple(terms))

    def _signed_term(self) -> Node:
        if self.next not in _SIGNS:
            return self._product()
        if self.next == r"\pm":
            self._signs.append(self.place)
        sign = self.take()
        require(self.next not in _SIGNS - {"-"})
        term = self._signed_term()
        return _negative(term) if sign == "-" else term

    def _product(self) -> Node:
        node = self._implicit_product()
        if self.next == ":":
            return self._ratio(node)
        while self.next in _OPERATORS:
            kind = _OPERATORS[self.take()]
            is_minus = self.has("-")
            factor = self._implicit_product()
            node = Tree(kind, (node, _negative(factor) if is_minus else factor))
        return node

    def _ratio(self, first: Node) -> Node:
        """Parse a ratio of numbers, or a time of day."""
        start, parts = self.place - 1, [first]
        while self.has(":"):
            parts.append(self._power())
        values = [part.value for part in parts if isinstance(part, Number)]
        require(len(values) == len(parts) and sum(values) != 0)
        if re.fullmatch(r"0?([0-9]|1[0-9]|2[0-4]):[0-5][0-9]", "".join(self.tokens[start : self.place])):
            return Tree("clock", tuple(parts))
        shares = tuple(Number(value / sum(values)) for value in values)
        return Tree("ratio", shares) if len(parts) > 2 else Tree("/", tuple(parts))

    def _implicit_product(self, *, in_function: bool = False) -> Node:
        first = self.next
        node = self._power(is_first=True)
        if isinstance(node, Number) and self.tokens[self.place - 1] == first and self.next == r"\frac":
            # a mixed number if the fraction is proper, with integers
            whole, fraction = node, self._power()
            values = [part.value for part in fraction.parts if isinstance(part, Number)]
            is_mixed = fraction.kind == "/" and len(values) == 2
            require(not is_mixed or (whole.places is None and 0 < values[0] < values[1]))
            node = Tree("+" if is_mixed else "*", (whole, fraction))
        while self._starts_factor():
            require(not in_function or self.next != "(")  # is `\\sin x(y+1)` a product of sines?
            if in_function and self.next[1:] in spelling.FUNCTIONS:
                break
            if self.next[0] in ".0123456789":  # numbers side by side, or a power without braces
                around = self.tokens[self.place - 1], *self.tokens[self.place + 1 : self.place + 2]
                require(around in (("}", "^"), ("!", "!")))
            node = Tree("*", (node, self._power()))
        return node

    def _starts_factor(self) -> bool:
        if self.next == "|":
            return self._bars == 0
        return self.next[1:] in _FACTORS if self.next[:1] == "\\" else bool(_FACTOR.match(self.next))

    def _power(self, *, is_first: bool = False) -> Node:
        node = self._atom(is_first=is_first)
        has_power = False
        while self.next in ("^", "!"):
            if self.has("^", r"\circ"):
                node = self._degrees(node)
                continue
            require(not has_power)  # `2^3!` is ambiguous
            if self.has("!"):
                require(self.next != "!")  # `n!!` is not a factorial's factorial
                node = Tree("factorial", (node,))
            else:
                self.take("^")
                has_power = True
                node = Tree("^", (node, self._argument()))
        return node

    def _degrees(self, node: Node) -> Node:
        if self._is_angle:
            return Tree("/", (Tree("*", (node, Name(r"\pi"))), Number(Fraction(180))))
        mark = f"degree_{self.take()}" if self.next in ("C", "F", "K") else "degree"
        require(self._mark in ("", mark))
        self._mark = mark
        return node

    def _argument(self, *, is_digit: bool = False) -> Node:
        r"""Parse a group in braces, or the operand that one token starts: a digit, a letter, a command.

        Without braces, `\frac` and `\sqrt` take only one digit of a number.
        """
        if is_digit and self.next[:1].isdigit():
            self.tokens[self.place : self.place + 1] = list(self.next)
        # TeX reads `x^12` as `x^{1}2`, which is hardly meant
        require(len(self.next) == 1 or not self.next.isdigit())
        return self._atom()

    def _group(self) -> Node:
        node = self._sum()
        if self.next in (r"\over", r"\choose"):
            kind = "/" if self.take() == r"\over" else "binom"
            node = Tree(kind, (node, self._sum()))
        self.take("}")
        return node

    def _atom(self, *, is_first: bool = False) -> Node:
        token = self.take()
        if token[0] == "\\":
            return self._command(token)
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return Number(Fraction(f"0{token}"), len(token.partition(".")[2]) if "." in token else None)
        if token.isascii() and token.isalpha():
            return self._letter(token, is_first=is_first)
        if token == "|":
            self._bars += 1
            node = Tree("abs", (self._sum(),))
            self._bars -= 1
            self.take("|")
            return node
        require(token in "{([")
        return self._group() if token == "{" else self._bracket(token)

    def _letter(self, token: str, *, is_first: bool) -> Node:
        name = f"{token}_{self.raw_group()}" if self.has("_") else token
        while self.has("'"):
            name += "'"
        place, is_function = self.place, token in "fghFGHPQ" and (token == "f" or is_first)
        if is_function and self.has("^", "{", "-", "1", "}", "("):
            name += "^{-1}"
        elif not (is_function and self.has("(")):
            return Name(name)
        argument = self._bracket("(")
        parts = argument.parts if argument.kind == "()" else (argument,)
        if token == "f" or not all(part.kind == "+" for part in parts):
            return Tree(f"call {name}", parts)
        self.place = place  # `h(h+1)` is a product
        return Name(name)

    def _bracket(self, opener: str) -> Node:
        node, kind = self.items(has_choices=False), opener + self.take()
        if node.kind == "list":
            require(kind in spelling.BRACKETS)
            return Tree(kind, node.parts)
        require(kind in ("()", "[]") and not isinstance(node, Quantity) and not node.is_relation)
        is_interval = opener == "[" and self.next in ("", ",", ";", ")", "]", "}", r"\}", r"\cup", r"\cap")
        return Tree("[]", (node,)) if is_interval else node

    def _command(self, token: str) -> Node:
        name = token[1:]
        if name in spelling.FUNCTIONS:
            return self._function(name)
        if name in spelling.OF_MANY:
            node = self._atom()
            require(node.kind == "()")
            return Tree(name, node.parts)
        if name in ("frac", "binom"):
            first = self.tokens[self.place : self.place + 3]
            require(first[:2] != ["{", "d"] or first[2:] == ["}"])  # a derivative is not a quotient
            parts = self._argument(is_digit=True), self._argument(is_digit=True)
            return Tree("/" if name == "frac" else "binom", parts)
        if name == "sqrt":
            index = self._bracket("[") if self.has("[") else Number(Fraction(2))
            return Tree("root", (self._argument(is_digit=True), index))
        if name in ("lfloor", "lceil"):
            node = self._sum()
            self.take(rf"\r{name[1:]}")
            return Tree(name[1:], (node,))
        if name == "emptyset" or (name == "{" and self.has(r"\}")):
            return Tree("set", ())
        if name == "{":
            node = self.items()
            self.take(r"\}")
            return Tree("set", node.parts if node.kind == "list" else (node,))
        if name == "mathbb":
            return Name(rf"\mathbb{{{self.raw_group()}}}")
        return self._matrix() if name == "begin" else self._styled(token)

    def _styled(self, token: str) -> Node:
        if token[1:] in _ACCENTS:
            content = self.raw_group()
            require(content[:1] == "\\" or content[:1].isalpha())
            token = f"{token}{{{content}}}"
        else:
            require(token[1:] in _LETTERS)
        return Name(f"{token}_{self.raw_group()}" if self.has("_") else token)

    def _function(self, name: str) -> Node:
        base = self._argument() if self.has("_") else None
        power = self._argument() if self.has("^") else None
        require(base is None or name == "log")
        is_angle, self._is_angle = self._is_angle, name in spelling.TRIGONOMETRIC
        if power == Number(Fraction(-1)):
            require(name in spelling.TRIGONOMETRIC)
            name, power = f"arc{name}", None
        if self.next in ("(", "{"):
            argument = self._atom()
            require(not argument.is_group)
        elif self.next[1:] in spelling.FUNCTIONS:
            argument = self._power()
        else:
            argument = self._implicit_product(in_function=True)
        self._is_angle = is_angle
        node = Tree(name, (argument,) if base is None else (argument, base))
        return node if power is None else Tree("^", (node, power))

    def _matrix(self) -> Node:
        kind = self.raw_group()
        require(kind in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix"))
        rows = list[Node]()
        while not self.has(r"\end"):
            row = [self._sum()]
            while self.has("&"):
                row.append(self._sum())
            rows.append(Tree("row", tuple(row)))
            require(self.has(r"\\") or self.next == r"\end")
        require(self.raw_group() == kind and len({len(row.parts) for row in rows}) == 1)
        return Tree("matrix", tuple(rows))


def _negative(node: Node) -> Node:
    if isinstance(node, Number):
        return Number(-node.value, node.places)
    return Tree("-", (node,))

r"""Parses an answer into a tree. It is strict: text that it does not understand is an error.

A parser that skips or guesses would accept wrong answers. A list without brackets is a `Tree("list", ...)`.
What is around a value (words, a unit, a per cent sign) is kept in a `Quantity`.
"""

import itertools
import re
from fractions import Fraction

from megatron_dppo.rewards.math.text import (
    ACCENTS,
    EMPTY,
    FUNCTIONS,
    LETTERS,
    OF_MANY,
    RELATIONS,
    TRIGONOMETRIC,
    Name,
    Node,
    NotUnderstoodError,
    Number,
    Quantity,
    Tokens,
    Tree,
    negative,
    spellings,
    words_of,
)

_CURRENCIES = spellings(r"dollar \$ $; euro € \euro; yen ¥; rupee ₹; sterling £ \pounds")
_MULTIPLIERS = {"dozen": 12, "hundred": 100, "thousand": 1000, "lakh": 10**5, "million": 10**6, "crore": 10**7}
_MULTIPLIERS.update({"billion": 10**9, "trillion": 10**12})
_MAX_SIGNS = 4  # plus-minus signs of one item
_LEAD = words_of("""
    the a an final correct answer answers is are so therefore thus hence we get have there it equals equal
    to value values result solution solutions total number of way ways""")
_SIGNS = frozenset({"+", "-", r"\pm", r"\mp"})
_TIMES, _DIVIDE = frozenset({r"\cdot", r"\times", "*"}), frozenset({"/", r"\div"})
_FACTORS = words_of("frac sqrt binom lfloor lceil begin mathbb emptyset").union(
    FUNCTIONS, OF_MANY, LETTERS, ACCENTS
)


def parse(text: str) -> Node:
    """Return the tree of a tidy text.

    Raises:
        NotUnderstoodError: The text cannot be parsed.
    """
    parser = _Parser(text)
    node = parser.items()
    if parser.next:
        raise NotUnderstoodError
    return node


class _Parser(Tokens):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._bars = 0  # open `|`
        self._signs = dict[int, str]()  # places of `\pm` and `\mp` in the current item
        self._is_angle = False
        self._mark = ""  # of the current side: degrees or a base

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
        r"""Parse an item once for each choice of its signs `\pm`. With `\mp`, all its signs are one choice."""
        start, before = self.place, self._signs
        self._signs = signs = dict[int, str]()
        found = [self._relation()]
        if len(signs) > _MAX_SIGNS:
            raise NotUnderstoodError
        if signs:
            count = 1 if r"\mp" in signs.values() else len(signs)
            found.clear()
            for choice in itertools.product("+-", repeat=count):
                for (place, sign), plus in zip(signs.items(), choice * (len(signs) // count), strict=True):
                    self.tokens[place] = plus if sign == r"\pm" else "-" if plus == "+" else "+"
                self.place = start
                found.append(self._relation())
            for place, sign in signs.items():
                self.tokens[place] = sign
        self._signs = before
        return found

    def _relation(self) -> Node:
        sides, relations = [self._side()], list[str]()
        while self.next in RELATIONS:
            relations.append(RELATIONS[self.take()])
            sides.append(self._side())
        return Tree(" ".join(relations), tuple(sides)) if relations else sides[0]

    def _side(self) -> Node:
        words = self._words()
        while words and self.has(","):  # Therefore, the answer is 5
            words += self._words()
        if not {*map(str.casefold, words)} <= _LEAD:
            if self.next != "=":
                raise NotUnderstoodError
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
        marks = {mark, self._mark, _CURRENCIES.get(self.next, ""), "%" * (self.next == r"\%")} - {""}
        self.place += self.next in (r"\%", *_CURRENCIES)
        self._mark = before
        if len(marks) > 1:
            raise NotUnderstoodError
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
        if self.next in (r"\pm", r"\mp"):
            self._signs[self.place] = self.next
        sign = self.take()
        if self.next in _SIGNS - {"-"}:
            raise NotUnderstoodError
        term = self._signed_term()
        return negative(term) if sign == "-" else term

    def _product(self) -> Node:
        node = self._implicit_product()
        if self.next == ":":
            return self._ratio(node)
        while self.next in _TIMES | _DIVIDE:
            operator = self.take()
            is_minus = self.has("-")
            factor = self._implicit_product()
            pair = node, negative(factor) if is_minus else factor
            node = Tree("*" if operator in _TIMES else "/", pair)
        return node

    def _ratio(self, first: Node) -> Node:
        """Parse a ratio of numbers, or a time of day."""
        parts, texts = [first], [self.tokens[self.place - 1]]
        while self.has(":"):
            texts.append(self.next)
            parts.append(self._power())
        values = [part.value for part in parts if isinstance(part, Number)]
        if len(values) < len(parts) or not sum(values):
            raise NotUnderstoodError
        if re.fullmatch(r"0?([0-9]|1[0-9]|2[0-4]):[0-5][0-9]", ":".join(texts)):
            return Tree("clock", tuple(parts))
        if len(parts) == 2:
            return Tree("/", tuple(parts))
        return Tree("ratio", tuple(Number(value / sum(values)) for value in values))

    def _implicit_product(self, *, in_function: bool = False) -> Node:
        first = self.next
        node = self._power(is_first=True)
        if isinstance(node, Number) and self.tokens[self.place - 1] == first and self.next == r"\frac":
            node = self._mixed(node)
        while self._starts_factor():
            if in_function and self.next == "(":
                raise NotUnderstoodError  # is `\\sin x(y+1)` a product of sines?
            if in_function and self.next[1:] in FUNCTIONS:
                break
            if self.next[0] in ".0123456789":
                after = self.tokens[self.place + 1 : self.place + 2]
                if (self.tokens[self.place - 1], *after) not in (("}", "^"), ("!", "!")):
                    raise NotUnderstoodError  # numbers side by side, or a power without braces
            node = Tree("*", (node, self._power()))
        return node

    def _mixed(self, whole: Number) -> Node:
        """Parse an integer before a fraction. It is a mixed number if the fraction is proper, with integers."""
        fraction = self._power()
        above, below = fraction.parts if fraction.kind == "/" else (None, None)
        if not (isinstance(above, Number) and isinstance(below, Number)):
            return Tree("*", (whole, fraction))
        if whole.places is not None or not 0 < above.value < below.value:
            raise NotUnderstoodError
        return Tree("+", (whole, fraction))

    def _starts_factor(self) -> bool:
        token = self.next
        if token == "|":
            return self._bars == 0
        if token[:1] == "\\":
            return token[1:] in _FACTORS
        return bool(token) and token.isascii() and (token[0].isalnum() or token[0] in "({.")

    def _power(self, *, is_first: bool = False) -> Node:
        node = self._atom(is_first=is_first)
        has_power = False
        while True:
            if self.has("^", r"\circ") or self.has("^", "{", r"\circ", "}"):
                node = self._degrees(node)
            elif self.has("^"):
                if has_power:
                    raise NotUnderstoodError
                has_power = True
                node = Tree("^", (node, self._argument()))
            elif self.has("!"):
                if self.next == "!" or has_power:
                    raise NotUnderstoodError  # `n!!` is not a factorial's factorial, `2^3!` is ambiguous
                node = Tree("factorial", (node,))
            else:
                return node

    def _degrees(self, node: Node) -> Node:
        if self._is_angle:
            return Tree("/", (Tree("*", (node, Name(r"\pi"))), Number(Fraction(180))))
        scale = self.take() if self.next in ("C", "F", "K") else ""
        if self._mark not in ("", f"degree {scale}".strip()):
            raise NotUnderstoodError
        self._mark = f"degree {scale}".strip()
        return node

    def _argument(self) -> Node:
        """Parse a group in braces, or the operand that one token starts: a digit, a letter, a command."""
        if self.next == "{":
            return self._group()
        if self.next.isdigit() and len(self.next) > 1:  # TeX reads `x^12` as `x^{1}2`, which is hardly meant
            raise NotUnderstoodError
        return self._atom()

    def _digit(self) -> Node:
        r"""Parse an argument of `\frac` or `\sqrt`. Without braces it is only one digit of a number."""
        if self.next[:1].isdigit():
            self.tokens[self.place : self.place + 1] = list(self.next)
        return self._argument()

    def _group(self) -> Node:
        self.take("{")
        bars, self._bars = self._bars, 0
        node = self._sum()
        if self.next in (r"\over", r"\choose"):
            kind = "/" if self.take() == r"\over" else "binom"
            node = Tree(kind, (node, self._sum()))
        self._bars = bars
        self.take("}")
        return node

    def _atom(self, *, is_first: bool = False) -> Node:
        token = self.take()
        if token[0] == "\\":
            return self._command(token)
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return self._number(token)
        if token.isascii() and token.isalpha():
            return self._letter(token, is_first=is_first)
        if token == "|":
            self._bars += 1
            node = Tree("abs", (self._sum(),))
            self._bars -= 1
            self.take("|")
            return node
        if token not in "{([":
            raise NotUnderstoodError
        self.place -= token == "{"
        return self._group() if token == "{" else self._bracket(token)

    def _number(self, token: str) -> Node:
        places = len(token.partition(".")[2]) if "." in token else None
        if self.has("_"):  # in another base
            base = self.raw_group()
            if not base.isdigit() or places is not None or int(max(token)) >= int(base) or self._mark:
                raise NotUnderstoodError
            self._mark = f"base {base}"
        return Number(Fraction(f"0{token}"), places)

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
        bars, self._bars = self._bars, 0
        node = self.items(has_choices=False)
        self._bars = bars
        closer = self.take()
        if closer not in (")", "]"):
            raise NotUnderstoodError
        if node.kind == "list":
            return Tree(opener + closer, node.parts)
        if opener + closer not in ("()", "[]") or isinstance(node, Quantity) or node.is_relation:
            raise NotUnderstoodError
        is_interval = opener == "[" and self.next in ("", ",", ";", ")", "]", "}", r"\}", r"\cup", r"\cap")
        return Tree("[]", (node,)) if is_interval else node

    def _command(self, token: str) -> Node:
        name = token[1:]
        if name in FUNCTIONS:
            return self._function(name)
        if name in OF_MANY:
            self.take("(")
            node = self._bracket("(")
            if not (node.kind == "()"):
                raise NotUnderstoodError
            return Tree(name, node.parts)
        if name in ("frac", "binom"):
            first = self.tokens[self.place : self.place + 3]
            if first[:2] == ["{", "d"] and first[2:] != ["}"]:
                raise NotUnderstoodError  # a derivative is not a quotient
            return Tree("/" if name == "frac" else "binom", (self._digit(), self._digit()))
        if name == "sqrt":
            index: Node = Number(Fraction(2))
            if self.has("["):
                index = self._sum()
                self.take("]")
            return Tree("root", (self._digit(), index))
        if name in ("lfloor", "lceil"):
            node = self._sum()
            self.take(rf"\r{name[1:]}")
            return Tree(name[1:], (node,))
        if name == "{":
            if self.has(r"\}"):
                return EMPTY
            node = self.items()
            self.take(r"\}")
            return Tree("set", node.parts if node.kind == "list" else (node,))
        if name == "emptyset":
            return EMPTY
        if name == "mathbb":
            return Name(rf"\mathbb{{{self.raw_group()}}}")
        return self._matrix() if name == "begin" else self._styled(token)

    def _styled(self, token: str) -> Node:
        if token in (r"\angle", r"\triangle"):
            letters = ""
            while self.next.isascii() and self.next.isalpha():  # their order matters
                letters += self.take()
            return Name(f"{token} {letters}")
        if token[1:] in ACCENTS:
            content = self.raw_group()
            if not content or content[0].isdigit():
                raise NotUnderstoodError
            token = f"{token}{{{content}}}"
        elif token[1:] not in LETTERS:
            raise NotUnderstoodError
        return Name(f"{token}_{self.raw_group()}" if self.has("_") else token)

    def _function(self, name: str) -> Node:
        base = self._argument() if self.has("_") else None
        power = self._argument() if self.has("^") else None
        base = self._argument() if base is None and self.has("_") else base
        is_angle, self._is_angle = self._is_angle, name in TRIGONOMETRIC
        argument = self._function_argument()
        self._is_angle = is_angle
        if base is not None and name != "log":
            raise NotUnderstoodError
        if power == Number(Fraction(-1)):
            if name not in TRIGONOMETRIC:
                raise NotUnderstoodError
            name, power = f"arc{name}", None
        node = Tree(name, (argument,) if base is None else (argument, base))
        return node if power is None else Tree("^", (node, power))

    def _function_argument(self) -> Node:
        if self.has("("):
            node = self._bracket("(")
            if node.is_group:
                raise NotUnderstoodError
            return node
        if self.next == "{":
            return self._group()
        if self.next[1:] in FUNCTIONS:
            return self._power()
        return self._implicit_product(in_function=True)

    def _matrix(self) -> Node:
        kind = self.raw_group()
        if kind not in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix"):
            raise NotUnderstoodError
        rows = [[self._sum()]]
        while self.next != r"\end":
            if self.has("&"):
                rows[-1].append(self._sum())
            else:
                self.take(r"\\")
                if self.next != r"\end":
                    rows.append([self._sum()])
        self.take()
        if self.raw_group() != kind or len({len(row) for row in rows}) != 1:
            raise NotUnderstoodError
        return Tree("matrix", tuple(Tree("row", tuple(row)) for row in rows))

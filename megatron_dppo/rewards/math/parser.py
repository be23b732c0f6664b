"""Parses the LaTeX of an answer into a tree. It is strict: text that it does not understand is an error.

A parser that skips or guesses would accept wrong answers. `text.py` and `words.py` remove words, units and
variant spellings first.
"""

from fractions import Fraction

from megatron_dppo.rewards.math.tree import (
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
    Tokens,
    Tree,
    first_factor,
    negative,
    with_both_signs,
)

_OPAQUE = frozenset("fghFGHPQ")  # before a bracket, names of functions with unknown values
_TIMES, _DIVIDE = frozenset({r"\cdot", r"\times", "*"}), frozenset({"/", r"\div", ":"})
_SET_OPERATIONS = {r"\cup": "cup", r"\cap": "cap", r"\setminus": "minus"}
_MATRICES = frozenset({"matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix"})
_MAX_DEPTH = 40


def parse(text: str) -> Node:
    r"""Return the tree of a tidy text without words. A list without brackets is a `Tree("list", ...)`.

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
        self._depth = 0
        self._bars = 0  # open `|`
        self._is_angle = False

    # Lists and relations

    def items(self) -> Node:
        """Parse items between commas, semicolons or "or". A single item is not a list."""
        separators = set[str]()
        items = with_both_signs(self._relation())
        while self.next in (",", ";", r"\lor"):
            separators.add(self.take())
            items += with_both_signs(self._relation())
        if len(items) == 1:
            return items[0]
        return Tree("or" if separators == {r"\lor"} else "list", tuple(items))

    def _relation(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotUnderstoodError
        sides, relations = [self._sets()], list[str]()
        while self.next in RELATIONS:
            relations.append(RELATIONS[self.take()])
            sides.append(self._sets())
        self._depth -= 1
        return Tree(" ".join(relations), tuple(sides)) if relations else sides[0]

    def _sets(self) -> Node:
        node = self._sum()
        while self.next in _SET_OPERATIONS:
            kind = _SET_OPERATIONS[self.take()]
            node = Tree(kind, (node, self._sum()))
        return node

    # Sums and products

    def _sum(self) -> Node:
        terms = [self._signed_term()]
        while self.next in ("+", "-", r"\pm", r"\mp"):
            terms.append(self._signed_term())
        return terms[0] if len(terms) == 1 else Tree("+", tuple(terms))

    def _signed_term(self) -> Node:
        if self.next in ("+", "-", r"\pm", r"\mp"):
            sign = self.take()
            if self.next in ("+", r"\pm", r"\mp"):
                raise NotUnderstoodError
            term = self._signed_term()
            return term if sign == "+" else negative(term) if sign == "-" else Tree(sign, (term,))
        return self._product()

    def _product(self) -> Node:
        node = self._implicit_product()
        while self.next in _TIMES | _DIVIDE:
            operator = self.take()
            is_minus = self.has("-")
            factor = self._implicit_product()
            factor = negative(factor) if is_minus else factor
            if operator == ":" and self.next == ":":
                raise NotUnderstoodError  # a ratio of three numbers is not a quotient
            node = Tree("*" if operator in _TIMES else "/", (node, factor))
        return node

    def _implicit_product(self, *, in_function: bool = False) -> Node:
        first = self.next
        node = self._power()
        if isinstance(node, Number) and self.last == first and self.next == r"\frac":
            node = self._mixed(node)
        while self._starts_factor():
            if in_function and (self.next == "(" or self.next[1:] in FUNCTIONS):
                if self.next == "(":
                    raise NotUnderstoodError
                break
            if self.next[0] in ".0123456789" and not self.starts_new_number():
                raise NotUnderstoodError  # numbers side by side, or a power without braces
            node = Tree("*", (node, self._power()))
        return node

    def _mixed(self, whole: Number) -> Node:
        """Parse an integer before a fraction. It is a mixed number if the fraction is proper, with integers."""
        fraction = self._power()
        if not (isinstance(fraction, Tree) and fraction.kind == "/"):
            return Tree("*", (whole, fraction))
        above, below = fraction.parts
        if not (isinstance(above, Number) and isinstance(below, Number)):
            return Tree("*", (whole, fraction))
        if whole.places is not None or not 0 < above.value < below.value:
            raise NotUnderstoodError
        return Tree("+", (whole, fraction))

    def _starts_factor(self) -> bool:
        token = self.next
        if token == "|":
            return self._bars == 0
        if token == "[" or not token:
            return False
        if token[0] == "\\":
            name = token[1:]
            known = {"frac", "sqrt", "binom", "lfloor", "lceil", "begin", "operatorname", "mathbb", "emptyset"}
            return name in known | FUNCTIONS | OF_MANY or token in LETTERS | ACCENTS
        return token.isascii() and (token.isalnum() or token in "({" or token[0] == ".")

    # Powers and atoms

    def _power(self) -> Node:
        node = self._atom()
        has_power = False
        while True:
            if self.next == "^":
                self.take()
                if self._is_degree():
                    node = self._degrees(node)
                elif has_power:
                    raise NotUnderstoodError
                else:
                    has_power = True
                    node = Tree("^", (node, self._argument()))
            elif self.has("!"):
                if self.next == "!" or has_power:
                    raise NotUnderstoodError  # `n!!` is not a factorial's factorial, `2^3!` is ambiguous
                node = Tree("factorial", (node,))
            else:
                return node

    def _is_degree(self) -> bool:
        place = self.place
        is_group = self.has("{")
        if self.has(r"\circ") and (not is_group or self.has("}")):
            return True
        self.place = place
        return False

    def _degrees(self, node: Node) -> Node:
        if not self._is_angle:
            return node
        return Tree("/", (Tree("*", (node, Name(r"\pi"))), Number(Fraction(180))))

    def _argument(self) -> Node:
        """Parse a group in braces, or the operand that one token starts: a digit, a letter, a command."""
        if self.next == "{":
            return self._group()
        token = self.next
        if token.isdigit() and len(token) > 1:  # TeX reads `x^12` as `x^{1}2`, which is hardly meant
            raise NotUnderstoodError
        return self._atom()

    def _digit(self) -> Node:
        r"""Parse an argument of `\frac` or `\sqrt`. Without braces it is only one digit of a number."""
        token = self.next
        if token[:1].isdigit():
            self.tokens[self.place : self.place + 1] = list(token)
        return self._argument()

    def _group(self) -> Node:
        self.take("{")
        bars, self._bars = self._bars, 0
        node = self._relationless()
        if self.next in (r"\over", r"\choose"):
            kind = "/" if self.take() == r"\over" else "binom"
            node = Tree(kind, (node, self._relationless()))
        self._bars = bars
        self.take("}")
        return node

    def _relationless(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotUnderstoodError
        node = self._sum()
        self._depth -= 1
        return node

    def _atom(self) -> Node:
        token = self.take()
        if token[0] == "\\":
            return self._command(token)
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            if self.next == "_":
                raise NotUnderstoodError  # in another base
            places = len(token.partition(".")[2]) if "." in token else None
            return Number(Fraction(f"0{token}"), places)
        if token.isascii() and token.isalpha():
            return self._letter(token)
        if token == "{":
            self.place -= 1
            return self._group()
        if token in "([":
            return self._bracket(token)
        if token == "|":
            return self._bar()
        raise NotUnderstoodError

    def _letter(self, token: str) -> Node:
        if token == "C" and (found := self.combinations()):
            return Tree("binom", tuple(Number(Fraction(count)) for count in found))
        name = f"{token}_{self.raw_group()}" if self.has("_") else token
        name += "^{-1}" if token in _OPAQUE and self.has_inverse() else ""
        while self.has("'"):
            name += "'"
        if self.next == "(" and token in _OPAQUE:
            self.take()
            argument = self._bracket("(")
            parts = argument.parts if isinstance(argument, Tree) and argument.kind == "()" else (argument,)
            return Tree(f"call {name}", parts)
        return Name(name)

    def _bracket(self, opener: str) -> Node:
        is_angle, self._is_angle = self._is_angle, self._is_angle
        bars, self._bars = self._bars, 0
        node = self.items()
        self._bars, self._is_angle = bars, is_angle
        closer = self.take()
        if closer not in (")", "]"):
            raise NotUnderstoodError
        if isinstance(node, Tree) and node.kind == "list":
            return Tree(opener + closer, node.parts)
        if opener + closer not in ("()", "[]") or (isinstance(node, Tree) and node.kind in RELATIONS.values()):
            raise NotUnderstoodError
        return node if opener == "(" else Tree("[]", (node,)) if self._at_value_end() else node

    def _at_value_end(self) -> bool:
        return self.next in ("", ",", ";", ")", "]", "}", r"\}", r"\cup", r"\cap")

    def _bar(self) -> Node:
        self._bars += 1
        node = self._relationless()
        self._bars -= 1
        self.take("|")
        return Tree("abs", (node,))

    # Commands

    def _command(self, token: str) -> Node:
        name = token[1:]
        if name in FUNCTIONS:
            return self._function(name)
        if name == "operatorname":
            name = self.raw_group()
            if name not in FUNCTIONS | OF_MANY:
                raise NotUnderstoodError
            return self._function(name) if name in FUNCTIONS else self._of_many(name)
        if name in OF_MANY:
            return self._of_many(name)
        if name in ("frac", "binom"):
            above, below = self._digit(), self._digit()
            if name == "frac" and first_factor(above) == first_factor(below) == Name("d"):
                raise NotUnderstoodError  # a derivative is not a quotient
            return Tree("/" if name == "frac" else "binom", (above, below))
        if name == "sqrt":
            return self._root()
        if name in ("lfloor", "lceil"):
            node = self._relationless()
            self.take(rf"\r{name[1:]}")
            return Tree("floor" if name == "lfloor" else "ceil", (node,))
        if name == "{":
            return self._set()
        if name == "emptyset":
            return EMPTY
        if name == "mathbb":
            return Name(rf"\mathbb{{{self.raw_group()}}}")
        if name == "begin":
            return self._matrix()
        return self._styled(token)

    def _styled(self, token: str) -> Node:
        if token in ACCENTS:
            content = self.raw_group()
            if not content or content[0].isdigit():
                raise NotUnderstoodError
            token = f"{token}{{{content}}}"
        elif token not in LETTERS:
            raise NotUnderstoodError
        if self.next == "_":
            self.take()
            token += f"_{self.raw_group()}"
        return Name(token)

    def _root(self) -> Node:
        index: Node = Number(Fraction(2))
        if self.has("["):
            index = self._relationless()
            self.take("]")
        return Tree("root", (self._digit(), index))

    def _function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        while self.next in ("_", "^"):
            if self.take() == "_":
                base = self._argument()
            elif power is None:
                power = self._argument()
            else:
                raise NotUnderstoodError
        is_angle, self._is_angle = self._is_angle, name in TRIGONOMETRIC
        argument = self._function_argument()
        self._is_angle = is_angle
        if base is not None and name != "log":
            raise NotUnderstoodError
        if power == Number(Fraction(-1)) or power == negative(Number(Fraction(1))):
            if name not in TRIGONOMETRIC:
                raise NotUnderstoodError
            name, power = f"arc{name}", None
        node = Tree(name, (argument,) if base is None else (argument, base))
        return node if power is None else Tree("^", (node, power))

    def _function_argument(self) -> Node:
        if self.has("("):
            node = self._bracket("(")
            if isinstance(node, Tree) and node.kind in ("()", "(]"):
                raise NotUnderstoodError
            return node
        if self.next == "{":
            return self._group()
        if self.next[1:] in FUNCTIONS:
            return self._power()
        return self._implicit_product(in_function=True)

    def _of_many(self, name: str) -> Node:
        self.take("(")
        node = self._bracket("(")
        if not (isinstance(node, Tree) and node.kind == "()"):
            raise NotUnderstoodError
        return Tree(name, node.parts)

    def _set(self) -> Node:
        if self.has(r"\}"):
            return EMPTY
        node = self.items()
        self.take(r"\}")
        return Tree("set", node.parts if isinstance(node, Tree) and node.kind == "list" else (node,))

    def _matrix(self) -> Node:
        kind = self.raw_group()
        if kind not in _MATRICES:
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

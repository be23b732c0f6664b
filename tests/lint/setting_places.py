"""Counts, for each setting, the files of the package and of the tests in which its key stands.

- `rollout.temperature`: as an attribute of a config, or of a variable that is assigned from `config.rollout` or
  annotated with RolloutConfig; as a field of that class; and in text, messages too.
- `temperature` in a table: `{"rollout": {"temperature": 1}}`, `RolloutConfig(temperature=1)` or TOML text. The
  fields of a rule belong to [algorithm], and `preset(...)` is such a table.
- Docstrings, comments and `temperature` alone do not count.

`python tests/lint/setting_places.py` exits with 1 if a setting stands in more files than setting_places.txt has
for it, or else than LIMITS. With --lower it writes what has become fewer to that file.
"""

import ast
import re
import sys
from collections.abc import Iterator
from operator import gt
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron_dppo.algorithms.presets import RULES  # noqa: E402 - started as a script
from megatron_dppo.config import Config  # noqa: E402
from megatron_dppo.config.markers import Section  # noqa: E402

TABLE = Path(__file__).with_suffix(".txt")
ROOMS, LIMITS = ("megatron_dppo", "tests"), (3, 2)
TEST_LIMITS = (2, 5, 10, 20, 40, 80)  # in the file: a new test may need what many tests need
DOTTED = re.compile(r"(?<![\w/])(\w+)\.(?=(\w+))")
TOML_TABLE = re.compile(r"^\s*\[(?:\w+\.)*(\w+)\]((?:\n(?!\s*\[).*)*)", re.MULTILINE)
TOML_KEY = re.compile(r"^\s*(\w+) *=", re.MULTILINE)


def sections(kind: Any, name: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the name and the class of each section in a type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield name, kind
        for field, info in kind.model_fields.items():
            yield from sections(info.annotation, f"{name}.{field}".lstrip("."))
    for inner in get_args(kind):
        yield from sections(inner, name)


SECTIONS = [(name, kind) for name, kind in sections(Config) if name]  # [rollout] has a class for each engine
OWNERS = {name.rpartition(".")[2] for name, _ in SECTIONS}  # a section is named by its last part below
BASES = {Section, *Section.__mro__}
CLASSES = {
    base.__name__: name.rpartition(".")[2]
    for name, kind in SECTIONS
    for base in kind.__mro__
    if base not in BASES
} | {"preset": "algorithm"}
CLASSES |= {base.__name__: "algorithm" for rule in RULES.values() for base in rule.__mro__[:-1]}


def keys_in(source: str) -> set[str]:
    """Return `section.name` of all keys in a file, among other names."""
    nodes, found = list(ast.walk(ast.parse(source))), set[str]()
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    variables = {"objective": "algorithm"}
    for node in nodes:
        if isinstance(node, ast.arg) and (owner := CLASSES.get(ast.unparse(node.annotation or node))):
            variables[node.arg] = owner
        elif isinstance(node, ast.Assign) and getattr(node.value, "attr", "") in OWNERS:
            variables[ast.unparse(node.targets[0])] = getattr(node.value, "attr", "")
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node.value)
            last = name.rpartition(".")[2].lstrip("_") if "." in name else ""
            found.add(f"{variables.get(name) or variables.get(last) or last}.{node.attr}")
        elif isinstance(node, ast.ClassDef) and node.name in CLASSES:
            names = [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)]
            names += re.findall(r"\bself\.(\w+)", ast.unparse(node))
            found |= {f"{CLASSES[node.name]}.{name}" for name in names}
        elif isinstance(node, ast.Dict | ast.Call):
            found |= set().union(*(_table(value, key) for key, value in _pairs(node)))
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).removesuffix(".model_copy").rpartition(".")[2]
            found |= _table(node, CLASSES.get(name) or variables.get(name, name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found |= {f"{a}.{b}" for a, b in DOTTED.findall(node.value)}
            for section, body in TOML_TABLE.findall(node.value):
                found |= {f"{section}.{name}" for name in TOML_KEY.findall(body)}
    return found


def _pairs(node: ast.AST) -> Iterator[tuple[Any, ast.expr]]:
    if isinstance(node, ast.Call):
        yield from ((each.arg, each.value) for each in node.keywords)
    elif isinstance(node, ast.Dict):
        yield from zip((getattr(key, "value", key) for key in node.keys), node.values, strict=True)


def _table(node: ast.AST, owner: Any) -> set[str]:
    """Return the keys of a display, of keywords, and of what `|`, ** and `update` join."""
    if isinstance(node, ast.BinOp):
        return _table(node.left, owner) | _table(node.right, owner)
    joined = (_table(value, owner) for key, value in _pairs(node) if key in (None, "update"))
    return {f"{owner}.{key}" for key, _ in _pairs(node)}.union(*joined)


def main(option: str) -> int:
    """Print the settings that stand in too many files; 1 if there is one."""
    table = {key: (int(a), int(b)) for key, a, b in map(str.split, TABLE.read_text("utf-8").splitlines())}
    rooms = [[keys_in(path.read_text("utf-8")) for path in (ROOT / room).rglob("*.py")] for room in ROOMS]
    keys = {f"{name}.{field}" for name, kind in SECTIONS for field in kind.model_fields} - {*dict(SECTIONS)}
    lines, faults = list[str](), list[str]()
    for key in sorted(keys):
        package, tests = (sum(".".join(key.split(".")[-2:]) in each for each in files) for files in rooms)
        if any(map(gt, (package, tests), most := table.get(key, LIMITS))):
            faults.append(f"{key}: in {package} and {tests} files, limits {most[0]} and {most[1]}\n")
        if any(map(gt, (package, tests), LIMITS)):
            lines.append(f"{key} {max(package, 3)} {next(each for each in TEST_LIMITS if each >= tests)}\n")
    print(f"settings:  {len(lines)} in more than {LIMITS[0]} files of megatron_dppo or {LIMITS[1]} of tests")
    print("".join(faults), end="")
    if option == "--lower" and not faults:
        TABLE.write_text("".join(lines), encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main("".join(sys.argv[1:])))

"""From TOML files and `--set` to a `Config`, with every fault reported at once; and settings as text and TOML.

Layers are merged left to right: tables key by key, anything else (lists included) is replaced. Relative paths
in a file mean what they would mean on the command line: they start at the current directory, not at the file.
A layer takes settings of earlier ones away, so that their defaults count, by `--set section.key=none`, or with
`unset = ["section.key"]` at the head of a file.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_dppo.config.markers import Section, sections_in
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, Problem, did_you_mean, suggested

Table = dict[str, Any]
KeyPath = tuple[str, ...]

UNSET = "unset"  # the key at the head of a file that lists the settings to take away
NONE = "none"  # the value of --set that takes a setting away; '"none"' in quotes is the string

_WRONG_RATIO = "the log-prob of a {} distribution is not the policy's, so the ratio pi/mu would be wrong"
LEFT_OUT = {
    "rollout.top_k": _WRONG_RATIO.format("truncated"),
    "rollout.repetition_penalty": _WRONG_RATIO.format("penalised"),
    "rollout.keep_partials": "max_staleness resumes aborted responses, and over-sampling without it drops them",
}
"""Keys that a user may expect, and the reason why the schema has none of them."""
_EXPECTED = {
    "model_type": "a table",
    "union_tag_not_found": "a table",
    "union_tag_invalid": "'transformers' or 'sglang'",
    "finite_number": "a finite number",
    "dict_type": "a table",
    "string_type": "a string in quotes",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
}


def load_config(paths: Sequence[Path], overrides: Sequence[str] = ()) -> Config:
    """Merge TOML files left to right, then `a.b=c` overrides, and validate the result.

    Args:
        paths: TOML files; a later one wins.
        overrides: Overrides `section.key=value`. The value is read as TOML, or as a string if it is not valid
            TOML. `none` removes the setting.

    Raises:
        ConfigError: One `Problem` per fault, over all files and overrides.
    """
    problems: list[Problem] = []
    merged: Table = {}
    origins: dict[KeyPath, str] = {}
    for path in paths:
        layer = _read_toml(path)
        if isinstance(layer, Problem):
            problems.append(layer)
        else:
            problems.extend(_unset(merged, layer.pop(UNSET, []), str(path), origins))
            _merge(merged, layer, str(path), origins)
    for override in overrides:
        layer = _parse_override(override)
        if isinstance(layer, Problem):
            problems.append(layer)
        elif (name := _removed_key(override)) is not None:
            problems.extend(_unset(merged, [name], f"--set {override}", origins))
        else:
            _merge(merged, layer, f"--set {override}", origins, empties=True)
    try:
        # Strict, as TOML has types: "3" is no number, 3.0 no count. By way of JSON, where strict reads paths.
        config = Config.model_validate_json(json.dumps(merged, default=str), strict=True)
    except ValidationError as error:
        problems.extend(_explain(details, origins) for details in error.errors())
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return config


def dump_config(config: Config) -> str:
    """Return the resolved config as TOML that `load_config` reads back, without fields that are none."""
    return to_toml(config.model_dump())


def _read_toml(path: Path) -> Table | Problem:
    expected = "a TOML file"
    try:
        text = path.read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            action = "Save the file as UTF-8 without a byte-order mark."
            return Problem(str(path), "a byte-order mark (BOM) at its beginning", expected, action)
        return tomllib.loads(text)
    except FileNotFoundError:
        return Problem(str(path), "no such file", expected, f"Check the path; it starts at {Path.cwd()}.")
    except OSError as error:
        return Problem(str(path), str(error.strerror), expected, "Name a file that can be read.")
    except UnicodeDecodeError:
        return Problem(str(path), "bytes that are not UTF-8", expected, "Save the file as UTF-8.")
    except tomllib.TOMLDecodeError as error:
        return _torn_toml(path, str(error))


def _torn_toml(path: Path, message: str) -> Problem:
    position = re.search(r"at line (\d+)", message)
    lines = path.read_text(encoding="utf-8").splitlines()
    number = int(position.group(1)) if position else len(lines)
    text = lines[number - 1].strip() if 0 < number <= len(lines) else "the end of the file"
    action = "Fix this line; strings need quotes, and a table starts with [name]."
    return Problem(f"{path}, line {number}", f"{text!r} ({message})", "valid TOML", action)


def _parse_override(override: str) -> Table | Problem:
    name, separator, text = override.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not separator or not all(keys):
        action = "Write for example --set optimizer.lr=2e-6."
        return Problem(f"--set {override}", repr(override), "section.key=value", action)
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if parsed.keys() == {"value"} else text
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for key in reversed(keys):
        value = {key: value}
    return cast(Table, value)


def _removed_key(override: str) -> str | None:
    """Return the setting that `section.key=none` takes away; none for any other override."""
    name, _, text = override.partition("=")
    return ".".join(key.strip() for key in name.split(".")) if text.strip() == NONE else None


def _unset(merged: Table, names: object, origin: str, origins: dict[KeyPath, str]) -> list[Problem]:
    """Remove settings from what earlier layers gave; one that they did not give is as it should be."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in cast(list[object], names)):
        found = f"{json.dumps(names, default=str)} (set by {origin})"
        return [
            Problem(UNSET, found, "a list of settings, as strings", 'Write unset = ["data.reward_values"].')
        ]
    problems: list[Problem] = []
    for name in cast(list[str], names):
        keys = tuple(name.split("."))
        if not _is_setting(keys):
            problems.append(_unknown_key(name, keys, f"{NONE} (set by {origin})"))
            continue
        table: Any = merged
        for key in keys[:-1]:
            table = cast(Table, table).get(key) if isinstance(table, dict) else None
        if isinstance(table, dict):
            cast(Table, table).pop(keys[-1], None)
        for path in [path for path in origins if path[: len(keys)] == keys]:
            del origins[path]
    return problems


def _is_setting(keys: KeyPath) -> bool:
    """Return whether the schema has a setting or a table of this name; tables with free keys accept any."""
    kind: Any = Config
    for key in keys:
        kind = _kind_of(kind, key)
    return kind is not None


def _merge(
    into: Table,
    layer: Table,
    origin: str,
    origins: dict[KeyPath, str],
    prefix: KeyPath = (),
    *,
    empties: bool = False,
) -> None:
    """Add a layer; with `empties`, an empty table empties the one that is there."""
    for key, value in layer.items():
        path = (*prefix, key)
        if isinstance(value, dict) and not value and empties:
            into[key] = {}
            origins[path] = origin
        elif isinstance(value, dict) and isinstance(into.setdefault(key, {}), dict):
            origins.setdefault(path, origin)
            _merge(into[key], cast(Table, value), origin, origins, path, empties=empties)
        else:
            into[key] = value
            origins[path] = origin


def _explain(details: ErrorDetails, origins: dict[KeyPath, str]) -> Problem:
    location, tag = _without_tag(details["loc"])
    if details["type"] == "union_tag_invalid":
        location = (*location, "engine")
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    keys = tuple(part for part in location if isinstance(part, str))
    origin = next((origins[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in origins), None)
    value = details["input"]["engine"] if details["type"] == "union_tag_invalid" else details["input"]
    text = json.dumps(value, default=str)
    text = text if len(text) <= 80 else text[:80] + "..."
    found = text + (f" (set by {origin})" if origin else "")
    if details["type"] == "extra_forbidden":
        return _unknown_key(where, keys, found)
    expected = _EXPECTED.get(details["type"], details["msg"].removeprefix("Input should be "))
    if (number := _number_of_values(details)) is not None:
        expected = f"{number} values"
    field = next(
        (each.model_fields[keys[-1]] for each in _sections(keys[:-1], tag) if keys[-1] in each.model_fields),
        None,
    )
    if field is not None and sections_in(field.annotation):
        return Problem(where, found, expected, f"Write a table [{where}] with its keys.")
    meaning = field.description if field is not None and field.description else f"Fix {where}."
    return Problem(where, found, expected, meaning.replace("\n", " "))


def _number_of_values(details: ErrorDetails) -> int | None:
    """Return the required length of a list that has too many or too few values, else None."""
    limits: dict[str, Any] = details.get("ctx", {})
    return {"too_long": limits.get("max_length"), "too_short": limits.get("min_length")}.get(details["type"])


def _without_tag(location: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], str]:
    """Return a location without the tag of a class that pydantic adds, and the tag."""
    field = Config.model_fields.get(str(location[0]))
    if field is None or len(location) == 1 or len(sections_in(field.annotation)) == 1:
        return location, ""
    return (location[0], *location[2:]), str(location[1])


def _sections(keys: KeyPath, tag: str = "") -> list[type[Section]]:
    """Return the classes of the table at `keys`, if any; tables by name, as in evaluation.sets, share one.

    Args:
        keys: Keys from the top.
        tag: Engine whose class of [rollout] comes first.
    """
    kind: Any = Config
    for key in keys:
        kind = _kind_of(kind, key)
    if get_origin(kind) is tuple:  # a list of tables
        kind = get_args(kind)[0]
    return sorted(
        sections_in(kind),
        key=lambda each: "engine" in each.model_fields and each.model_fields["engine"].default != tag,
    )


def _kind_of(kind: Any, key: str) -> Any:
    """Return the type of a key in a table of this type, or None if the table has no such key."""
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    found = (each.model_fields[key].annotation for each in sections_in(kind) if key in each.model_fields)
    return next(found, None)


def _unknown_key(where: str, keys: KeyPath, found: str) -> Problem:
    if (reason := LEFT_OUT.get(".".join(keys))) is not None:
        return Problem(where, found, f"no such key: {reason}", "Remove it.")
    *parents, name = keys
    known = sorted({name for section in _sections(tuple(parents)) for name in section.model_fields})
    table = f"[{'.'.join(parents)}]" if parents else "a config"
    expected = f"a key of {table}: {', '.join(known)}"
    field = name.casefold()
    if owners := [f"{owner}.{field}" for owner in Config.model_fields if _has_field(owner, field)]:
        return Problem(where, found, expected, suggested(owners))
    otherwise = "Remove it, or use one of these keys."
    action = did_you_mean(name, known, otherwise, lambda key: ".".join((*parents, key)))
    return Problem(where, found, expected, action)


def _has_field(section_name: str, field_name: str) -> bool:
    return any(field_name in section.model_fields for section in _sections((section_name,)))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys; an empty table leaves nothing."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def shown(value: Any) -> str:
    """Return a setting's value as text; a value that is none is "not set"."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, cast("list[Any]", value)))
    if isinstance(value, Mapping):
        return " ".join(f"{key} {shown(item)}" for key, item in cast("Mapping[str, Any]", value).items())
    return str(value)


def to_toml(settings: Mapping[str, Any]) -> str:
    """Return nested settings as TOML, without `None` values."""
    return tomli_w.dumps(_for_toml(settings))


def _for_toml(value: Any) -> Any:
    """Convert a value to what TOML can hold: no None, and paths as strings."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return {str(key): _for_toml(item) for key, item in table.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_for_toml(item) for item in cast("list[Any]", value)]
    return str(value) if isinstance(value, Path) else value

"""Versions of libraries that this package's tests ran with; others are named where a user looks.

`tests/versions.jsonl` has what passed with each of them. SGLang's versions are in `engines/sglang/protocol.py`,
and Megatron-Core's are also refused, by `mcore/fixes.py`; the others may well work.
"""

import platform
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType

TESTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "python": ("3.11", "3.12"),
        "megatron-core": ("0.16.1", "0.19.2"),
        "torch": ("2.13.0", "2.15.0"),
        "transformers": ("5.23.0", "5.24.0"),
    }
)


def installed_versions() -> dict[str, str | None]:
    """Return the versions here of what `TESTED` names, without local parts; none for a missing package."""
    packages = {name: installed(name) for name in TESTED if name != "python"}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **packages}


def installed(name: str) -> str | None:
    """Return the version of a package, without a local part as +cpu; none where it is missing."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def untested_versions(found: Mapping[str, str | None]) -> list[str]:
    """Return a sentence for each version that no test ran with."""
    return [
        f"{name} {found[name]}: the tests ran with {' and '.join(versions)}"
        for name, versions in TESTED.items()
        if found.get(name) is not None and found[name] not in versions
    ]

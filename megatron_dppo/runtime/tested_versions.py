"""Lists the library versions that this package's tests ran with, and reports other versions to users.

`tests/versions.jsonl` has the tests that passed with each of them. SGLang's versions are in
`engines/sglang/protocol.py`. `mcore/fixes.py` refuses untested versions of Megatron-Core. Other libraries may
work in other versions.
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
    """Return the installed versions of the packages in `TESTED`, without local parts; None if missing."""
    packages = {name: installed(name) for name in TESTED if name != "python"}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **packages}


def installed(name: str) -> str | None:
    """Return the version of a package, without a local part such as +cpu; None if it is missing."""
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

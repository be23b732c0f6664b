"""Imports a user's functions and classes on demand, selects their environment, and describes their errors."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ConfigError, Problem, did_you_mean

_SECRET_NAME = re.compile(
    r"SECRET|PASSWO?R?D|PASSPHRASE|CREDENTIAL|API_?KEY|WEBHOOK|JWT|TOKENS?(_|$)|_PWD$"
    r"|(^|_)(ACCESS|AUTH|CONNECTION_STRING|COOKIE|DSN|KEYS?|PASS|PAT)(_|$)",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"://[^/\s@]*:[^/\s@]+@")  # a URL with a password
_LAUNCHERS = re.compile(r"MASTER_(ADDR|PORT)|TORCHELASTIC_.*|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME")
_ABOUT_KEYS = re.compile(r"api[ _-]?key|authenticat|unauthori[sz]ed|credential|\b401\b", re.IGNORECASE)


def problem_with_path(key: str, name: str, path: str, registered: Sequence[str] = ()) -> Problem | None:
    """Return the problem with an unregistered name, without running a user's code.

    Args:
        key: Config key.
        name: Value of the key.
        path: Expected form, such as "package.module:function".
        registered: Registered names that the key also accepts.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        own = f"name your own {path.rpartition(':')[2].lower()}"
        action = did_you_mean(name, registered, f"Choose one of these, or {own}.")
        expected = f"one of {sorted(registered)}, or {path!r}" if registered else repr(path)
        return Problem(key, repr(name), expected, action if registered else "Correct the name.")
    if not all(part.isidentifier() for part in [*module.split("."), attribute]):
        return Problem(key, repr(name), repr(path), "Correct the name.")
    package = module.partition(".")[0]
    if not _is_findable(package):
        return _missing(key, f"{name!r}, and no module {package!r}")
    return None


def import_named(key: str, name: str) -> Any:
    """Import the function or class that "package.module:name" names; the module's errors pass through.

    The working directory is searched too, last, as in workers.

    Raises:
        ConfigError: It is missing or cannot be called. The message names the config key `key`.
    """
    module_name, _, attribute = name.partition(":")
    try:
        with _working_directory_importable():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import inside the user's module is missing
        raise ConfigError(_missing(key, f"{name!r}, and no module {error.name!r}")) from error
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        what = f"{name!r}, and {attribute!r} is {'no function' if hasattr(module, attribute) else 'not there'}"
        expected = f"a function of {module_name}"
        raise ConfigError(Problem(key, what, expected, "Correct the name after the colon."))
    return found


def user_environment(passed: Collection[str]) -> dict[str, str]:
    """Return this process's environment for user code: without secrets and without the launcher's variables.

    Args:
        passed: Names of variables that are kept nevertheless (data.worker_environment).
    """
    withheld = {*_secrets(passed), *filter(_LAUNCHERS.fullmatch, os.environ)} - {*passed}
    return {name: value for name, value in os.environ.items() if name not in withheld}


def advice_on_secrets(text: str, passed: Collection[str]) -> str:
    """Return how to pass on the secrets that an error of user code is about; "" if it is about none.

    Args:
        text: Error and output of the user's code.
        passed: See `user_environment`.
    """
    withheld = [name for name in _secrets(passed) if not name.startswith("MEGATRON_DPPO_")]
    named = [name for name in withheld if re.search(rf"\b{re.escape(name)}\b", text)]
    names = named or (withheld if _ABOUT_KEYS.search(text) else [])
    if not names:
        return ""
    listed = ", ".join(f'"{name}"' for name in names)
    return (
        f"\nWorkers do not get the trainer's secrets, such as {', '.join(names)}. To pass one on, name it: "
        f"data.worker_environment = [{listed}]"
    )


def _secrets(passed: Collection[str]) -> list[str]:
    """Return the names of variables of this process that look like secrets, except those in `passed`."""
    return [
        name
        for name, value in os.environ.items()
        if name not in passed and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
    ]


def source_file(name: str) -> Path | None:
    """Return the file of the module in "package.module:name", or None if it is not found. Imports nothing."""
    path = name.partition(":")[0].replace(".", "/")
    places = [Path(place, path) for place in (*sys.path, Path.cwd())]
    files = (file for place in places for file in (place / "__init__.py", place.with_suffix(".py")))
    return next((file for file in files if file.is_file()), None)


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    here = str(Path.cwd())
    is_added = here not in sys.path and "" not in sys.path
    if is_added:
        sys.path.append(here)
    try:
        yield
    finally:
        if is_added:
            sys.path.remove(here)


def describe_error(error: BaseException) -> str:
    """Describe an exception, with the line that raised it."""
    words = "".join(traceback.format_exception_only(error)).strip()
    *_, (frame, line) = [*traceback.walk_tb(error.__traceback__)] or [(None, 0)]
    if frame is None:
        return words
    code = frame.f_code
    return f"{words} (in {code.co_name}, {Path(code.co_filename).name} line {line})"


def problem_with_import(key: str, name: str) -> Problem | None:
    """Return the problem with importing "package.module:name", tried in a new process."""
    program = f"from megatron_dppo.runtime.user_code import import_named; import_named({key!r}, {name!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode == 0:
        return None
    reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    expected = "what can be imported and called"
    return Problem(
        key, f"{name!r}, which fails ({reason})", expected, "Correct the module.", done.stderr.rstrip()
    )


def _is_findable(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # such as __main__, which is another program in a worker
        return False
    # Workers find modules in the working directory, even if this process was not started as `python -m`.
    return spec is not None or PathFinder.find_spec(package, [str(Path.cwd())]) is not None


def _missing(key: str, found: str) -> Problem:
    expected = "a module of an installed package or of the working directory"
    return Problem(key, found, expected, f"Correct the name, or install it; this is {Path.cwd()}.")

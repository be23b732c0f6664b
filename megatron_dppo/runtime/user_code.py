"""Imports a user's functions on demand, selects their environment, notes their files, and describes errors."""

import hashlib
import importlib
import importlib.util
import os
import re
import site
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ConfigError, Problem, did_you_mean

_SECRET_NAME = re.compile(
    r"SECRET|PASSWO?R?D|PASSPHRASE|CREDENTIAL|API_?KEY|WEBHOOK|JWT|TOKENS?(_|$)|_PWD$"
    r"|(^|_)(ACCESS|AUTH|CONNECTION_STRING|COOKIE|DSN|KEYS?|PASS|PAT|SAS)(_|$)",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"://[^/\s]*@|[?&](sig|token|\w*key|password)=", re.IGNORECASE)  # of a URL
_PASSED = re.compile(
    # the user, the machine, the shell
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|HOSTNAME|TERM|NO_COLOR|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TMP|TEMP"
    r"|XDG_(CACHE|CONFIG|DATA|STATE|RUNTIME)_(HOME|DIR)"
    # programs and libraries
    r"|PYTHON[A-Z0-9]+|VIRTUAL_ENV|CONDA_(PREFIX|DEFAULT_ENV)|NODE_PATH|JAVA_HOME"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|MALLOC_ARENA_MAX|MALLOC_CONF"
    # devices and threads
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|HOME|PATH)|NVIDIA_VISIBLE_DEVICES"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|BLIS)_(NUM|MAX)_THREADS|TOKENIZERS_PARALLELISM"
    r"|OMP_(PROC_BIND|PLACES|DYNAMIC|SCHEDULE|STACKSIZE|THREAD_LIMIT|WAIT_POLICY)|MKL_(DYNAMIC|THREADING_LAYER)"
    # the network
    r"|((HTTPS?|ALL|NO)_PROXY|(https?|all|no)_proxy)|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
    r"|NODE_EXTRA_CA_CERTS"
    # folders of models and data, and whether they are the only ones
    r"|HF_(HOME|ENDPOINT|(HUB|DATASETS|ASSETS|XET)_CACHE|(HUB|DATASETS|EVALUATE)_OFFLINE)|HUGGINGFACE_HUB_CACHE"
    r"|TRANSFORMERS_(CACHE|OFFLINE)|TORCH_(HOME|EXTENSIONS_DIR)|TRITON_CACHE_DIR|NLTK_DATA|MPLCONFIGDIR"
)
_PACKAGES = (str(Path(os.__file__).parent), *site.getsitepackages(), site.getusersitepackages())
_INSTALLED = tuple(
    f"{folder}/"
    for place in (*_PACKAGES, "/dev", "/proc", "/sys")
    for folder in {place, os.path.realpath(place)}
)
_MOST_FILES = 2000  # of one process
_LARGE_FILE = 64 << 20  # bytes
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
    """Return the variables of this process that user code gets: common ones without secrets, and `passed`.

    Args:
        passed: Names of further variables (data.worker_environment).
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name in passed or (_PASSED.fullmatch(name) and not _SECRET_VALUE.search(value))
    }


def advice_on_variables(text: str, passed: Collection[str]) -> str:
    """Return how to pass on the variables that an error of user code is about; "" if it is about none.

    Args:
        text: Error and output of the user's code.
        passed: See `user_environment`.
    """
    got = user_environment(passed)
    withheld = [name for name in os.environ if name not in got and not name.startswith("MEGATRON_DPPO_")]
    words = {*re.findall(r"\w{3,}", text)}
    named = [name for name in withheld if name in words]
    names = named or [name for name in withheld if _ABOUT_KEYS.search(text) and _SECRET_NAME.search(name)]
    if not names:
        return ""
    listed = ", ".join(f'"{name}"' for name in names)
    return (
        f"\nWorkers get only common variables of the trainer, not {', '.join(names)}. To pass one on, name it: "
        f"data.worker_environment = [{listed}]"
    )


class FilesRead:
    """Notes which files Python opens in this process from now on to read them, such as modules and tables.

    Files of installed packages, files that the process writes itself, and files that C code or other programs
    open are left out.
    """

    def __init__(self) -> None:
        """Begin with the modules that are loaded."""
        self._due, self._seen, self._written = deque[str](), set[str](), set[str]()
        for path in module_files():
            self._note("open", (path, "r", os.O_RDONLY))
        sys.addaudithook(self._note)

    def take(self) -> set[tuple[str, str]]:
        """Return path and `digest_of` of all files that were noted since the last call."""
        found = set[tuple[str, str]]()
        while self._due:
            path = self._due.popleft()
            if path not in self._written:
                found.add((path, digest_of(path)))
        if len(self._seen) > _MOST_FILES:
            found.add(("", f"more than {_MOST_FILES} files"))  # equals no digest
        return found

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """See `sys.addaudithook`; extension modules are not opened, but imported by their path."""
        flags: int = arguments[2] if event == "open" else os.O_RDONLY
        path = arguments[0] if event == "open" else arguments[1] if event == "import" else None
        if not isinstance(path, str | bytes | os.PathLike):
            return
        path = _source_of(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - links are kept
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._written.add(path)
        elif path not in self._seen and len(self._seen) <= _MOST_FILES and not path.startswith(_INSTALLED):
            self._seen.add(path)
            self._due.append(path)


def module_files() -> list[str]:
    """Return the files of all modules that are loaded in this process, outside of installed packages."""
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    paths = [os.path.abspath(file) for file in files if file]  # noqa: PTH100 - links are kept
    return [path for path in paths if not path.startswith(_INSTALLED)]


def digest_of(path: str) -> str:
    """Return a digest of a file; of a large one, its size and time of writing; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the path need not be one that pathlib keeps
            status = os.fstat(file.fileno())
            if status.st_size > _LARGE_FILE:
                return f"{status.st_size} {status.st_mtime_ns}"
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # a null byte in a path is a ValueError
        return ""


def _source_of(path: str) -> str:
    """Return the source of a compiled module, or the path itself."""
    try:
        return importlib.util.source_from_cache(path) if path.endswith(".pyc") else path
    except ValueError:  # a module without source
        return path


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

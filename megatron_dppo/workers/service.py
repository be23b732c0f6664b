"""Describes a kind of worker: its program, its requests and answers, and its place in the config."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from megatron_dppo.errors import MegatronDppoError

Fields = dict[str, Any]
"""A request or an answer between a trainer and its workers, as JSON has it."""
WorkerFaultKind = Literal["failed", "timed_out", "out_of_memory"]

Q = TypeVar("Q")  # what a worker is asked
A = TypeVar("A")  # what it answers


@dataclass(frozen=True)
class WorkerFault:
    """The reason why a request has no answer."""

    kind: WorkerFaultKind
    message: str


@dataclass(frozen=True)
class Service(Generic[Q, A]):
    """A kind of worker.

    Attributes:
        module: The program, run as `python -m MODULE NAME MEMORY_MB`; it calls `worker.run_worker`.
        key: The config key that holds the name of the user's code.
        noun: What that code is, for messages.
        option_prefix: What `workers`, `timeout_s` and `memory_mb` have before them in the config.
        error: Raised where a run cannot go on: the code cannot be loaded, or never answers.
        describe_request: Names a request in messages.
        encode_request: Returns a request's fields.
        decode_answer: Returns the answer that has these fields; raises ValueError where none has.
    """

    module: str
    key: str
    noun: str
    option_prefix: str
    error: type[MegatronDppoError]
    describe_request: Callable[[Q], str]
    encode_request: Callable[[Q], Fields]
    decode_answer: Callable[[Fields], A]

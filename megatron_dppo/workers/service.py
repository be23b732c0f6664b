"""Describes a kind of worker: its program, its requests and replies, and its keys in the config."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from megatron_dppo.errors import MegatronDppoError

Fields = dict[str, Any]
"""A request or a reply between a trainer and its workers, as a JSON object."""
WorkerFaultKind = Literal["failed", "timed_out", "out_of_memory"]

Q = TypeVar("Q")  # request
A = TypeVar("A")  # reply


@dataclass(frozen=True)
class WorkerFault:
    """The reason why a request has no reply."""

    kind: WorkerFaultKind
    message: str


@dataclass(frozen=True)
class Service(Generic[Q, A]):
    """A kind of worker.

    Attributes:
        module: Program, run as `python -m MODULE NAME MEMORY_MB`; it calls `worker.run_worker`.
        key: Config key of the user's code.
        noun: Noun for the user's code in messages.
        option_prefix: Prefix of the config keys `workers`, `timeout_s` and `memory_mb`.
        error: Error that stops a run: the code cannot be loaded, or its requests time out.
        describe_request: Returns the name of a request for messages.
        encode_request: Returns a request's fields.
        decode_answer: Returns the reply that has these fields; raises ValueError if they are invalid.
    """

    module: str
    key: str
    noun: str
    option_prefix: str
    error: type[MegatronDppoError]
    describe_request: Callable[[Q], str]
    encode_request: Callable[[Q], Fields]
    decode_answer: Callable[[Fields], A]

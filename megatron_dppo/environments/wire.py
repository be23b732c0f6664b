"""What a trainer and its environments' workers tell each other, in lines as `rewards.wire` has them."""

from typing import Any

from megatron_dppo.environments.base import Observation, Play, Response, Turn
from megatron_dppo.rewards.base import RewardFault
from megatron_dppo.rewards.wire import fields_of, fields_of_answer, line_of
from megatron_dppo.types import Prompt


def request_line(number: int, play: Play) -> bytes:
    """A conversation, whose opening or whose next turn is asked for."""
    responses = [[response.text, response.finish_reason] for response in play.responses]
    return line_of({"number": number, "id": play.id, "prompt": vars(play.prompt), "responses": responses})


def read_request(line: bytes) -> tuple[int, Play]:
    """A conversation and its number."""
    fields = fields_of(line, "number", "id", "prompt", "responses")
    prompt = fields["prompt"] | {"messages": _messages(fields["prompt"]["messages"])}
    responses = tuple(Response(text, finish) for text, finish in fields["responses"])
    return fields["number"], Play(fields["id"], Prompt(**prompt), responses)


def verdict_line(number: int, verdict: Observation | Turn | RewardFault) -> bytes:
    """The answer to a request."""
    if isinstance(verdict, RewardFault):
        return line_of({"number": number, "failed": verdict.message})
    if isinstance(verdict, Observation):
        return line_of({"number": number, "opening": vars(verdict)})
    return line_of({"number": number, "turn": vars(verdict) | {"info": dict(verdict.info)}})


def read_verdict(line: bytes, number: int) -> Observation | Turn | RewardFault:
    """The answer to request `number`.

    Raises:
        ValueError: This is none.
    """
    fields = fields_of_answer(line, number)
    if isinstance(fields, RewardFault):
        return fields
    if "opening" in fields:
        return Observation(fields["opening"]["text"], _messages(fields["opening"]["messages"]))
    return Turn(**fields_of(line, "turn")["turn"])


def _messages(found: Any) -> Any:
    return None if found is None else tuple(found)

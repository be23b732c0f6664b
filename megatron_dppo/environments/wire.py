"""Messages between a trainer and its environments' workers, in lines as `rewards.wire` has them."""

from typing import Any

from megatron_dppo.environments.base import Observation, Response, Trajectory, Turn
from megatron_dppo.rewards.base import RewardFault
from megatron_dppo.rewards.wire import fields_of, fields_of_answer, line_of
from megatron_dppo.types import Prompt


def request_line(number: int, trajectory: Trajectory) -> bytes:
    """Encode a trajectory, whose first observation or next turn is asked for."""
    responses = [[response.text, response.finish_reason] for response in trajectory.responses]
    return line_of(
        {"number": number, "id": trajectory.id, "prompt": vars(trajectory.prompt), "responses": responses}
    )


def read_request(line: bytes) -> tuple[int, Trajectory]:
    """Decode a trajectory and its number."""
    fields = fields_of(line, "number", "id", "prompt", "responses")
    prompt = fields["prompt"] | {"messages": _messages(fields["prompt"]["messages"])}
    responses = tuple(Response(text, finish) for text, finish in fields["responses"])
    return fields["number"], Trajectory(fields["id"], Prompt(**prompt), responses)


def answer_line(number: int, answer: Observation | Turn | RewardFault) -> bytes:
    """Encode the answer to a request."""
    if isinstance(answer, RewardFault):
        return line_of({"number": number, "failed": answer.message})
    if isinstance(answer, Observation):
        return line_of({"number": number, "opening": vars(answer)})
    return line_of({"number": number, "turn": vars(answer) | {"info": dict(answer.info)}})


def read_answer(line: bytes, number: int) -> Observation | Turn | RewardFault:
    """Decode the answer to request `number`.

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

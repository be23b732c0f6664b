"""Encodes trajectories, and the observations and turns of environments, as fields of worker messages."""

from typing import Any

from megatron_dppo.environments.base import Observation, Response, Trajectory, Turn
from megatron_dppo.types import Prompt
from megatron_dppo.workers.service import Fields, require_keys


def encode_trajectory(trajectory: Trajectory) -> Fields:
    """Return the fields of a request for a trajectory's first observation or next turn."""
    responses = [[response.text, response.finish_reason] for response in trajectory.responses]
    return {"id": trajectory.id, "prompt": vars(trajectory.prompt), "responses": responses}


def decode_trajectory(fields: Fields) -> Trajectory:
    """Return the trajectory that has these fields."""
    prompt = fields["prompt"] | {"messages": _messages(fields["prompt"]["messages"])}
    responses = tuple(Response(text, finish) for text, finish in fields["responses"])
    return Trajectory(fields["id"], Prompt(**prompt), responses)


def encode_answer(answer: Observation | Turn) -> Fields:
    """Return the fields of an observation or a turn."""
    if isinstance(answer, Observation):
        return {"opening": vars(answer)}
    return {"turn": vars(answer) | {"info": dict(answer.info)}}


def decode_answer(fields: Fields) -> Observation | Turn:
    """Return the observation or the turn that has these fields.

    Raises:
        ValueError: The fields have neither.
    """
    if "opening" in fields:
        return Observation(fields["opening"]["text"], _messages(fields["opening"]["messages"]))
    return Turn(**require_keys(fields, "turn")["turn"])


def _messages(found: Any) -> Any:
    return None if found is None else tuple(found)

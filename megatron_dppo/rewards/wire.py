"""Encodes a response to score, and its score, as the fields of messages to and from a worker."""

from megatron_dppo.rewards.base import RewardRequest, RewardResult
from megatron_dppo.types import Prompt
from megatron_dppo.workers.service import Fields, require_keys


def encode_request(request: RewardRequest) -> Fields:
    """Return the fields of a response to score."""
    return {"prompt": vars(request.prompt), "response": request.response, "finish": request.finish_reason}


def decode_request(fields: Fields) -> RewardRequest:
    """Return the response to score that has these fields."""
    prompt = fields["prompt"]
    if prompt["messages"] is not None:
        prompt["messages"] = tuple(prompt["messages"])
    return RewardRequest(Prompt(**prompt), fields["response"], fields["finish"])


def encode_result(result: RewardResult) -> Fields:
    """Return the fields of a score."""
    return {"value": result.value, "info": dict(result.info)}


def decode_result(fields: Fields) -> RewardResult:
    """Return the score that has these fields.

    Raises:
        ValueError: The fields are not the fields of a score.
    """
    found = require_keys(fields, "value", "info")
    return RewardResult(found["value"], found["info"])

"""Samples responses with a user's function, `rollout.generate = "package.module:function"`, and checks them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from megatron_dppo.errors import RolloutError
from megatron_dppo.rollout.counts import EngineCounts
from megatron_dppo.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from megatron_dppo.runtime.user_code import described
from megatron_dppo.types import FinishReason

Generate = Callable[[RolloutEngine, Sequence[Request], SamplingParams], Sequence[Completion]]
"""A completion for each request, in order, by as many calls of the engine as it takes.

`partials.with_observation` and `Request.partial` go on behind what was said. Tokens that the engine did not
sample have a `loss_mask` of False. Change completions with `dataclasses.replace`, so that how often they were
retracted stays with them. With an `episode`, the function gives the reward; without one, `data.reward`
scores the whole response. It runs in the trainer's process: what it raises stops the run, and nobody ends it
where it hangs.
"""


class UserGenerate:
    """An engine that samples as a user's function says; implements `rollout.engine.RolloutEngine`."""

    def __init__(self, name: str, function: Generate, engine: RolloutEngine, vocab_size: int) -> None:
        """Keep the function and the engine to call it with.

        Args:
            name: Of the function, for messages.
            function: The user's.
            engine: What it is given.
            vocab_size: Of the model.
        """
        self._name, self._function, self._engine, self._vocab_size = name, function, engine, vocab_size

    @property
    def weight_version(self) -> int:
        """See `RolloutEngine.weight_version`."""
        return self._engine.weight_version

    @property
    def counts(self) -> EngineCounts:
        """See `RolloutEngine.counts`."""
        return self._engine.counts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """See `RolloutEngine.load_weights`."""
        return self._engine.load_weights(weights, version)

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Completion]:
        """Return the function's completions after checking that they fit; see `RolloutEngine.generate`.

        Raises:
            RolloutError: The function raised, or a completion does not fit its request.
        """
        try:
            found: Any = self._function(self._engine, requests, params)
            completions: list[Any] = list(found)
        except RolloutError:
            raise
        except Exception as error:
            raise RolloutError(f"rollout.generate: {self._name!r} raised {described(error)}") from error
        if len(completions) != len(requests):
            raise self._wrong(
                "", f"{len(completions)} completions", f"one for each of {len(requests)} requests"
            )
        return [self._checked(*pair, params) for pair in zip(requests, completions, strict=True)]

    def _checked(self, request: Request, completion: Any, params: SamplingParams) -> Completion:
        if not isinstance(completion, Completion) or completion.request_id != request.id:
            found = (
                f"{getattr(completion, 'request_id', type(completion).__name__)!r} where {request.id!r} was due"
            )
            raise self._wrong("", found, "a Completion for each request, in order")
        if completion.finish_reason == "abort":
            return completion
        tokens, count = completion.tokens, completion.tokens.numel()
        mask = torch.ones(count, dtype=torch.bool) if completion.loss_mask is None else completion.loss_mask
        rows = {"log_probs": completion.log_probs.numel(), "loss_mask": mask.numel()}
        if params.num_topk_log_probs:
            rows["topk"] = 0 if completion.topk is None else completion.topk.ids.shape[0]
        is_in_range = count == 0 or (int(tokens.min()) >= 0 and int(tokens.max()) < self._vocab_size)
        most, reasons = params.max_response_tokens, get_args(FinishReason)
        faults = {
            f"tokens of {tokens.dtype}; expected int64": tokens.dtype != torch.int64,
            f"{count} tokens; expected at most {most}": count > most,
            f"token ids beyond the vocabulary; expected 0 to {self._vocab_size - 1}": not is_in_range,
            f"rows {rows}; expected {count}, one per token": any(n != count for n in rows.values()),
            f"loss_mask of {mask.dtype}; expected bool": mask.dtype != torch.bool,
            f"finish_reason {completion.finish_reason!r}; expected one of {reasons}": (
                completion.finish_reason not in reasons
            ),
        }
        for fault, is_there in faults.items():
            if is_there:
                found, _, expected = fault.partition("; expected ")
                raise self._wrong(request.id, found, expected)
        return replace(completion, log_probs=completion.log_probs.detach().float())

    def _wrong(self, request_id: str, found: str, expected: str) -> RolloutError:
        where = f"rollout.generate: {self._name!r}" + (f", request {request_id}" if request_id else "")
        return RolloutError(f"{where}: found {found}; expected {expected}. Correct the function.")

"""An engine with scripted responses."""

import asyncio
from typing import Any

import torch

from megatron_dppo.engines.base import Request, SamplingParams, input_tokens, join_parts, response_alone
from megatron_dppo.types import FinishReason, Sample, WeightVersionSpan


class ScriptedPolicy:
    """Its responses are given texts; each ends with the end of a turn. The log-prob of token t is -t / 100."""

    end = "<|im_end|>"

    def __init__(self, tokenizer: Any, *texts: str, finish_reason: FinishReason = "stop") -> None:
        self.tokenizer, self.texts, self.asked = tokenizer, list(texts), list[Request]()
        self.finish_reason: FinishReason = finish_reason

    async def ask(self, request: Request, params: SamplingParams) -> Sample:
        self.asked.append(request)
        await asyncio.sleep(0)
        ids = torch.tensor(self.ids(f"{self.texts.pop(0)}{self.end}"))
        spans = (WeightVersionSpan(0, len(ids), 7),)
        new = response_alone(request.id, ids, ids / -100, self.finish_reason, None, None, spans)
        return join_parts(request.partial, new) if request.partial is not None else new

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def input_of(self, number: int) -> str:
        """Return the text that the engine got with a request."""
        return self.tokenizer.decode(input_tokens(self.asked[number]).tolist())

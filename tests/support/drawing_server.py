"""Stands for an SGLang 0.5.23 server of a random distribution; it remembers what it answered.

Log-probs, Top-K and routes depend on the weight version and on all tokens before, as a model's do, but they are
drawn from a hash. Some sampled tokens have a probability of 1 to rounding, and others of 1e-10.
"""

import base64
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.sglang_stand_in import LiveStandIn, flat_topk, reply
from tests.support.trained_tokens import Sampled, sampled_by_server

_SCALES = (0.5, 2.0, 8.0)  # of the logits at a position


@dataclass
class DrawingServer(LiveStandIn):
    """A server that responds at once, except to the requests that it holds until they are aborted.

    Attributes:
        num_layers: All layers of the model.
        moe_layers: Those of them with experts.
        holds: Whether the first response to a request, by its id, stops after three tokens until a push.
        sampled: What it answered, in this order.
    """

    vocab_size: int = 64
    num_layers: int = 3
    moe_layers: Sequence[int] = (0, 1, 2)
    num_experts: int = 8
    top_k: int = 2
    holds: Callable[[str], bool] = lambda name: False
    sampled: list[Sampled] = field(default_factory=list[Sampled])
    num_held: int = 0

    def _generate(self, body: dict[str, Any], is_gone: Callable[[], bool]) -> tuple[int, Any]:
        rid, name = body["rid"], body["rid"].partition("#")[0]
        with self._lock:
            self.num_asked[name] += 1
            waits = self.num_asked[name] == 1 and self.holds(name)
            aborted = self.running_ids[rid] = threading.Event()
            version = self.version
        try:
            reply = self._draw(body, version, most=3 if waits else None)
            while waits and not aborted.wait(0.02):
                if is_gone():
                    return 499, None
        finally:
            del self.running_ids[rid]
        with self._lock:
            self.num_held += waits
            self.sampled.append(sampled_by_server(body, reply, self.moe_layers, self.num_layers))
        return 200, reply

    def _draw(self, asked: dict[str, Any], version: int, most: int | None) -> dict[str, Any]:
        """Draw a response to its end token or limit, or up to `most` tokens as of an aborted one."""
        given, sampling = list(asked["input_ids"]), asked["sampling_params"]
        limit, seed = sampling["max_new_tokens"], sampling["sampling_seed"]
        tokens, log_probs, best = list[int](), list[float](), list[np.ndarray[Any, Any]]()
        finish = "length"
        while len(tokens) < limit:
            if most is not None and len(tokens) == most:
                finish = "abort"
                break
            distribution, _ = self._at([*given, *tokens], version)
            noise = _generator(seed, len(given) + len(tokens))
            token = self._choose(distribution, noise, may_end=len(tokens) > 1)
            tokens.append(token)
            log_probs.append(float(distribution[token]))
            best.append(distribution)
            if token == self.end_token:
                finish = "stop"
                break
        meta = dict[str, Any]()
        if num_topk := asked["top_logprobs_num"]:
            rows = np.stack(best)
            ids = np.argsort(-rows, axis=1, kind="stable")[:, :num_topk]
            meta |= flat_topk(np.take_along_axis(rows, ids, axis=1), ids)
        if asked["return_routed_experts"]:
            whole, first = [*given, *tokens], asked["routed_experts_start_len"]
            routes = [self._at(whole[: place + 1], version)[1] for place in range(first, len(whole) - 1)]
            meta["routed_experts"] = base64.b64encode(np.array(routes, "<i4").tobytes()).decode()
        return reply(asked, tokens, [version] * len(tokens), finish, log_probs, **meta)

    def _at(self, before: Sequence[int], version: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return log mu, [V] float32, of the token after these, and the experts of the last one of them."""
        random = _generator(version, *before)
        logits = random.normal(size=self.vocab_size) * random.choice(_SCALES)
        logits[[token for token in range(self.vocab_size) if token not in {*self.tokens, self.end_token}]] -= 90
        log_probs = logits - np.logaddexp.reduce(logits)
        routes = np.zeros((self.num_layers, self.top_k), np.int32)
        for layer in self.moe_layers:
            routes[layer] = random.permutation(self.num_experts)[: self.top_k]
        return np.minimum(log_probs, 0).astype(np.float32), routes

    def _choose(self, log_probs: np.ndarray[Any, Any], noise: np.random.Generator, *, may_end: bool) -> int:
        """Draw a token, now and then an improbable one."""
        allowed = np.array([*self.tokens, self.end_token] if may_end else self.tokens)
        if noise.random() < 0.2:
            return int(noise.choice(allowed))
        return int(allowed[np.argmax(log_probs[allowed] + noise.gumbel(size=len(allowed)))])


def _generator(*key: int) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(np.array(key, "<i8").tobytes()))

"""Records what the engine of a run returned and what its loss received, and compares both bit by bit.

`Sampled` is one response of the engine, read without the package's decoders. `Trained` is one micro-batch at
the call of the loss. `require_equal` builds every micro-batch from the responses alone.
"""

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Sampled:
    """R tokens that an engine sampled after G given ones, in one request."""

    request_id: str
    given: tuple[int, ...]  # [G]
    tokens: tuple[int, ...]  # [R]
    log_probs: Array  # [R] float32
    versions: tuple[int, ...]  # [R] of the weights
    topk_ids: Array | None  # [R, K] int32
    topk_log_probs: Array | None  # [R, K] float32
    routes: Array | None  # [rows, moe_layers, top_k], up to the last token but one
    first_route: int = 0  # index of the token of the first row of routes


def sampled_by_server(
    asked: Mapping[str, Any], reply: Mapping[str, Any], moe_layers: Sequence[int], num_layers: int
) -> Sampled:
    """Read the JSON of a request to /generate and of the reply."""
    meta, tokens, given = reply["meta_info"], tuple(reply["output_ids"]), tuple(asked["input_ids"])
    ids = values = routes = None
    if asked["top_logprobs_num"]:
        shape = (len(tokens), asked["top_logprobs_num"])
        values, ids = (
            np.frombuffer(base64.b64decode(meta[f"output_top_logprobs_{name}_flat_b64"]), dtype).reshape(shape)
            for name, dtype in (("val", "<f4"), ("idx", "<i4"))
        )
    if asked["return_routed_experts"]:
        num_rows = len(given) + len(tokens) - 1 - asked["routed_experts_start_len"]
        data = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4")
        routes = data.reshape(num_rows, num_layers, -1)[:, list(moe_layers)]
    return Sampled(
        asked["rid"].partition("#")[0],
        given,
        tokens,
        np.array([value for value, _, _ in meta["output_token_logprobs"]], np.float32),
        tuple(int(s["version"]) for s in meta["weight_versions"] for _ in range(s["start"], s["end"])),
        ids,
        values,
        routes,
        asked["routed_experts_start_len"],
    )


def _sampled_by_engine(request: Any, completion: Any) -> Sampled:
    """Copy the part of a completion that the embedded engine has just sampled."""
    from megatron_dppo.engines.base import first_route_row, input_tokens

    given = tuple(input_tokens(request))
    old, first = len(given) - len(request.prompt_tokens), first_route_row(request)
    topk, routes = completion.topk, completion.routed_experts
    version_of = {place: s.version for s in completion.weight_versions for place in range(s.start, s.stop)}
    return Sampled(
        request.id,
        given,
        tuple(completion.tokens[old:].tolist()),
        completion.log_probs[old:].clone().numpy(),
        tuple(version_of[place] for place in range(old, completion.tokens.numel())),
        None if topk is None else topk.ids[old:].clone().numpy(),
        None if topk is None else topk.log_probs[old:].clone().numpy(),
        None if routes is None else routes.indices[first:].clone().numpy(),
        first,
    )


@dataclass(frozen=True, eq=False)
class Trained:
    """A micro-batch of T tokens as the loss received it, and what the routers did in its forward pass."""

    sample_ids: tuple[str, ...]
    cu_seqlens: Array
    tokens: Array
    position_ids: Array
    columns: Mapping[str, Array]  # [T, ...] of the loss: targets, rollout_log_probs, topk.ids, ...
    routes: Array | None  # [T, moe_layers, top_k] of the micro-batch
    used: Array  # [T, moe_layers, experts] bool, chosen in the forward pass
    temperature: float
    log_probs: Array  # [T] log pi
    is_shared: bool  # whether sequences have tokens in common that were forwarded once

    def sequences(self) -> Iterator[tuple[str, slice]]:
        """Yield the sample's id and the rows of each sequence."""
        for name, (start, stop) in zip(self.sample_ids, pairwise(self.cu_seqlens.tolist()), strict=True):
            yield name, slice(start, stop)


@dataclass
class Recorded:
    """What one rank saw, in its order."""

    sampled: list[Sampled] = field(default_factory=list[Sampled])  # by the embedded engine
    steps: list[list[Trained]] = field(default_factory=list[list[Trained]])  # micro-batches by gradient step
    weights: dict[int, dict[str, Array]] = field(default_factory=dict[int, dict[str, Array]])
    # as pushed to the embedded engine, by version; only if requested


@contextmanager
def recording(*, keeps_weights: bool = False) -> Iterator[Recorded]:
    """Watch the embedded engine and the loss of this process; layouts without tensor or context parallelism."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_dppo.actor import forward
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.engines.embedded.engine import TransformersEngine

    seen, chosen, parts = Recorded(), dict[int, Array](), dict[int, tuple[Any, Any, Any]]()
    generate, load, routing = TransformersEngine.generate, TransformersEngine.load_weights, TopKRouter.routing
    accumulate, tokens_in_loss = Actor.accumulate_gradients, forward.tokens_in_loss

    def watch_engine(self: Any, requests: Any, params: Any) -> Any:
        completions = generate(self, requests, params)
        seen.sampled += map(_sampled_by_engine, requests, completions)
        return completions

    def watch_push(self: Any, weights: Any, version: int) -> str:
        kept = seen.weights.setdefault(version, {})

        def pass_on() -> Iterator[Any]:
            for name, tensor in weights:
                kept[name] = tensor.clone().numpy()
                yield name, tensor

        return load(self, pass_on(), version)

    def watch_router(self: Any, *args: Any, **options: Any) -> Any:
        found = routing(self, *args, **options)
        chosen[self.layer_number] = found[1].numpy(force=True).copy()
        return found

    def watch_step(self: Any, *args: Any, **options: Any) -> Any:
        seen.steps.append([])
        return accumulate(self, *args, **options)

    def watch_part(microbatch: Any) -> Any:
        places, part = tokens_in_loss(microbatch)
        parts[id(part.tokens)] = microbatch, places, part
        return places, part

    def watch_loss(loss: Callable[..., Any], at: int) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            before = _trained(args[at], args[at + 2].temperature, chosen, parts)
            out = loss(*args, **options)
            seen.steps[-1].append(before(out.log_probs))
            return out

        return watched

    with ExitStack() as stack:
        for owner, name, watcher in (
            (TransformersEngine, "generate", watch_engine),
            (TopKRouter, "routing", watch_router),
            (Actor, "accumulate_gradients", watch_step),
            (forward, "tokens_in_loss", watch_part),
            (forward, "packed_policy_loss", watch_loss(forward.packed_policy_loss, 1)),
            (forward, "packed_linear_policy_loss", watch_loss(forward.packed_linear_policy_loss, 2)),
            *([(TransformersEngine, "load_weights", watch_push)] if keeps_weights else []),
        ):
            stack.enter_context(mock.patch.object(owner, name, watcher))
        yield seen


def _trained(
    tokens: Any, temperature: float, chosen: Mapping[int, Array], parts: Mapping[int, tuple[Any, Any, Any]]
) -> Callable[..., Trained]:
    """Copy a micro-batch before the loss reads it; the result is called with the loss's log-probs.

    If prefixes are shared, the loss gets only its own tokens; they are put back into the complete micro-batch.
    """
    from megatron_dppo.data.batches.batch_file import tensors_of
    from megatron_dppo.data.batches.prefixes import SharedPrefixes

    columns = {name: tensor.numpy(force=True).copy() for name, tensor in tensors_of(tokens).items()}
    used = np.stack([chosen[layer] for layer in sorted(chosen)], axis=1)
    whole, places, _ = parts.get(id(tokens.tokens), (None, None, None))
    if whole is not None:
        prefixes = SharedPrefixes.of(whole)
        assert prefixes is not None and tokens.sample_ids == whole.sample_ids
        used = used[prefixes.sources.numpy()]
        complete = {name: tensor.numpy(force=True).copy() for name, tensor in tensors_of(whole).items()}
        complete["loss_mask"][:] = False
        for name in columns.keys() - {"cu_seqlens"}:
            complete[name][places] = columns[name]
        columns = complete

    def of_all(log_probs: Array) -> Array:
        if places is None:
            return log_probs
        found = np.zeros(len(used), log_probs.dtype)
        found[places] = log_probs
        return found

    return lambda log_probs: Trained(
        tokens.sample_ids,
        columns.pop("cu_seqlens"),
        columns.pop("tokens"),
        columns.pop("position_ids"),
        columns,
        columns.pop("routed_experts.indices", None),
        used,
        temperature,
        of_all(log_probs.numpy(force=True).copy()),
        whole is not None,
    )


class _Path:
    """What the engine returned of one sequence of L tokens, by the position of the token."""

    def __init__(self, tokens: Sequence[int], calls: Sequence[Sampled]) -> None:
        whole = tuple(tokens)
        self.calls = [call for call in calls if whole[: _length(call)] == call.given + call.tokens]
        assert self.calls, f"no response of the engine has these tokens: {whole}"
        self.origin: list[tuple[Sampled, int] | None] = [None] * len(whole)
        self.routes: list[Array | None] = [None] * len(whole)
        for call in self.calls:
            for number in range(len(call.tokens)):
                place = len(call.given) + number
                assert self.origin[place] is None, "two responses have this token"
                self.origin[place] = call, number
            for number, row in enumerate(() if call.routes is None else call.routes):
                assert self.routes[call.first_route + number] is None, "two responses have these routes"
                self.routes[call.first_route + number] = row

    @property
    def is_sampled(self) -> Array:
        """[L] bool."""
        return np.array([each is not None for each in self.origin])

    def column(self, name: str) -> Array:
        """Return a column of the sampled tokens, in their order."""
        values = [getattr(call, name)[number] for call, number in filter(None, self.origin)]
        return np.array(values)

    @property
    def last_response(self) -> list[int]:
        """The tokens after the last one that was not sampled."""
        start = len(self.origin) - int(self.is_sampled[::-1].argmin())
        return [call.tokens[number] for call, number in filter(None, self.origin[start:])]


def _length(call: Sampled) -> int:
    return len(call.given) + len(call.tokens)


@dataclass(frozen=True)
class Found:
    """What the compared sequences had, so that a test can require unequal values."""

    num_sequences: int
    num_microbatches: int
    most_in_a_microbatch: int
    lengths: frozenset[int]
    versions: frozenset[tuple[int, ...]]  # of one sequence, in order, without repetitions
    num_calls: frozenset[int]  # requests that a sequence consists of
    log_probs: tuple[float, float]  # smallest and largest log mu
    num_shared: int  # micro-batches in which a prefix was forwarded once


def require_equal(
    steps: Sequence[Sequence[Trained]],
    sampled: Sequence[Sampled],
    *,
    temperature: float,
    reward_of: Callable[[Sequence[int]], float],
    epochs: int = 1,
    replays: bool = True,
    is_complete: bool = True,
) -> Found:
    """Compare every micro-batch with the responses that it was made of.

    The loss must be the mean over responses, or episodes, of the means over their tokens.

    Args:
        steps: Micro-batches of each gradient step, of all ranks.
        sampled: Responses of all engines.
        temperature: Sampling temperature.
        reward_of: From the token ids of a sample's last response, its reward.
        epochs: How often each response trains.
        replays: Whether the routers must have chosen the rollout's experts.
        is_complete: Whether every response must have trained; otherwise open groups have not.
    """
    calls: dict[str, list[Sampled]] = {}
    for call in sampled:
        calls.setdefault(call.request_id, []).append(call)
    learned, rewards, advantages = Counter[tuple[int, int]](), dict[str, float](), dict[str, set[float]]()
    paths, trained = list[_Path](), [microbatch for step in steps for microbatch in step]
    for microbatch in trained:
        assert microbatch.temperature == temperature
        for sample_id, rows in microbatch.sequences():
            name, _, branch = sample_id.partition("#")
            path = _Path(microbatch.tokens[rows].tolist(), calls[name])
            paths.append(path)
            mask = _require_sequence(microbatch, rows, path, sample_id, replays=replays)
            learned.update((id(call), number) for call, number in _chosen(path, mask))
            advantages.setdefault(name, set()).update(microbatch.columns["advantages"][rows][mask].tolist())
            if not branch:
                rewards[name] = reward_of(path.last_response)
    used = {id(call): call for path in paths for call in path.calls}
    wanted = {(key, number): epochs for key, call in used.items() for number in range(len(call.tokens))}
    assert learned == wanted, "a sampled token does not learn once in each epoch"
    assert rewards.keys() == advantages.keys()
    for step in steps:
        _require_weights(step)
    assert not is_complete or rewards.keys() == calls.keys(), "a response of the engine was not trained on"
    _require_advantages(rewards, advantages)
    mu = np.concatenate([path.column("log_probs") for path in paths])
    return Found(
        len(paths),
        len(trained),
        max(len(microbatch.sample_ids) for microbatch in trained),
        frozenset(len(path.origin) for path in paths),
        frozenset(tuple(dict.fromkeys(path.column("versions").tolist())) for path in paths),
        frozenset(len(path.calls) for path in paths),
        (float(mu.min()), float(mu.max())),
        sum(microbatch.is_shared for microbatch in trained),
    )


def _chosen(path: _Path, mask: Array) -> Iterator[tuple[Sampled, int]]:
    """Yield the sampled tokens that a mask over the rows of a sequence selects; row t is of token t + 1."""
    for origin, learns in zip(path.origin[1:], mask[:-1], strict=True):
        if learns:
            assert origin is not None, "a token that no engine sampled learns"
            yield origin


def _require_sequence(m: Trained, rows: slice, path: _Path, name: str, *, replays: bool) -> Array:
    """Compare the rows of one sequence, and return its loss mask."""
    tokens, columns = m.tokens[rows], {key: column[rows] for key, column in m.columns.items()}
    is_scored = np.append(path.is_sampled[1:], False)
    mask = columns["loss_mask"].astype(bool)
    _require(name, "positions", m.position_ids[rows], np.arange(len(tokens)))
    _require(name, "targets", columns["targets"], np.append(tokens[1:], 0))
    _require(name, "rollout_log_probs", columns["rollout_log_probs"][is_scored], path.column("log_probs"))
    versions = np.full(len(tokens), -1, np.int32)
    versions[is_scored] = path.column("versions")
    _require(name, "weight_versions", columns["weight_versions"], versions)
    if path.calls[0].topk_ids is not None:
        num_columns = columns["topk.ids"].shape[1]
        for key in ("ids", "log_probs"):
            wanted = path.column(f"topk_{key}")[:, :num_columns]
            _require(name, f"topk.{key}", columns[f"topk.{key}"][is_scored], wanted)
    if path.calls[0].routes is not None:
        assert m.routes is not None
        wanted = np.stack([row for row in path.routes[:-1] if row is not None])
        wanted = np.concatenate([wanted, wanted[-1:]])  # no engine forwards the last token
        _require(name, "routes", m.routes[rows], wanted.astype(m.routes.dtype))
        if replays:
            experts = np.zeros_like(m.used[rows])
            np.put_along_axis(experts, wanted.astype(np.int64), True, axis=2)
            _require(name, "experts of the forward pass", m.used[rows], experts)
    return mask


def _require(name: str, what: str, found: Array, wanted: Array) -> None:
    """Require equal bits."""
    assert found.shape == wanted.shape, f"{name}: {what} has the shape {found.shape}, not {wanted.shape}"
    assert found.dtype == wanted.dtype or found.dtype.kind == wanted.dtype.kind != "f", (what, found.dtype)
    is_other = found != wanted if found.dtype.kind != "f" else found.view(np.int32) != wanted.view(np.int32)
    if is_other.any():
        place = tuple(int(i) for i in np.argwhere(is_other)[0])
        raise AssertionError(
            f"{name}: {what} at {place} is {found[place]!r}, and the engine returned {wanted[place]!r}; "
            f"{int(is_other.sum())} of {is_other.size} differ"
        )


def _require_weights(step: Sequence[Trained]) -> None:
    """Require that each response or episode of a gradient step has the same weight, equal for its tokens."""
    lengths, weights = Counter[str](), dict[str, set[float]]()
    for microbatch in step:
        for sample_id, rows in microbatch.sequences():
            name, mask = sample_id.partition("#")[0], microbatch.columns["loss_mask"][rows]
            lengths[name] += int(mask.sum())
            weights.setdefault(name, set()).update(microbatch.columns["token_weights"][rows][mask].tolist())
    mean = sum(lengths.values()) / len(lengths)
    for name, length in lengths.items():
        (weight,) = weights[name]
        assert abs(weight * length - mean) <= 1e-4 * mean, f"{name}: weight {weight} of {length} tokens"


def _require_advantages(rewards: Mapping[str, float], advantages: Mapping[str, set[float]]) -> None:
    """Compare each sample's advantage with its reward minus the group's mean."""
    groups: dict[str, list[str]] = {}
    for name in rewards:
        groups.setdefault(name.rpartition("+")[0], []).append(name)
    for names in groups.values():
        mean = sum(rewards[name] for name in names) / len(names)
        for name in names:
            (found,) = advantages[name]
            assert abs(found - (rewards[name] - mean)) <= 1e-6, f"{name}: advantage {found}"

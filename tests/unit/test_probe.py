"""The probe of pushed weights, with several servers of which any one may hold others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dppo.engines.weight_sync.fleet import Member
from megatron_dppo.engines.weight_sync.probe import Limits, Probe, require_temperature
from megatron_dppo.errors import WeightSyncError
from tests.support.pushing import record_of, run_servers, runtime, sync_to
from tests.support.sglang_stand_in import (
    MODEL,
    ROUTING,
    TOKEN,
    StandIn,
    flat_topk,
    reply,
    routes_base64,
    serving,
)

LIMITS = Limits(mean=1e-5, largest=1e-4)
EVERY = -2


def log_prob(token: int) -> float:
    """The trainer's log-prob of a token, wherever it is."""
    return -(1 + token % 7) / 2


@dataclass
class Scoring(StandIn):
    """Scores prompts as the trainer does, but for one token whose log-prob is off."""

    wrong_token: int = -1  # or `EVERY`
    off: float = 0.0
    num_experts: int = 8  # those that its sequences go through
    context: int | None = None
    tied: tuple[int, ...] = ()  # first tokens of the only sequence with the wrong token

    def respond(self, path: str, body: dict[str, Any], is_gone: Any) -> tuple[int, Any]:
        status, content = super().respond(path, body, is_gone) if path != "/generate" else (200, None)
        if path == "/server_info" and self.context is not None:
            return status, {**(content or {}), "max_req_input_len": self.context}
        return (status, content) if path != "/generate" else (200, self._scores(body))

    def _scores(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = body["input_ids"]
        self.num_asked[",".join(map(str, tokens))] += 1
        off = self.off if tuple(tokens[: len(self.tied)]) == self.tied else 0.0
        found = [log_prob(token) + off * (self.wrong_token in (token, EVERY)) for token in tokens]
        scores = [[value, token, None] for value, token in zip([None, *found[1:]], tokens, strict=True)]
        routes = routes_base64(np.arange(len(tokens)), self.num_experts)
        return reply(body, [1], [0], "length", input_token_logprobs=scores, routed_experts=routes)


def trainer(sequences: Sequence[Tensor]) -> list[Tensor]:
    return [torch.tensor([log_prob(int(token)) for token in tokens[1:]]) for tokens in sequences]


def probe(takes_turns: bool = False, limits: Limits = LIMITS) -> Probe:
    own = runtime(takes_turns=takes_turns)
    return Probe(trainer, MODEL, own, limits=limits, seed=0, api_key=None, timeout_s=60.0)


@contextmanager
def members_of(servers: Sequence[StandIn]) -> Iterator[list[Member]]:
    with serving(*servers) as urls:
        yield [Member(url, pid, 1, "0.5.23") for pid, url in enumerate(urls)]


@pytest.mark.parametrize("takes_turns", [False, True])
def test_every_server_scores_the_same_sequences(takes_turns: bool) -> None:
    servers = [Scoring(), Scoring(wrong_token=5, off=5e-5), Scoring(num_experts=6)]
    with members_of(servers) as members:
        found = probe(takes_turns).run(members)
    assert found["sync/probe_abs_diff_max"] == pytest.approx(5e-5, rel=0.01)
    assert found["sync/probe_experts_not_reached"] == 2 * len(ROUTING.layer_numbers)
    assert servers[0].num_asked == servers[1].num_asked == servers[2].num_asked
    assert len(servers[0].num_asked) == (32 if takes_turns else 8)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_any_server_that_holds_other_weights_is_found(wrong: int) -> None:
    servers = [Scoring(wrong_token=11, off=-3.0 if at == wrong else 0.0) for at in range(3)]
    with (
        members_of(servers) as members,
        pytest.raises(WeightSyncError, match=f"^{members[wrong].url}: found log-probs that differ"),
    ):
        probe().run(members)


@pytest.mark.parametrize(
    ("dtype", "wrong_token", "off", "is_refused"),
    [
        ("float32", EVERY, 7e-6, False),  # the mean, of which a single token is a hundredth
        ("float32", EVERY, -1.4e-5, True),
        ("float32", 11, -7e-5, False),
        ("float32", 11, 1.4e-4, True),
        ("bfloat16", EVERY, 0.14, False),
        ("bfloat16", EVERY, -0.28, True),
        ("bfloat16", 11, -3.0, False),  # single tokens are not bounded
    ],
)
def test_the_limits_of_each_dtype_refuse_what_is_just_above_them(
    dtype: str, wrong_token: int, off: float, is_refused: bool
) -> None:
    servers = [Scoring(), Scoring(wrong_token=wrong_token, off=off)]
    with members_of(servers) as members:
        of_run = probe(limits=Limits.of(dtype))
        if is_refused:
            with pytest.raises(WeightSyncError, match=f"^{members[1].url}: found log-probs that differ"):
                of_run.run(members)
        else:
            found = of_run.run(members)
            assert found["sync/probe_abs_diff_max"] == pytest.approx(abs(off), rel=0.05)


@dataclass
class Tempered(StandIn):
    """Divides log-probs by a power of the temperature: 1 is right, and 0 ignores it."""

    power: float = 1.0

    def respond(self, path: str, body: dict[str, Any], is_gone: Any) -> tuple[int, Any]:
        status, content = super().respond(path, body, is_gone)
        if path == "/generate":
            divisor = body["sampling_params"]["temperature"] ** self.power
            ids = np.arange(body["top_logprobs_num"])[None]
            content["meta_info"] |= flat_topk(-(1 + ids) / divisor, ids)
            content["meta_info"]["output_token_logprobs"] = [[-(1 + TOKEN) / divisor, TOKEN, None]]
        return status, content


@pytest.mark.parametrize(("power", "is_refused"), [(1.0, False), (0.5, False), (0.35, True), (0.0, True)])
def test_log_probs_that_lack_the_temperature_are_refused(power: float, is_refused: bool) -> None:
    """At temperature 2 they lie .71 and .78 times as far apart with powers of .5 and .35; the limit is .75."""
    with members_of([Tempered(), Tempered(power=power)]) as members:
        urls = [member.url for member in members]
        if is_refused:
            with pytest.raises(WeightSyncError, match=f"^{urls[1]}: found log-probs at temperature 2"):
                require_temperature(urls, MODEL, None, timeout_s=60.0)
        else:
            assert require_temperature(urls, MODEL, None, timeout_s=60.0) == {}


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize(("num_experts", "is_float32"), [(8, True), (6, True), (8, False)])
def test_a_tie_on_one_sequence_is_not_other_weights_in_float32(
    takes_turns: bool, num_experts: int, is_float32: bool
) -> None:
    of_run = probe(takes_turns, Limits.of("float32") if is_float32 else LIMITS)
    first = of_run._sequences[1].tolist()
    servers = [Scoring(), Scoring(wrong_token=first[9], off=1.0, tied=tuple(first), num_experts=num_experts)]
    with members_of(servers) as members:
        of_run.expect()
        if is_float32:
            assert of_run.run(members)["sync/probe_abs_diff_max"] == 0.0
        else:
            with pytest.raises(WeightSyncError, match=f"^{members[1].url}"):
                of_run.run(members)
    num = 32 if takes_turns else 8
    assert [len(server.num_asked) for server in servers] == [num + 2 * num * is_float32] * 2


@pytest.mark.parametrize("takes_turns", [False, True])
def test_other_weights_are_found_in_float32_if_further_sequences_have_them_or_miss_experts(
    takes_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_run = probe(takes_turns, Limits.of("float32"))
    first = of_run._sequences[1].tolist()
    for tied in ((), tuple(first)):
        server = Scoring(wrong_token=first[9], off=1.0, tied=tied)
        with members_of([server]) as members, pytest.raises(WeightSyncError, match="differ from the trainer's"):
            of_run.expect()
            of_run.run(members)
        monkeypatch.setattr("megatron_dppo.engines.weight_sync.probe._reach_as_many", lambda *_: False)


def test_probe_on_a_shared_gpu_compares_all_servers_with_precomputed_log_probs() -> None:
    """The first server reaches too few experts: the next comparison has more sequences, for each server."""
    servers, of_run = [Scoring(num_experts=5), Scoring(num_experts=5)], probe(takes_turns=True)
    with members_of(servers) as members:
        for num_sequences in (32, 64):
            of_run.expect()
            assert of_run.run(members)["sync/probe_abs_diff_max"] == 0.0
            assert [len(server.num_asked) for server in servers] == [num_sequences] * 2


@pytest.mark.parametrize("contexts", [(21, None), (None, 21)])
def test_servers_may_take_prompts_of_different_lengths(contexts: tuple[int | None, int | None]) -> None:
    servers = [Scoring(context=context) for context in contexts]
    with members_of(servers) as members:
        assert probe().run(members)["sync/probe_abs_diff_max"] == 0.0
    lengths = [{key.count(",") + 1 for key in server.num_asked} for server in servers]
    assert lengths == [{64 if context is None else context - 1} for context in contexts]


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_push_is_followed_by_a_comparison_of_every_server_it_reached(wrong: int, tmp_path: Path) -> None:
    """Every second push, and the first: a server that turns wrong before a push in between is found later."""
    servers = [Scoring(), Scoring()]
    with serving(*servers) as urls:
        owner = run_servers([record_of(server, pid=pid) for pid, server in enumerate(servers)], tmp_path)
        sync = sync_to(owner, probe=probe(), every=2)
        assert sync.push(0)["sync/probe_abs_diff_max"] == 0.0
        servers[wrong].wrong_token, servers[wrong].off = 11, -3.0
        assert sync.push(1) == {"sync/servers": 2.0}
        with pytest.raises(WeightSyncError, match=f"^{urls[wrong]}: "):
            sync.push(2)

"""Replies of a real SGLang server, sound and corrupted, read here and in the decoding process."""

import asyncio
import base64
import copy
import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.decoding_process import DecodingProcess
from megatron_dppo.engines.sglang.protocol import (
    GENERATIONS,
    NEWEST,
    Generation,
    ServedModel,
    generation_of,
)
from megatron_dppo.engines.sglang.sampling_settings import UNUSED_PARAMETERS, seed_of
from megatron_dppo.engines.sglang.topk_and_routes import decode_routes
from megatron_dppo.errors import ReplyError, RoutingReplayError, ServerError
from megatron_dppo.types import ModelRouting, RoutedExperts, Sample, WeightVersionSpan

REPLIES = Path(__file__).parent / "sglang_replies"
ROUTING = ModelRouting((0, 1, 2), 8, 2)
MODEL = ServedModel(vocab_size=97, num_layers=3, end_tokens=(0,), routing=ROUTING)
Corruption = Callable[[dict[str, Any]], object]
PROCESSES = [DecodingProcess(small_bytes=size) for size in (1 << 30, 0)]  # reads here, reads there
WAYS: dict[str, list[Generation]] = {
    version: [type(generation)(process) for process in PROCESSES] for version, generation in GENERATIONS.items()
}
HERE, THERE = WAYS[NEWEST]


def recorded(name: str, version: str = NEWEST) -> tuple[Request, SamplingParams, dict[str, Any]]:
    case = json.loads((REPLIES / version / f"{name}.json").read_text())
    request = Request(case["request"]["id"], tuple(case["request"]["prompt_tokens"]), (0, 0, 0))
    return request, SamplingParams(**case["params"]), case["body"]


def _outcome(
    generation: Generation, content: bytes, request: Request, params: SamplingParams
) -> Sample | ReplyError:
    try:
        return asyncio.run(generation.read_reply(content, request, params, MODEL))
    except ReplyError as error:
        return error


def _read_body(body: object, request: Request, params: SamplingParams, version: str = NEWEST) -> Sample:
    """Read a reply in both ways, which must agree to the bit, or to the letter of an error."""
    content = json.dumps(body).encode()
    here, there = (_outcome(generation, content, request, params) for generation in WAYS[version])
    if isinstance(here, ReplyError):
        assert isinstance(there, ReplyError) and str(there) == str(here)
        raise here
    assert isinstance(there, Sample)
    of_here, of_there = (dataclasses.asdict(each) for each in (here, there))
    for name in ("tokens", "loss_mask", "rollout_log_probs", "topk", "routed_experts"):
        one, other = of_here.pop(name), of_there.pop(name)
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    assert of_there == of_here
    return here


def _read(name: str, corrupt: Corruption = lambda body: None, version: str = NEWEST) -> Sample:
    request, params, body = recorded(name, version)
    body = copy.deepcopy(body)
    corrupt(body)
    return _read_body(body, request, params, version)


@pytest.mark.parametrize("version", GENERATIONS)
@pytest.mark.parametrize("name", ["plain", "topk_and_routes", "stop", "greedy", "abort"])
def test_recorded_replies_are_read(name: str, version: str) -> None:
    request, params, body = recorded(name, version)
    completion, meta = _read(name, version=version), body["meta_info"]
    assert completion.request_id == request.id
    assert completion.tokens.tolist() == body["output_ids"]
    assert completion.tokens.dtype == torch.int64
    assert completion.log_probs.tolist() == pytest.approx([row[0] for row in meta["output_token_logprobs"]])
    assert completion.finish_reason == meta["finish_reason"]["type"]
    assert completion.weight_versions == (WeightVersionSpan(0, len(body["output_ids"]), 0),)
    assert completion.routes_fault is None
    assert (completion.topk is None) == (params.num_topk_log_probs == 0)
    assert (completion.routed_experts is None) == (not params.capture_routes)


@pytest.mark.parametrize("is_changed", [True, False])
@pytest.mark.parametrize("captures", [True, False])
def test_a_retracted_reply_keeps_routes_of_one_version(captures: bool, is_changed: bool) -> None:
    """Tokens and log-probs as sampled, routes as recomputed."""
    request, params, body = recorded("retracted")
    meta, num_tokens = body["meta_info"], len(body["output_ids"])
    assert meta["num_retractions"] == 1 and meta["routed_experts"] and len(meta["weight_versions"]) == 1
    if is_changed:
        first, second = {"version": "0", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": num_tokens}
        body["meta_info"] = {**meta, "weight_versions": [first, second]}
    completion = _read_body(body, request, replace(params, capture_routes=captures))
    assert completion.num_retractions == 1
    assert completion.tokens.tolist() == body["output_ids"] and completion.topk is not None
    assert (completion.routed_experts is not None) == (captures and not is_changed)
    assert (completion.routes_fault is not None) == (captures and is_changed)


def test_a_reply_without_tokens_is_an_aborted_one() -> None:
    request, params, _ = recorded("plain")
    meta = {"id": request.id, "finish_reason": {"type": "abort"}, "completion_tokens": 0}
    found = _read_body({"output_ids": [], "meta_info": meta}, request, params)
    assert (found.finish_reason, found.tokens.numel()) == ("abort", 0)


def test_routes_equal_the_reply() -> None:
    request, _, body = recorded("topk_and_routes")
    completion = _read("topk_and_routes")
    assert completion.routed_experts is not None
    raw = np.frombuffer(base64.b64decode(body["meta_info"]["routed_experts"]), np.int32)
    assert completion.routed_experts.indices.dtype == torch.uint8
    assert completion.routed_experts.indices.shape == (len(request.prompt_tokens) + 8 - 1, 3, 2)
    assert completion.routed_experts.indices.flatten().tolist() == raw.tolist()


def _meta(**changes: Any) -> Corruption:
    return lambda body: body["meta_info"].update(changes)


def _drop(name: str) -> Corruption:
    return lambda body: body["meta_info"].pop(name)


def _shift(name: str) -> Corruption:
    return lambda body: body["meta_info"][name].insert(0, body["meta_info"][name].pop())


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda body: body.pop("output_ids"), "missing required field `output_ids`"),
        (lambda body: body.update(meta_info=[]), "Expected `object`, got `array` - at `..meta_info`"),
        (_meta(id="other+1"), "found id 'other"),
        (_meta(prompt_tokens=7), "found prompt_tokens 7; expected 6"),
        (_meta(prompt_tokens=True), "found True as prompt_tokens"),
        (lambda body: body["output_ids"].pop(), "found completion_tokens 8; expected 7"),
        (lambda body: body["output_ids"].__setitem__(1, 97), "found 97 as a token; expected ids from 0 to 96"),
        (lambda body: body["output_ids"].__setitem__(1, 1.5), "found 1.5 as a token"),
        (lambda body: body["output_ids"].__setitem__(1, 0), "found finish_reason"),
        (
            _meta(finish_reason={"type": "stop", "matched": 0}),
            r"the last one \[\d+\]; expected it to agree with",
        ),
        (_meta(finish_reason={"type": "tired"}), "expected .'stop', 'length', 'abort'"),
        (_meta(finish_reason=None), "found None as finish_reason"),
        (_drop("num_retractions"), "num_retractions"),
        (_drop("output_token_logprobs"), "found nothing as output_token_logprobs"),
        (_shift("output_token_logprobs"), "log-probs belong to other tokens"),
        (
            lambda body: body["meta_info"]["output_token_logprobs"].pop(),
            "8 lists in all; expected .8,. entries",
        ),
        (_meta(output_token_logprobs=[]), r"found \[\] .* as log-probs, 1 lists in all"),
        (_meta(output_token_logprobs=["x"] * 8), "as log-probs, 1 lists in all; expected .8,. entries"),
        (_meta(weight_versions=[]), "do not cover 8 tokens"),
        (_meta(weight_versions=[{"version": "0", "start": 0, "end": 7}]), "do not cover 8 tokens"),
        (_meta(weight_versions=[{"version": "0", "start": 1, "end": 8}]), "do not cover 8 tokens"),
        (_meta(weight_versions=[{"version": "default", "start": 0, "end": 8}]), "weight version 'default'"),
        (_meta(weight_versions=[8]), "found 8 in weight_versions"),
    ],
)
def test_a_corrupted_reply_is_refused(corrupt: Corruption, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        _read("topk_and_routes", corrupt)


def _above_zero(difference: float) -> Corruption:
    return lambda body: body["meta_info"]["output_token_logprobs"][1].__setitem__(0, difference)


def _other_log_prob(difference: float) -> Corruption:
    def corrupt(body: dict[str, Any]) -> None:
        body["meta_info"]["output_token_logprobs"][6][0] += difference  # it is in the top-K

    return corrupt


def _array(name: str, dtype: str, change: Callable[[np.ndarray], object]) -> Corruption:
    """Change one of the two flat arrays, [8, 20]."""

    def corrupt(body: dict[str, Any]) -> None:
        array = np.frombuffer(base64.b64decode(body["meta_info"][name]), dtype).reshape(8, 20).copy()
        changed = change(array)
        found = changed if isinstance(changed, np.ndarray) else array
        body["meta_info"][name] = base64.b64encode(found.tobytes()).decode()

    return corrupt


def _values(change: Callable[[np.ndarray], object]) -> Corruption:
    return _array("output_top_logprobs_val_flat_b64", "<f4", change)


def _ids(change: Callable[[np.ndarray], object]) -> Corruption:
    return _array("output_top_logprobs_idx_flat_b64", "<i4", change)


def _rising(difference: float) -> Corruption:
    return _values(lambda values: values.__setitem__((2, 19), values[2, 18] + difference))


@pytest.mark.parametrize(
    ("name", "corrupt", "message"),
    [
        ("plain", _above_zero, "found a log-prob of 0.0013"),
        ("topk_and_routes", _rising, "rise along a row"),
        ("topk_and_routes", _other_log_prob, "another log-prob of the sampled token"),
        ("topk_and_routes", lambda difference: _other_log_prob(-difference), "another log-prob of the sampled"),
    ],
)
def test_two_reports_of_a_log_prob_may_differ_by_a_thousandth(
    name: str, corrupt: Callable[[float], Corruption], message: str
) -> None:
    assert _read(name, corrupt(7e-4)).tokens.tolist() == recorded(name)[2]["output_ids"]
    with pytest.raises(ReplyError, match=message):
        _read(name, corrupt(1.4e-3))


def test_a_flat_topk_equals_the_reply() -> None:
    _, _, body = recorded("topk_and_routes")
    meta, completion = body["meta_info"], _read("topk_and_routes")
    assert "output_top_logprobs" not in meta and completion.topk is not None
    assert (completion.topk.ids.dtype, completion.topk.log_probs.dtype) == (torch.int32, torch.float32)
    for name, dtype, found in (
        ("output_top_logprobs_idx_flat_b64", "<i4", completion.topk.ids),
        ("output_top_logprobs_val_flat_b64", "<f4", completion.topk.log_probs),
    ):
        assert found.shape == (8, 20)
        assert found.flatten().tolist() == np.frombuffer(base64.b64decode(meta[name]), dtype).tolist()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_drop("output_top_logprobs_val_flat_b64"), "found nothing as output_top_logprobs_val_flat_b64"),
        (_drop("output_top_logprobs_shape"), "found nothing as output_top_logprobs_shape"),
        (
            _meta(output_top_logprobs_shape=[7, 20]),
            r"found output_top_logprobs_shape \[7, 20\]; expected \[8, 20\]",
        ),
        (_meta(output_top_logprobs_null_prefix=1), "found output_top_logprobs_null_prefix 1; expected 0"),
        (_meta(output_top_logprobs_val_flat_b64_dtype="float16"), "found .* 'float16'; expected 'float32'"),
        (_meta(output_top_logprobs_idx_flat_b64_dtype="int64"), "found .* 'int64'; expected 'int32'"),
        (_meta(output_top_logprobs_idx_flat_b64="!!!"), "output_top_logprobs is not base64"),
        (_meta(output_top_logprobs_idx_flat_b64=7), "output_top_logprobs is not base64"),
        (_meta(output_top_logprobs_idx_flat_b64=None), "found 0 bytes of output_top_logprobs"),
        (_values(lambda values: values[:-1]), "found 560 bytes of output_top_logprobs; expected .8, 20."),
        (_ids(lambda ids: ids.__setitem__((2, 0), 97)), "token ids outside of 0 to 96"),
        (_ids(lambda ids: ids.__setitem__((2, 0), -1)), "token ids outside of 0 to 96"),
        (_ids(lambda ids: ids.__setitem__((2, 19), ids[2, 18])), "a token twice in a row"),
        (_values(lambda values: values.__setitem__((2, 0), np.nan)), "log-probs that are NaN"),
        (_values(lambda values: values.__setitem__((2, 0), -50)), "rise along a row"),
        (_values(lambda values: np.roll(values, 1, axis=0)), "another log-prob of the sampled token|rise"),
    ],
)
def test_a_corrupted_flat_topk_is_refused(corrupt: Corruption, message: str) -> None:
    with pytest.raises(ReplyError, match=message):
        _read("topk_and_routes", corrupt)


def test_base64_with_escaped_slashes_decodes_equally() -> None:
    request, params, body = recorded("topk_and_routes")
    plain = json.dumps(body).encode()
    escaped = plain.replace(b"/", rb"\/")
    assert escaped != plain
    found = [_outcome(HERE, each, request, params) for each in (plain, escaped)]
    one, other = (dataclasses.asdict(each) for each in found if isinstance(each, Sample))
    for name in ("topk", "routed_experts"):
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=0)


BROKEN = [b"", b'{"output_ids": [', b"{\xff}", b"[" * 100_000, b"{" + b"9" * 5000 + b"}", b'{"a": 1} {}']


@pytest.mark.parametrize("content", [b"[]", b"null", b'"error"', *BROKEN])
def test_a_reply_that_is_no_json_object_is_refused(content: bytes) -> None:
    request, params, _ = recorded("plain")
    here, there = (_outcome(generation, content, request, params) for generation in (HERE, THERE))
    assert isinstance(here, ReplyError) and isinstance(there, ReplyError) and str(here) == str(there)
    assert ("found no JSON" if content in BROKEN else "expected one JSON object") in str(here)


def test_a_log_prob_that_is_null_is_kept_for_validation() -> None:
    completion = _read("plain", lambda body: body["meta_info"]["output_token_logprobs"][2].__setitem__(0, None))
    assert math.isnan(completion.log_probs[2])


def test_two_versions_of_the_weights_are_kept_apart() -> None:
    spans = [{"version": "3", "start": 0, "end": 5}, {"version": "4", "start": 5, "end": 8}]
    completion = _read("plain", _meta(weight_versions=spans))
    assert completion.weight_versions == (WeightVersionSpan(0, 5, 3), WeightVersionSpan(5, 8, 4))


def _routes(change: Callable[[np.ndarray], object] = lambda routes: None) -> str:
    _, _, body = recorded("topk_and_routes")
    routes = np.frombuffer(base64.b64decode(body["meta_info"]["routed_experts"]), np.int32).reshape(-1, 3, 2)
    routes = routes.copy()
    changed = change(routes)
    return base64.b64encode((changed if isinstance(changed, np.ndarray) else routes).tobytes()).decode()


def _json(payload: object) -> bytes:
    return json.dumps(payload).encode()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (None, "found no routed_experts"),
        (17, "is not base64"),
        ("!!!", "is not base64"),
        (_routes(lambda routes: routes[:-1]), "found 288 bytes"),
        (_routes(lambda routes: np.repeat(routes, 2, axis=0)), "found 624 bytes"),
        (_routes()[:-4], "bytes of routed_experts"),
        (_routes(lambda routes: routes.__setitem__((3, 1, 0), 8)), "experts outside of 0 to 7"),
        (_routes(lambda routes: routes.__setitem__((3, 1, 0), -1)), "experts outside of 0 to 7"),
        (_routes(lambda routes: routes.__setitem__((3, 1, 0), 256)), "experts outside of 0 to 7"),
        (
            _routes(lambda routes: routes.__setitem__((3, 1, 0), routes[3, 1, 1])),
            "an expert twice for one token",
        ),
        (_routes(lambda routes: routes.fill(0)), "an expert twice"),
    ],
)
def test_routes_that_do_not_fit_cost_the_sample_its_routes(payload: object, message: str) -> None:
    completion = _read("topk_and_routes", _meta(routed_experts=payload))
    assert completion.routed_experts is None
    assert completion.routes_fault is not None
    with pytest.raises(RoutingReplayError, match=message):
        decode_routes(_json(payload), 13, 3, ROUTING, "answer")


@pytest.mark.parametrize("generation", [HERE, THERE])
def test_scores_of_a_prompt_are_read(generation: Generation) -> None:
    tokens = list(range(13))
    rows = [[None, 0, None], *([-token / 7, token, None] for token in tokens[1:])]

    def read(payload: object, *, with_routes: bool) -> tuple[torch.Tensor, RoutedExperts | None]:
        body = {"meta_info": {"input_token_logprobs": rows, "routed_experts": payload}}
        content = json.dumps(body).encode()
        return asyncio.run(generation.read_scores(content, tokens, MODEL, with_routes=with_routes))

    log_probs, routes = read(_routes(), with_routes=True)
    torch.testing.assert_close(log_probs, -torch.arange(1, 13) / 7, rtol=0, atol=0)
    assert routes is not None and routes.indices.shape == (13, 3, 2) and routes.num_experts == 8
    assert read(None, with_routes=False)[1] is None
    with pytest.raises(RoutingReplayError, match="routed_experts"):
        read(None, with_routes=True)
    rows[3][1] = 5
    with pytest.raises(ReplyError, match="the log-probs belong to other tokens"):
        read(None, with_routes=False)


def test_routes_of_dense_layers_one_expert_and_many_experts() -> None:
    dense = _routes(lambda routes: routes[:, 1].fill(0))
    assert decode_routes(_json(dense), 13, 3, ModelRouting((0, 2), 8, 2), "reply").shape == (13, 2, 2)
    with pytest.raises(RoutingReplayError, match="names experts in dense layers"):
        decode_routes(_json(_routes()), 13, 3, ModelRouting((0, 2), 8, 2), "reply")
    zeros = base64.b64encode(bytes(4 * 13 * 3)).decode()
    with pytest.raises(RoutingReplayError, match="nothing was captured"):
        decode_routes(_json(zeros), 13, 3, ModelRouting((0, 1, 2), 8, 1), "reply")
    large = _routes(lambda routes: routes.__setitem__((3, 1), (300, 2)))
    decoded = decode_routes(_json(large), 13, 3, ModelRouting((0, 1, 2), 512, 2), "reply")
    assert decoded.dtype == np.int16 and decoded[3, 1].tolist() == [300, 2]


@pytest.mark.parametrize("version", ["0.5.21", "0.5.24", None, 5, []])
def test_a_server_that_was_never_run_against_is_refused(version: object) -> None:
    with pytest.raises(ServerError, match=r"expected one of 0\.5\.22"):
        generation_of(version)


@pytest.mark.parametrize("version", GENERATIONS)
def test_a_request_leaves_no_setting_to_the_server(version: str) -> None:
    request = Request("g+0", (1, 2), (0, 0, 0))
    params = SamplingParams(5, temperature=0.5, num_topk_log_probs=3, capture_routes=True)
    body = generation_of(version).generate_body(request, params, MODEL)
    asked = body["sampling_params"]
    of_request = {"max_new_tokens", "temperature", "top_p", "stop_token_ids", "ignore_eos", "sampling_seed"}
    assert asked.keys() == of_request | UNUSED_PARAMETERS.keys()
    assert asked["sampling_seed"] == seed_of((0, 0, 0))
    scored = generation_of(version).score_body("rid", [1, 2], with_routes=False)
    assert scored["sampling_params"].keys() == asked.keys()
    assert (asked["temperature"], asked["max_new_tokens"], asked["stop_token_ids"]) == (0.5, 5, [0])
    expected = {
        "rid": "g+0", "input_ids": [1, 2], "return_logprob": True, "logprob_start_len": -1,
        "top_logprobs_num": 3, "return_routed_experts": True, "routed_experts_start_len": 0, "stream": False,
    }  # fmt: skip
    assert expected.items() <= body.items()
    of_prompt = {"rid": "rid", "input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 0}
    assert (of_prompt | {"return_routed_experts": False, "stream": False}).items() <= scored.items()
    endless = ServedModel(97, 3, (), ROUTING)
    assert generation_of(version).generate_body(request, params, endless)["sampling_params"]["ignore_eos"]


@pytest.mark.parametrize("version", GENERATIONS)
def test_facts_of_a_server_are_read(version: str) -> None:
    facts = json.loads((REPLIES / version / "facts.json").read_text())
    read = generation_of(version).read_facts(facts["server_info"], facts["model_info"])
    assert (read.version, read.weight_version, read.captures_routes) == (version, 0, True)
    assert (read.max_prompt_tokens, read.max_tokens) == (505, 510)
    leaking = facts["server_info"] | {"preferred_sampling_params": {"top_p": 0.9}}
    with pytest.raises(ServerError, match="preferred_sampling_params"):
        generation_of(version).read_facts(leaking, facts["model_info"])
    with pytest.raises(ReplyError, match="weight version 'default'"):
        generation_of(version).read_facts(
            facts["server_info"], {"model_path": "m", "weight_version": "default"}
        )


@pytest.mark.parametrize("version", GENERATIONS)
def test_the_load_is_the_sum_of_what_runs_and_what_waits_on_all_ranks(version: str) -> None:
    parts: list[Any] = [
        {"num_running_reqs": 3, "num_waiting_reqs": 5, "num_total_reqs": 90},
        {"num_running_reqs": 0, "num_waiting_reqs": 11},
    ]
    read_load = generation_of(version).read_load
    assert read_load({"loads": parts}) == 19 and read_load({"loads": []}) == 0
    odd: list[Any] = [[*parts], None, "19", 19, {}, {"loads": 19}, {"loads": [{"num_running_reqs": 3}]}]
    for body in [*odd, {"loads": [{"num_running_reqs": "3", "num_waiting_reqs": 5}]}]:
        with pytest.raises(ReplyError, match="/v1/loads"):
            read_load(body)

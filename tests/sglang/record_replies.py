"""Records a real server's replies for tests/unit: python -m tests.sglang.record_replies URL [CASE ...].

The server is one of `serving.served_config`, without a key, whose model is `serving.write_served_model` with
three layers. "retracted" also needs `serving.TIGHT`: the cache is too small for the requests.
"""

import dataclasses
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.protocol import generation_of
from tests.support.serving import MODEL

OUT = Path(__file__).resolve().parents[1] / "unit" / "sglang_replies"
PROMPT = (5, 6, 7, 8, 40, 41)
KEPT = (
    "version",
    "max_req_input_len",
    "enable_return_routed_experts",
    "max_running_requests",
    "preferred_sampling_params",
    "tp_size",
)
CASES: dict[str, SamplingParams] = {
    "plain": SamplingParams(8),
    "topk_and_routes": SamplingParams(8, num_topk_log_probs=20, capture_routes=True),
    "stop": SamplingParams(400, temperature=2.0, num_topk_log_probs=2, capture_routes=True),
    "greedy": SamplingParams(4, temperature=0.0, num_topk_log_probs=1),
    "abort": SamplingParams(400, num_topk_log_probs=2, capture_routes=True),
    "retracted": SamplingParams(150, num_topk_log_probs=2, capture_routes=True),
}
NUM_BESIDE = 8  # requests that are sent at once, to fill a small cache


def main(url: str, names: list[str]) -> None:
    """Write one file per case, or all files if no case is named, and the server's description of itself."""
    server_info = {key: httpx2.get(f"{url}/server_info").json()[key] for key in KEPT}
    version = server_info["version"]
    folder = OUT / version
    folder.mkdir(parents=True, exist_ok=True)
    model_info = httpx2.get(f"{url}/model_info").json() | {"model_path": "model"}
    facts = {
        "server_info": server_info,
        "model_info": {key: model_info[key] for key in ("model_path", "weight_version")},
    }
    if not names:
        (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name, params in CASES.items():
        if names and name not in names:
            continue
        request = Request(f"{name}+0", PROMPT, (0, 0, 0))
        body = generation_of(version).generate_body(request, params, MODEL)
        answer = _ask_all(url, body) if name == "retracted" else _ask(url, body, is_aborted=name == "abort")
        case = {"request": dataclasses.asdict(request), "params": dataclasses.asdict(params), "body": answer}
        (folder / f"{name}.json").write_text(json.dumps(case) + "\n")
        print(name, answer["meta_info"]["finish_reason"], len(answer["output_ids"]))


def _ask(url: str, body: dict[str, Any], *, is_aborted: bool) -> Any:
    while True:
        if is_aborted:
            threading.Thread(target=_abort, args=(url, body["rid"])).start()
        answer = httpx2.post(f"{url}/generate", json=body, timeout=60).json()
        if is_aborted == (answer["meta_info"]["finish_reason"]["type"] == "abort"):
            return answer  # else it ended by itself first


def _ask_all(url: str, body: dict[str, Any]) -> Any:
    """The reply to `body`, sent with other requests like it until the server retracts it."""
    bodies = [body, *({**body, "rid": f"beside{n}+0"} for n in range(1, NUM_BESIDE))]
    while True:
        with ThreadPoolExecutor(NUM_BESIDE) as pool:
            answers = list(
                pool.map(lambda one: httpx2.post(f"{url}/generate", json=one, timeout=120).json(), bodies)
            )
        if answers[0]["meta_info"]["num_retractions"]:
            return answers[0]


def _abort(url: str, rid: str) -> None:
    time.sleep(0.06)
    httpx2.post(f"{url}/abort_request", json={"rid": rid}, timeout=10)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

"""Records what a real server answers, for tests/unit: python tests/sglang/record_replies.py URL.

The server is one of `serving.served_config`, without a key, whose model is `serving.write_served_model`.
"""

import dataclasses
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
from serving import MODEL

from megatron_dppo.rollout.engine import Request, SamplingParams
from megatron_dppo.rollout.sglang.protocol import Generation0521

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
}


def main(url: str) -> None:
    """Write one file per case, and the server's description of itself."""
    OUT.mkdir(exist_ok=True)
    server_info = {key: httpx2.get(f"{url}/server_info").json()[key] for key in KEPT}
    model_info = httpx2.get(f"{url}/model_info").json() | {"model_path": "model"}
    facts = {
        "server_info": server_info,
        "model_info": {key: model_info[key] for key in ("model_path", "weight_version")},
    }
    (OUT / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    for name, params in CASES.items():
        request = Request(f"{name}+0", PROMPT, (0, 0, 0))
        body = Generation0521().generate_body(request, params, MODEL)
        answer = _ask(url, body, is_aborted=name == "abort")
        case = {"request": dataclasses.asdict(request), "params": dataclasses.asdict(params), "body": answer}
        (OUT / f"{name}.json").write_text(json.dumps(case) + "\n")
        print(name, answer["meta_info"]["finish_reason"], len(answer["output_ids"]))


def _ask(url: str, body: dict[str, Any], *, is_aborted: bool) -> Any:
    while True:
        if is_aborted:
            threading.Thread(target=_abort, args=(url, body["rid"])).start()
        answer = httpx2.post(f"{url}/generate", json=body, timeout=60).json()
        if is_aborted == (answer["meta_info"]["finish_reason"]["type"] == "abort"):
            return answer  # else it ended by itself first


def _abort(url: str, rid: str) -> None:
    time.sleep(0.06)
    httpx2.post(f"{url}/abort_request", json={"rid": rid}, timeout=10)


if __name__ == "__main__":
    main(sys.argv[1])

"""What `megatron-dppo measure-mismatch` measures, on ranks of tests: a config in one layout after another."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor

from megatron_dppo.runtime.process import Runtime

PARITY = 5e-5  # of float32 log-probs
TIE = 1e-5  # of experts' probabilities, relative
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    1: {"one process": {}},
    2: {
        "TP2": {"tensor": 2},
        "EP2": {"expert": 2},
        "PP2": {"pipeline": 2},
        "CP2": {"context": 2},
        "DP2": {},
    },
}


def measure_layouts(
    runtime: Runtime, tables: dict[str, Any], folder: str, layouts: dict[str, dict[str, int]]
) -> dict[str, dict[str, Any]]:
    """By layout: the statistics of both ways of forwarding, and the rows of tokens.jsonl."""
    from megatron_dppo.analysis.mismatch.measure import measure
    from megatron_dppo.analysis.mismatch.results import measurement_config
    from megatron_dppo.metrics.engine_comparison import token_rows

    results: dict[str, dict[str, Any]] = {}
    for name, parallel in layouts.items():
        file = Path(folder) / f"{name}-{runtime.rank}.toml"
        file.write_text(tomli_w.dumps(tables | {"parallel": tables.get("parallel", {}) | parallel}))
        found = measure(measurement_config([file], ()), runtime)
        rows = list(token_rows(found.responses))
        results[name] = {"statistics": found.statistics, "rows": rows, "counts": found.counts}
    return results


def require_parity(
    results: list[dict[str, dict[str, Any]]], model: Path, num_layers: int, num_responses: int
) -> None:
    """Each layout, on each rank: both forwards are within PARITY of the rollout, and all routers agree.

    If the trainer routes by itself, log-probs may differ from the first position with a tie (`undecided`) to
    the end of the response, and at most that share of routes. With the rollout's routes no log-prob may differ.

    Args:
        results: Per rank and layout: `statistics`, per way of forwarding, and the `rows` of tokens.jsonl.
        model: The Hugging Face folder of the weights.
        num_layers: Layers with experts.
        num_responses: Responses in the rows.
    """
    for rank, result in enumerate(results):
        for name, found in result.items():
            statistics, rows = found["statistics"], found["rows"]
            assert len(rows) == num_responses, (name, len(rows))
            differs = {routes: differences(rows, routes) for routes in ("live", "replayed")}
            is_parity = all(bool((each <= PARITY).all()) for each in differs["live"])
            is_free, share = [torch.zeros(len(each), dtype=torch.bool) for each in differs["live"]], 0.0
            if not is_parity or statistics["live"]["agreement_mean"] != 1.0:
                is_free, share = undecided_tokens(model, rows)
            where = f"{name}, rank {rank}, {sum(int(free.sum()) for free in is_free)} tokens after a tie"
            for routes, by_response in differs.items():
                values = statistics[routes]
                for index, (difference, free) in enumerate(zip(by_response, is_free, strict=True)):
                    held = difference if routes == "replayed" else difference[~free]
                    said = f"{where}, {routes}: found {difference.tolist()} in response {index}; {dict(values)}"
                    assert (held <= PARITY).all() and difference.isfinite().all(), said
                agreement = [value for key, value in values.items() if key.startswith("agreement")]
                said = f"{where}, {routes}: expected routers to agree to {1 - share}; {dict(values)}"
                assert len(agreement) == num_layers + 1 and all(each >= 1 - share for each in agreement), said


def differences(rows: Sequence[Mapping[str, Any]], routes: str) -> list[Tensor]:
    """Largest difference of each token of each response, in log-prob or over the rollout's top-K: [R] each."""
    found: list[Tensor] = []
    for row in rows:
        difference = torch.tensor(row[f"{routes}_log_probs"]) - torch.tensor(row["rollout_log_probs"])
        found.append(difference.abs().maximum(torch.tensor(row.get(f"{routes}_topk_tv", 0.0))))
    return found


@torch.no_grad()
def undecided_tokens(model: Path, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Tensor], float]:
    """Which sampled tokens are free to differ, [R] bool of each response, and the share of such positions.

    Those from the first position on whose experts are `undecided`, by Hugging Face's scores: what stands
    before is the same whichever expert was taken, and what follows attends to it.
    """
    from transformers import AutoModelForCausalLM

    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    free: list[Tensor] = []
    num_free = num_positions = 0
    for row in rows:
        tokens = torch.tensor([*row["prompt"], *row["tokens"]])[:-1]  # nothing is scored by the last one
        logits = judge(tokens[None], output_router_logits=True).router_logits
        is_free = undecided(torch.stack(logits, dim=1), judge.config.num_experts_per_tok).cummax(0).values
        free.append(is_free[len(row["prompt"]) - 1 :].bool())
        num_free, num_positions = num_free + int(is_free.sum()), num_positions + len(tokens)
    return free, num_free / num_positions


def undecided(logits: Tensor, top_k: int) -> Tensor:
    """Whether rounding may decide which experts a token goes to, in any layer: [T] int64, 0 or 1.

    It may if the last expert that is chosen and the first one that is not have probabilities within TIE of
    each other, relative to them: their logits then differ by as much.

    Args:
        logits: Logits of the routers, [T, layers, experts].
        top_k: Experts that a token goes to.
    """
    best = logits.double().topk(top_k + 1, dim=-1).values
    return (best[..., -2] - best[..., -1] <= TIE).any(-1).long()

"""What `megatron-dppo measure-mismatch` measures, on ranks of tests: a config in one layout after another."""

from pathlib import Path
from typing import Any

import tomli_w

from megatron_dppo.runtime.process import Runtime

TOOLS = Path(__file__).parents[2] / "tools"
PARITY = 5e-5  # of float32 log-probs
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
    from megatron_dppo.analysis.mismatch.forwards import measure
    from megatron_dppo.analysis.mismatch.settings import measured_config
    from megatron_dppo.metrics.token_mismatch import token_rows

    results: dict[str, dict[str, Any]] = {}
    for name, parallel in layouts.items():
        file = Path(folder) / f"{name}-{runtime.rank}.toml"
        file.write_text(tomli_w.dumps(tables | {"parallel": tables.get("parallel", {}) | parallel}))
        found = measure(measured_config([file], ()), runtime)
        rows = list(token_rows(found.responses))
        results[name] = {"statistics": found.statistics, "rows": rows, "counts": found.counts}
    return results


def require_parity(results: list[dict[str, dict[str, Any]]], num_layers: int, num_responses: int) -> None:
    """Each layout, on each rank: log-probs of both forwards within PARITY, and all routers agree."""
    for result in results:
        for name, found in result.items():
            assert len(found["rows"]) == num_responses, name
            for routes in ("live", "replayed"):
                values = found["statistics"][routes]
                assert values["log_prob_diff_max"] <= PARITY, (name, routes)
                agreement = {key: value for key, value in values.items() if key.startswith("agreement")}
                assert len(agreement) == num_layers + 1, (name, routes)
                assert set(agreement.values()) == {1.0}, (name, routes)

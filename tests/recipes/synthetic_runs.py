"""Run folders of the experiments in examples/ with known numbers.

Metrics are straight lines, which smoothing keeps; entropy is constant. No two runs share a line.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.config.load import load_config
from megatron_dppo.run_folder.folder import RunFolder
from tests.support.experiments import ALGORITHMS, ROOT, Algorithm

NUM_ROLLOUTS = 12
EVALUATED = (0, 5, 10)  # rollouts before an evaluation
PLACES = {str(each): 1 + (7 * place) % 97 for place, each in enumerate(ALGORITHMS)}  # no two alike, in no order
CLIPPED_COUNTS = ({"positive": 1, "negative": 3}, {"positive": 5, "negative": 0})  # of a rollout's two steps
_SLOPES = {  # of a rollout row's metrics, per rollout and place
    "reward/mean": 0.001,
    "mismatch/abs_prob_diff_mean": 1e-5,
    "mismatch/prob_diff_max": 2e-4,
    "mismatch/prob_diff_min": -3e-4,
    "rollout/response_length_mean": 3.0,
}
_OF_SETS = {"aime24": 0.002, "aime25": 0.003}


def of_experiments(*names: str) -> list[Algorithm]:
    """The overlays of these experiments."""
    return [each for each in ALGORITHMS if each.experiment in names]


def expected(algorithm: Algorithm, metric: str) -> tuple[list[float], list[float]]:
    """Rollouts and values of a run's curve, worked out here once more from what `write` gives each row."""
    place = PLACES[str(algorithm)]
    if metric.startswith("eval/"):
        slope = _OF_SETS[metric.split("/")[1]]
        return [float(x) for x in EVALUATED], [slope * place * (1 + x) for x in EVALUATED]
    x = [rollout + 1.0 for rollout in range(NUM_ROLLOUTS)]
    if metric in _SLOPES:
        return x, [_SLOPES[metric] * place * rollout for rollout in x]
    if metric == "policy/entropy":
        return x, [0.01 * place] * NUM_ROLLOUTS
    if metric == "trust_region/bad_update_fraction":
        return x, [1e-5 * place * (rollout + 0.5) for rollout in x]  # mean of the two steps
    sign = {"clipped/mu_mean": 1.0, "clipped/entropy_mean": 2.0}[metric]
    # One token at +0.01, three at -0.02, five at +0.03: nine tokens, each counts once.
    return x, [sign * (0.001 * place * rollout + (0.01 - 3 * 0.02 + 5 * 0.03) / 9) for rollout in x]


def write(algorithm: Algorithm, path: Path, overrides: Sequence[str] = ()) -> Path:
    """Write the run folder that training this overlay would leave, with its own config."""
    layers = [ROOT / layer for layer in algorithm.layers]
    config = load_config(layers, [f"run.folder={str(path)!r}", *overrides])
    place = PLACES[str(algorithm)]
    with RunFolder.open(path, config.model_dump(exclude_none=True), resume=False) as folder:
        for rollout in range(NUM_ROLLOUTS):
            for step in (0, 1):
                folder.write_step(rollout, 2 * rollout + step, _step_row(place, rollout + 1, step))
            row = {metric: slope * place * (rollout + 1) for metric, slope in _SLOPES.items()}
            folder.write_rollout(rollout, row, num_rollouts=NUM_ROLLOUTS)
            if rollout in EVALUATED and config.evaluation.sets:
                num = config.evaluation.samples_per_prompt
                scores = {
                    f"eval/{name}/avg_at_{num}": v * place * (1 + rollout) for name, v in _OF_SETS.items()
                }
                folder.write_evaluation(rollout, scores)
    return path


def _step_row(place: int, number: int, step: int) -> Mapping[str, Any]:
    offsets = ({"positive": 0.01, "negative": -0.02}, {"positive": 0.03})[step]
    row = {
        "policy/entropy": 0.01 * place,
        "trust_region/bad_update_fraction": 1e-5 * place * (number + step),
        **{f"clipped/num_tokens_{sign}": count for sign, count in CLIPPED_COUNTS[step].items()},
    }
    for sign, offset in offsets.items():
        mean = 0.001 * place * number + offset
        row |= {f"clipped/mu_mean_{sign}": mean, f"clipped/entropy_mean_{sign}": 2 * mean}
    return row

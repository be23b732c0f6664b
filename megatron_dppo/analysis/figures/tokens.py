"""Reads probabilities of single tokens in both engines with the same weights: tokens.jsonl or kept batches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dppo.data.batches.batch_file import group_files, kept_rollouts, read_share
from megatron_dppo.errors import DataError

TOKENS = "tokens.jsonl"  # of megatron-dppo measure-mismatch
_SUFFIX = "_log_probs"
_MU = "rollout" + _SUFFIX
_ROUTES = {"live": "live routes", "replayed": "replayed routes (R3)"}


@dataclass(frozen=True)
class TokenPairs:
    """Log-probs of the same tokens in both engines, for one way of forwarding in the trainer."""

    folder: Path
    source: str  # in words
    log_mu: np.ndarray  # [T] float64
    log_pi: np.ndarray  # [T] float64, by the weights that sampled


def read_token_pairs(folder: Path) -> list[TokenPairs]:
    """Read the token pairs of a folder, or nothing if it has neither file.

    Raises:
        DataError: A file has the wrong format.
    """
    if (folder / TOKENS).is_file():
        return _of_rows(folder)
    return _of_batches(folder)


def _of_rows(folder: Path) -> list[TokenPairs]:
    file = folder / TOKENS
    columns: dict[str, list[float]] = {}
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            for name, values in json.loads(line).items():
                if name.endswith(_SUFFIX):
                    columns.setdefault(name, []).extend(map(float, values))
        log_mu = columns.pop(_MU)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{file}: found no rows of tokens ({error}); expected rollout_log_probs and live_log_probs of each "
            "response. Write it again with megatron-dppo measure-mismatch."
        ) from error
    return [
        _pairs(folder, _ROUTES.get(name.removesuffix(_SUFFIX), name), log_mu, log_pi)
        for name, log_pi in columns.items()
    ]


def _of_batches(run: Path) -> list[TokenPairs]:
    """Read the pairs of the newest kept rollout, which needs log-probs of a "recomputed" anchor."""
    if not (kept := [rollout for rollout in kept_rollouts(run / "batches") if _is_whole(run, rollout)]):
        return []
    log_mu: list[float] = []
    log_pi: list[float] = []
    for step in read_share(run / "batches", kept[-1], (0, 1)):
        for m in step.microbatches:
            if m.old_log_probs is None:
                return []
            log_mu += m.rollout_log_probs[m.loss_mask].tolist()
            log_pi += m.old_log_probs[m.loss_mask].tolist()
    return [_pairs(run, f"mini-batches of rollout {kept[-1]}", log_mu, log_pi)]


def _is_whole(run: Path, rollout: int) -> bool:
    """Whether each group has written its part, which groups of a live run may not have."""
    try:
        return bool(group_files(run / "batches", rollout))
    except DataError:
        return False


def _pairs(folder: Path, source: str, log_mu: list[float], log_pi: list[float]) -> TokenPairs:
    known = np.isfinite(log_mu) & np.isfinite(log_pi)
    return TokenPairs(folder, source, np.asarray(log_mu)[known], np.asarray(log_pi)[known])

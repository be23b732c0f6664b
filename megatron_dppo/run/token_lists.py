"""Collects the masked tokens of the open rollout over its gradient steps, and writes them to the run folder."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from megatron_dppo.checkpoints.megatron_folder import hf_files
from megatron_dppo.metrics.masked_tokens import ClippedTokens, TokenLists
from megatron_dppo.run_folder.reader import Run
from megatron_dppo.runtime.files import write_jsonl

_FILE = re.compile(r"(rollout|step)_(\d+)\.jsonl")


class OpenTokenLists:
    """Sums of the masked tokens of the open rollout's gradient steps so far; lives as long as the run.

    `clipped_tokens/rollout_<n>.jsonl` gets the tokens that each mask dropped most often over the rollout.
    `masked_tokens/step_<n>.jsonl` gets the tokens of each gradient step farthest outside the trust region. Both
    count from 0.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        """Start without a rollout.

        Args:
            folder: Run folder.
            model: Folder of model.load; its tokenizer decodes the tokens.
        """
        self._folder, self._model = folder, model
        self._num_steps, self._clipped = 0, ClippedTokens()

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Continue with a checkpoint's sums of an open rollout; start from zero if they are empty."""
        self._num_steps = int(kept.get("num_steps", 0))
        self._clipped = ClippedTokens.from_json(kept.get("sums", ()))

    @property
    def kept(self) -> dict[str, Any]:
        """Sums for a checkpoint in the middle of a rollout, as JSON values; empty if no step was listed."""
        return {"num_steps": self._num_steps, "sums": self._clipped.to_json()} if self._num_steps else {}

    def add_step(self, merged: TokenLists) -> None:
        """Add a gradient step's masked tokens of all ranks."""
        self._num_steps += 1
        self._clipped.merge([merged.clipped.state()])

    def write_farthest(self, rollout: int, step: int, merged: TokenLists) -> None:
        """Write a gradient step's masked tokens farthest outside the trust region, over all ranks."""
        file = self._folder / "masked_tokens" / f"step_{step:06d}.jsonl"
        write_jsonl(file, merged.masked.rows(self._tokenizer().decode, rollout))

    def write_rollout(self, rollout: int) -> None:
        """Write the list of a finished rollout, unless no gradient step of it was listed."""
        if self._num_steps:
            of_all = {"rollout": rollout, "num_steps": self._num_steps}
            rows = self._clipped.rows(self._tokenizer().decode)
            file = self._folder / "clipped_tokens" / f"rollout_{rollout:06d}.jsonl"
            write_jsonl(file, (of_all | row for row in rows))

    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(hf_files(self._model), trust_remote_code=False)


def remove_undone(run: Run) -> None:
    """Remove the lists of rollouts and gradient steps without rows in metrics.jsonl: a resume undid them."""
    done = {"rollout": {row.rollout for row in run.rollouts}, "step": {row.step for row in run.steps}}
    for file in _lists(run.path):
        match = _FILE.fullmatch(file.name)
        if match and int(match[2]) not in done[match[1]]:
            file.unlink()


def _lists(run: Path) -> Iterable[Path]:
    return (file for name in ("clipped_tokens", "masked_tokens") for file in (run / name).glob("*.jsonl"))

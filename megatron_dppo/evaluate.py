"""Evaluates a model, or a run's checkpoint, on the sets of [evaluation], without a trainer."""

import contextlib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from megatron_dppo import __version__
from megatron_dppo.checkpoints.checkpoint_folder import STATE
from megatron_dppo.checkpoints.convert.sources import StoredWeights
from megatron_dppo.checkpoints.megatron_folder import hf_files
from megatron_dppo.checks import BEFORE_LOADING, require_evaluable
from megatron_dppo.config.load import flat
from megatron_dppo.config.resuming import effect_on_evaluation
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.sglang.server import own_servers
from megatron_dppo.engines.weight_sync.factory import build_sync
from megatron_dppo.errors import CheckpointError, ConfigError, Problem
from megatron_dppo.rollout.evaluation import Evaluation, EvaluationSet, evaluation_sets, merge_responses
from megatron_dppo.rollout.rollouts import build_engine
from megatron_dppo.rollout.scores import over_ranks
from megatron_dppo.rollout.scoring import RewardPools
from megatron_dppo.rollout.trajectories import TrajectorySampler
from megatron_dppo.run.session import join_processes
from megatron_dppo.run_folder.lock import locked
from megatron_dppo.runtime.files import full_disk_explained, write_whole
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.runtime.user_code import digest_of

logger = logging.getLogger(__name__)
METRICS = "metrics.json"
_TEXT = (".json", ".jinja", ".model", ".txt")  # tokenizer, chat template and config.json, but no weights
Results = dict[str, dict[str, Any]]
"""By set: `of` and `files` are what the metrics depend on, `metrics` are the numbers."""


def evaluate(config: Config, folder: Path, rollout: int = 0) -> Results:
    """Evaluate model.load on every set, in this process of the job.

    A set is not sampled again if `folder` has its results for the same weights, tokenizer, settings, prompts
    and version of this package, and if all files are unchanged that its reward, environment and agent have
    read: modules and tables; see `FilesRead`. A log line names the results that are kept.

    Args:
        config: Config of the run; settings that are only for training are neither used nor checked.
        folder: Output folder for metrics.json, and `<set>.jsonl` with every response.
        rollout: Seed of the sampling noise: a run uses the same noise in its evaluation after `rollout`
            rollouts.
    """
    with join_processes(config) as runtime, full_disk_explained(folder):
        size, needs = runtime.world_size, BEFORE_LOADING
        runtime.on_main(lambda: require_evaluable(config, size, needs=needs))
        with _lock_folders(config, folder, runtime):
            weights = StoredWeights(config.model.load, getattr(torch, config.model.dtype), runtime)
            wanted = runtime.on_main(lambda: _describe_sets(config, weights.identity, rollout))
            done = runtime.on_main(lambda: _keep_unchanged(folder, wanted))
            if done.keys() != wanted.keys():
                with own_servers(config, runtime):
                    _evaluate_rest(config, folder, rollout, weights, wanted, done, runtime)
            return {name: done[name] for name in wanted}


def finished_rollouts(checkpoint: Path) -> int:
    """Return the number of rollouts that a run had finished when it saved this checkpoint."""
    try:
        return int(json.loads((checkpoint / STATE).read_text())["state"]["rollout"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint}: found no {STATE} that can be read ({type(error).__name__}); expected a checkpoint "
            "of a run, such as RUN/checkpoints/step_00000100. Name other models with --model."
        ) from error


def as_table(results: Results) -> str:
    """Format the metrics of each set, one per line."""
    lines: list[str] = []
    for name, result in results.items():
        metrics: Mapping[str, float] = result["metrics"]
        short = {metric.removeprefix(f"eval/{name}/"): value for metric, value in metrics.items()}
        score, low, high = list(short)[:3]
        lines += [name, f"  {score:<22}{short[score]:>10.4f}   [{short[low]:.4f}, {short[high]:.4f}]"]
        lines += [
            f"  {metric:<22}{value:>10.4f}"
            for metric, value in short.items()
            if metric not in (score, low, high)
        ]
    return "\n".join(lines)


@contextlib.contextmanager
def _lock_folders(config: Config, folder: Path, runtime: Runtime) -> Iterator[None]:
    """Lock the folder for this job; if servers get other weights, also lock their run's folder."""
    with contextlib.ExitStack() as stack:

        def hold() -> None:
            stack.enter_context(locked(folder, key="--out"))
            if config.rollout.engine == "sglang":
                stack.enter_context(locked(config.run.folder))

        runtime.on_main(hold)
        yield


def _describe_sets(config: Config, weights: str, rollout: int) -> Results:
    """Return all inputs that the metrics of each set depend on."""
    other = "transformers" if config.rollout.engine == "sglang" else "sglang"
    unused = f"{other}.", f"rollout.{other}."
    of_model = [file for file in hf_files(config.model.load).iterdir() if file.suffix in _TEXT]
    of_all = {
        "version": __version__,
        "weights": weights,
        "model_files": _digest(sorted(file for file in of_model if file.name != METRICS)),
        "rollouts_finished": rollout,
        "settings": {
            key: value
            for key, value in flat(config.model_dump(mode="json")).items()
            if effect_on_evaluation(key) == "all sets" and not key.startswith(unused)
        },
    }
    sets = evaluation_sets(config)
    return {each.name: {"of": of_all | {"set": _describe(each)}} for each in sets}


def _describe(each: EvaluationSet) -> dict[str, Any]:
    prompts = {"prompts": ", ".join(map(str, each.prompts)), "prompts_digest": _digest(each.prompts)}
    return json.loads(json.dumps(asdict(each) | prompts))


def _digest(files: Iterable[Path]) -> str:
    """Return a digest of the files' names and contents."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        content = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()


def _keep_unchanged(folder: Path, wanted: Results) -> Results:
    """Return results of sets that need no sampling, and remove all other results from the file."""
    file = folder / METRICS
    if not file.exists():
        return {}
    try:
        found: Results = json.loads(file.read_text())
        kept = {
            name: result
            for name, result in found.items()
            if result["of"] == wanted.get(name, {}).get("of")
            and (folder / f"{name}.jsonl").is_file()
            and all(digest == digest_of(path) for path, digest in result["files"])
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "a new folder, or one that evaluate has written"
        action = "Name another folder with --out."
        raise ConfigError(Problem("--out", f"{file}, which no evaluation wrote", expected, action)) from error
    _write(folder, kept)
    for name in kept:
        logger.info(
            "evaluation.sets.%s: kept from %s, because nothing has changed that it depends on", name, file
        )
    return kept


def _write(folder: Path, results: Results) -> None:
    write_whole(folder / METRICS, [json.dumps(results, indent=1), "\n"])


def _evaluate_rest(
    config: Config,
    folder: Path,
    rollout: int,
    weights: StoredWeights,
    wanted: Results,
    done: Results,
    runtime: Runtime,
) -> None:
    """Sample the sets that are not in `done`, and add each to `done` and to the folder when it finishes."""
    hf_folder = hf_files(config.model.load)
    engine = build_engine(config, hf_folder, runtime.device)
    tokenizer: Any = AutoTokenizer.from_pretrained(hf_folder, trust_remote_code=False)
    rewards = RewardPools(config.data, (each.reward for each in evaluation_sets(config)))
    sampler = TrajectorySampler(config.rollout, config.data, engine, hf_folder)
    share = runtime.rank, runtime.world_size
    with closing(rewards), closing(sampler), closing(build_sync(config, weights, engine, runtime)) as sync:
        evaluation = Evaluation(config, sampler, tokenizer, rewards, share=share)
        rewards.start(evaluation.first_prompts)
        sampler.start(next(iter(evaluation.first_prompts.values())))
        sync.push(0)
        for each in evaluation.sets:
            if each.name in done:
                continue
            file = folder / f"{each.name}.jsonl"
            before = Counter(engine.refusals)
            own = {each.name: evaluation.run(each, rollout, file)}
            files = rewards.files(each.reward) | sampler.files
            of_ranks = runtime.all_gather((own, Counter(engine.refusals) - before, files))
            scores = over_ranks([scores for scores, *_ in of_ranks])[each.name]
            refusals = sum((refused for _, refused, _ in of_ranks), Counter[str]())
            files = sorted(set[tuple[str, str]]().union(*(files for *_, files in of_ranks)))
            runtime.on_main(lambda file=file: merge_responses(file, runtime.world_size))
            each.refuse_if_too_many_dropped(scores, config.rollout.max_dropped_fraction, refusals)
            metrics = each.metrics(scores, config.run.seed)
            done[each.name] = wanted[each.name] | {"files": files, "metrics": metrics}
            runtime.on_main(lambda: _write(folder, done))

"""The run logger: gathers metrics from all ranks and writes them to the run folder on rank 0."""

import contextlib
import logging
import tomllib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from megatron_dppo.architectures.megatron_options import choose_layer_spec
from megatron_dppo.architectures.registry import read_model_sizes
from megatron_dppo.architectures.sizes import config_file
from megatron_dppo.config.resuming import experiment_changes
from megatron_dppo.config.schema import Config
from megatron_dppo.config.sections import is_due
from megatron_dppo.data.batches.batch_file import write_group
from megatron_dppo.data.batches.gradient_steps import BatchReport
from megatron_dppo.data.batches.memory import bytes_of_samples
from megatron_dppo.errors import TrainingError
from megatron_dppo.mcore.groups import data_parallel_place, speaks_for_its_group
from megatron_dppo.metrics.alarms import write_alarms
from megatron_dppo.metrics.masked_tokens import TokenLists
from megatron_dppo.metrics.means import add_group_means
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.step_metrics import add_staleness, bound_terms, prob_diff_so_far, without_lone_age
from megatron_dppo.rollout.counts import RolloutCounts, refuse_if_too_many_dropped
from megatron_dppo.rollout.evaluation import evaluation_sets, merge_responses, responses_file
from megatron_dppo.rollout.groups import write_samples
from megatron_dppo.rollout.scores import PromptScore, over_ranks
from megatron_dppo.rollout.scoring import Tokenizer
from megatron_dppo.run.history import OpenTokenLists, PastRows, RunHistory, of_the_rollout, remove_undone
from megatron_dppo.run_folder.folder import RunFolder
from megatron_dppo.run_folder.lock import PATIENCE_S, locked
from megatron_dppo.run_folder.reader import read_run
from megatron_dppo.runtime.gpu_ledger import OUTSIDE
from megatron_dppo.runtime.process import Runtime, gpu_libraries
from megatron_dppo.types import OpenRollout, SampleGroup, TrainBatch

T = TypeVar("T")


@dataclass(frozen=True)
class Alarm:
    """An alarm for which a run is rolled back."""

    text: str  # description
    good_until: int  # number of rollouts finished before the trouble began
    evidence: Path


log = logging.getLogger(__name__)

_BETWEEN = "time/save_between_s"


class RunLogger:
    """Writes the run folder; lives as long as the run.

    All ranks call each method together. A failure to write on rank 0 is raised on every rank.
    """

    def __init__(self, config: Config, runtime: Runtime, folder: RunFolder | None) -> None:
        """Use `RunLogger.open`."""
        self._config, self._runtime, self._folder = config, runtime, folder
        self._rollout_metrics: dict[str, float] = {}
        self._save_s = self._save_between_s = 0.0
        self._history = RunHistory(config)
        self._lists = OpenTokenLists(config.run.folder, config.model.load)

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: Config, runtime: Runtime) -> Generator["RunLogger"]:
        """Lock the run folder, create or resume it, and close it at the end."""
        folders: list[RunFolder] = []
        with contextlib.ExitStack() as stack:

            def open_folder() -> None:
                patience_s = min(PATIENCE_S, config.run.timeout_s / 2)  # the other ranks wait for rank 0
                stack.enter_context(locked(config.run.folder, patience_s=patience_s))
                options = config.run.folder, config.model_dump(mode="json"), config.checkpoint.resume
                is_there = config_file(config.model.load) is not None
                sizes = read_model_sizes(config.model.load) if is_there else None
                choice = choose_layer_spec(config, gpu_libraries().transformer_engine, sizes)
                spec = {"layer_spec": choice.name, "layer_spec_reason": choice.reason}
                decisions = spec | {"world_size": runtime.world_size}
                backends = config.tracking.backends
                folder = RunFolder.open(*options, backends=backends, decisions=decisions)
                folders.append(stack.enter_context(folder))

            runtime.on_main(open_folder)
            yield cls(config, runtime, folders[0] if folders else None)

    def start_at(self, metrics_offset: int, opened: OpenRollout | None = None) -> None:
        """Cut metrics.jsonl to the rows that belong to the checkpoint that the run resumes from.

        Lists of masked tokens that belong to other rows are removed.

        Args:
            metrics_offset: Number of bytes to keep.
            opened: Open rollout in the checkpoint, with its row and list so far.
        """

        def restart(folder: RunFolder) -> tuple[PastRows, bool]:
            folder.truncate(metrics_offset)
            remove_undone(run := read_run(folder.path))
            past = PastRows.read(run) if metrics_offset else PastRows()
            folder.continue_rollout(past.open_steps)
            tracking = (folder.earlier_config or {}).get("tracking", {})
            return past, tracking.get("alarms") != "off"

        past, raised_alarms = self._on_main(restart)
        self._rollout_metrics = {} if opened is None else dict(opened.metrics)
        self._lists.restore({} if opened is None else opened.listed)
        self._history.resume(past, of_the_rollout(self._rollout_metrics), raised_alarms=raised_alarms)

    def write_changes(self, rollout: int, trained_with: str) -> None:
        """Append a row for each changed setting that makes the rest of the run another experiment.

        Args:
            rollout: Number of finished rollouts.
            trained_with: Config of the checkpoint, as TOML. "" means that the checkpoint has none, and the
                folder's config is used.
        """

        def write(folder: RunFolder) -> None:
            was = tomllib.loads(trained_with) if trained_with else folder.earlier_config
            for change in experiment_changes(was, self._config.model_dump(mode="json")) if was else ():
                folder.write_change(rollout, change)

        self._on_main(write)

    @property
    def rollout_metrics(self) -> dict[str, float]:
        """Metrics of the current rollout so far, over all ranks."""
        return dict(self._rollout_metrics)

    def with_row(self, opened: OpenRollout) -> OpenRollout:
        """Return the open rollout with its row and list so far, for a checkpoint."""
        return replace(opened, metrics=self.rollout_metrics, listed=self._lists.kept)

    @property
    def evaluations(self) -> Path:
        """Folder of the responses of evaluations."""
        return self._config.run.folder / "evaluations"

    def latest(self, metric: str) -> float | None:
        """Return a metric of the last finished rollout or of a later evaluation; None unless it is finite."""
        return self._history.latest(metric)

    def offset(self) -> int:
        """Return the size of metrics.jsonl so far, in bytes."""
        return self._on_main(lambda folder: folder.offset)

    def write_step(self, rollout: int, step: int, metrics: Metrics) -> None:
        """Write the row of a gradient step, from each rank's statistics."""
        values = without_lone_age(self._merge(metrics))
        values |= bound_terms(values)
        of_rollout = of_the_rollout(values)
        self._rollout_metrics |= of_rollout | prob_diff_so_far(self._rollout_metrics, values)
        warning = self._history.add_step(values)
        if warning is not None and self._runtime.is_main:
            log.warning("%s", warning)
        of_step = {name: value for name, value in values.items() if name not in of_rollout}
        self._on_main(lambda folder: folder.write_step(rollout, step, of_step))

    def write_token_lists(self, rollout: int, step: int, lists: TokenLists) -> None:
        """Add a gradient step's masked tokens to its rollout's list, from each rank's lists.

        The tokens farthest outside the trust region are written at once, each in its response.
        """
        merged = TokenLists().merge(self._runtime.all_gather(lists.state()))
        self._lists.add_step(merged)
        self._on_main(lambda _: self._lists.write_farthest(rollout, step, merged))

    def add_values(self, values: Mapping[str, float]) -> None:
        """Add values that are equal on all ranks to the row of the current rollout."""
        self._rollout_metrics |= values

    def add_to_rollout(self, metrics: Metrics) -> None:
        """Add each rank's statistics to the row of the current rollout."""
        self._rollout_metrics |= self._merge(metrics)

    def describe_rollout(self, groups: Sequence[SampleGroup], counts: RolloutCounts) -> dict[str, float]:
        """Return rewards and dropped samples for the rollout's row, from each rank's share of it."""
        metrics = Metrics()
        for group in groups:
            rewards = [float(sample.reward or 0.0) for sample in group.rollouts]
            metrics.add_mean("reward/mean", sum(rewards), len(rewards))
            if group.prompt.file is not None:
                metrics.add_mean(f"source/{group.prompt.file}/reward_mean", sum(rewards), len(rewards))
                metrics.add_sum(f"source/{group.prompt.file}/num_prompts", 1)
            for sample in group.rollouts:
                for name, value in sample.reward_info.items():
                    metrics.add_mean(f"reward/{name}_mean", value, 1)
            add_group_means(metrics, group)
        metrics.add_max(
            "memory/rollout_bytes", bytes_of_samples(sample for group in groups for sample in group.samples)
        )
        of_ranks = self._runtime.all_gather((counts.to_tensor(), dict(counts.refusals)))
        refusals = self._refused_over_ranks(own for _, own in of_ranks)
        total = counts.with_totals(sum(own for own, _ in of_ranks), refusals)  # type: ignore[arg-type]
        values = self._merge(metrics) | total.metrics()
        values["rollout/num_response_tokens"] = total.num_response_tokens
        refuse_if_too_many_dropped(total, self._config.rollout.max_dropped_fraction)
        if total.num_prompts_too_long and self._runtime.is_main:
            too_long, longest = total.num_prompts_too_long, self._config.data.max_prompt_tokens
            log.warning(
                "%d of %d prompts have more than data.max_prompt_tokens = %d tokens and are left out",
                too_long,
                total.num_prompts,
                longest,
            )
        return values

    def describe_batches(self, report: BatchReport) -> dict[str, float]:
        """Return the distribution of samples over groups and micro-batches, from each rank's report."""
        metrics = Metrics()
        metrics.add_max("batch/imbalance", report.imbalance)
        metrics.add_mean("batch/moved_fraction", report.num_moved, report.num_samples)
        metrics.add_mean("batch/padding_fraction", report.num_padding_tokens, report.num_tokens)
        metrics.add_mean("batch/forwarded_fraction", report.num_forwarded_tokens, report.num_tokens)
        metrics.add_max("batch/max_bytes_per_rank", report.max_bytes)
        return self._merge(metrics)

    def begin_row(self, sampled: OpenRollout, steps: Sequence[TrainBatch], weight_version: int) -> None:
        """Add the metrics measured when a rollout was sampled, and its current staleness, to the row."""
        metrics = Metrics()
        add_staleness(metrics, steps, weight_version)
        self._rollout_metrics |= sampled.metrics
        self.add_to_rollout(metrics)

    def write_samples(self, rollout: int, groups: Sequence[SampleGroup], tokenizer: Tokenizer) -> None:
        """Write rank 0's samples as text if `tracking.samples_every` acts in this rollout, an index from 0."""
        if is_due(self._config.tracking.samples_every, rollout):
            self._on_main(
                lambda folder: write_samples(folder.samples / f"rollout_{rollout:06d}.jsonl", groups, tokenizer)
            )

    def keep_batches(self, rollout: int, steps: Sequence[TrainBatch]) -> None:
        """Write this data-parallel group's gradient steps if `tracking.batches_every` acts in this rollout."""
        if is_due(self._config.tracking.batches_every, rollout) and speaks_for_its_group():
            write_group(self._config.run.folder / "batches", rollout, data_parallel_place(), steps)

    def add_save_pause(self, seconds: float, *, is_between_rollouts: bool) -> None:
        """Add the seconds that training waited for a checkpoint to the next row.

        A pause between two rollouts is not included in the row's time/total_s, but in its throughput.
        """
        self._save_s += seconds
        self._save_between_s += seconds * is_between_rollouts

    def write_rollout(self, rollout: int, seconds: Mapping[str, float]) -> Alarm | None:
        """Write the row of a rollout, after its gradient steps; `seconds` of its phases hold a "total".

        Returns:
            Alarm that the row raises, if tracking.alarms is "roll_back".
        """
        metrics = Metrics()
        metrics.add_max("memory/peak_bytes", self._runtime.peak_bytes())
        metrics.add_max("memory/host_peak_bytes", self._runtime.host_peak_bytes())
        if (outside := self._runtime.gpu_ledger.outside_bytes) is not None:
            metrics.add_max(OUTSIDE, outside)
        for phase, elapsed in seconds.items():
            metrics.add_max(f"time/{phase}_s", elapsed)
        if self._save_s:
            metrics.add_max("time/save_s", self._save_s)
        metrics.add_max(_BETWEEN, self._save_between_s)
        row = self._rollout_metrics | self._merge(metrics)
        between_s, self._save_s, self._save_between_s = row.pop(_BETWEEN), 0.0, 0.0
        self._rollout_metrics = {}
        row["throughput/tokens_per_s"] = row["rollout/num_response_tokens"] / (row["time/total_s"] + between_s)
        num_rollouts = self._config.run.num_rollouts
        self._on_main(lambda _: self._lists.write_rollout(rollout))
        self._lists.restore({})
        self._on_main(lambda folder: folder.write_rollout(rollout, row, num_rollouts=num_rollouts))
        self._log_cost_of_paired_forward(row)
        return self._raise_alarms(rollout, row)

    def _log_cost_of_paired_forward(self, row: Mapping[str, float]) -> None:
        """Log, once per run, the time of forwarding tokens only for measurements."""
        seconds = self._history.paired_cost(row)
        if seconds is not None and self._runtime.is_main:
            share, of_rollout = self._config.tracking.mismatch_share, seconds / row["time/total_s"]
            log.info(
                "the paired forward of %.3g of a mini-batch took %.3g s, %.1f %% of its rollout's time; "
                "tracking.mismatch_share makes it smaller, tracking.paired_routing_every rarer",
                share,
                seconds,
                100 * of_rollout,
            )

    def _raise_alarms(self, rollout: int, row: Mapping[str, float]) -> Alarm | None:
        """Log alarms and keep the rows that raised them; every rank finds the same."""
        mode = self._config.tracking.alarms
        found = self._history.check(row)
        if not found:
            return None
        rows, folder = self._history.rows, self._config.run.folder / "evidence"

        def write(run_folder: RunFolder) -> Path:
            run_folder.send_alarms(rollout, found)
            return write_alarms(folder, rollout, found, rows)

        file = self._on_main(write)
        number, texts = rollout + 1, "; ".join(f"{name}: {text}" for name, text in found.items())
        if mode == "stop":
            raise TrainingError(
                f"rollout {number}: {texts}. {file} holds the last rows. Resume an earlier checkpoint with "
                "other settings, or set tracking.alarms = 'log' to continue."
            )
        if self._runtime.is_main:
            log.warning("rollout %d: %s; see %s", number, texts, file)
        return Alarm(texts, self._history.good_until(found), file) if mode == "roll_back" else None

    def go_back_to(self, metrics_offset: int, rollout: int) -> None:
        """Truncate metrics.jsonl like `start_at`; keep the rows in `evidence/rolled_back_<rollout>.jsonl`."""
        kept = self._config.run.folder / "evidence" / f"rolled_back_rollout_{rollout:06d}.jsonl"
        self._on_main(lambda folder: folder.copy_rows(metrics_offset, kept))
        self.start_at(metrics_offset)

    def _refused_over_ranks(self, of_ranks: Iterable[Mapping[str, int]]) -> Counter[str]:
        """Return the number of refused responses by server, and log it if there are any."""
        refusals = sum(map(Counter[str], of_ranks), Counter[str]())
        if refusals and self._runtime.is_main:
            log.warning("responses that were refused, by server: %s", dict(refusals))
        return refusals

    def write_evaluation(
        self,
        rollout: int,
        scores: Mapping[str, Sequence[PromptScore]],
        refusals: Mapping[str, int],
        seconds: float,
    ) -> None:
        """Write the row of an evaluation and its responses, from each rank's share and seconds of every set."""
        duration = Metrics()
        duration.add_max("time/evaluation_s", seconds)
        of_ranks = self._runtime.all_gather((scores, refusals))
        merged, values = over_ranks([own for own, _ in of_ranks]), self._merge(duration)
        refused = self._refused_over_ranks(own for _, own in of_ranks)
        for each in evaluation_sets(self._config):
            of_set = each.metrics(merged[each.name], self._config.run.seed)
            values |= of_set
            file = responses_file(self.evaluations, each.name, rollout)
            self._on_main(lambda _, file=file: merge_responses(file, self._runtime.world_size))
            each.refuse_if_too_many_dropped(
                merged[each.name], self._config.rollout.max_dropped_fraction, refused
            )
            if self._runtime.is_main:
                score, low, high = (of_set[name] for name in each.metric_names[:3])
                name = each.metric_names[0]
                log.info("after %d rollouts: %s %.3f [%.3f, %.3f]", rollout, name, score, low, high)
        self._history.add_evaluation(values)
        self._on_main(lambda folder: folder.write_evaluation(rollout, values))

    def _merge(self, metrics: Metrics) -> dict[str, float]:
        return Metrics().merge(self._runtime.all_gather(metrics.state())).values()

    def _on_main(self, action: Callable[[RunFolder], T]) -> T:
        def run() -> T:
            assert self._folder is not None, "rank 0 holds the folder"
            return action(self._folder)

        return self._runtime.on_main(run)

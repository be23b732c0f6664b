"""Training state between gradient steps, and the point that a checkpoint stores of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.config.sections import is_due
from megatron_dppo.runtime.process import Runtime, Stopwatch
from megatron_dppo.types import DataCursor, OpenRollout, RunState, TrainBatch

_PLAIN = ("metrics_offset", "prompts_digest", "score", "config")  # same form in state.json


class TrainingState:
    """Counts finished rollouts and steps, and decides what is due. Equal on all ranks, except for the batches.

    Attributes:
        run_state: Numbers of finished rollouts and gradient steps, weight version and data cursor.
        open_rollout: Rollout that is being trained on; None between two rollouts.
        queue: Sampled rollouts that wait for training, in order; `rollout.lag` rollouts while one is open.
        steps: This rank's remaining gradient steps: the open rollout's first, then the waiting rollouts'.
        timer: Seconds of the phases of the current rollout.
    """

    def __init__(self, config: Config, runtime: Runtime) -> None:
        """Start at the first rollout; `restore` replaces the counters by a checkpoint's."""
        self._config, self._runtime = config, runtime
        self.run_state = RunState(0, 0, 0, {})
        self.open_rollout: OpenRollout | None = None
        self.queue: tuple[OpenRollout, ...] = ()
        self.steps: tuple[TrainBatch, ...] = ()
        self.timer = Stopwatch(runtime)

    @property
    def rollout(self) -> int:
        """Number of finished rollouts, which is the index of the current one."""
        return self.run_state.rollout

    @property
    def step(self) -> int:
        """Number of finished gradient steps, including skipped ones."""
        return self.run_state.step

    @property
    def weight_version(self) -> int:
        """Version of the engine's weights."""
        return self.run_state.weight_version

    @property
    def is_over(self) -> bool:
        """Whether all rollouts are finished."""
        return self.rollout >= self._config.run.num_rollouts

    @property
    def next_to_sample(self) -> int | None:
        """Index of the rollout that these weights sample next; None if `rollout.lag` + 1 rollouts exist.

        Rollouts beyond `run.num_rollouts` are not sampled.
        """
        number, options = self.rollout + len(self.queue), self._config
        last = min(self.rollout + options.rollout.staleness.num_waiting, options.run.num_rollouts - 1)
        return number if number <= last else None

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the current policy is due for an evaluation that has not run yet."""
        options = self._config.evaluation
        is_due = bool(options.used_sets) and (self.rollout % options.every == 0 or self.is_over)
        return is_due and self.run_state.last_evaluation != self.rollout

    @property
    def is_paired_forward_due(self) -> bool:
        """Whether this rollout's first mini-batch is forwarded both with live and with replayed routes."""
        return is_due(self._config.tracking.paired_routing_every, self.rollout)

    @property
    def lists_clipped_tokens(self) -> bool:
        """Whether the gradient steps of this rollout list their masked tokens."""
        return is_due(self._config.tracking.clipped_tokens_every, self.rollout)

    def restore(self, point: "RunPoint") -> None:
        """Continue from a checkpoint's state, including its open rollout's seconds."""
        self.run_state, self.open_rollout = point.state, point.opened
        self.queue, self.steps = point.queue, point.steps
        self._update()
        if point.opened is not None:
            self.timer = Stopwatch.resume(self._runtime, point.opened.seconds)

    def restart_timer(self) -> Stopwatch:
        """Start the timer of a new rollout, and return it."""
        self.timer = Stopwatch(self._runtime)
        return self.timer

    def queue_rollout(
        self, steps: Sequence[TrainBatch], metrics: Mapping[str, float], data_cursor: DataCursor
    ) -> None:
        """Queue a sampled rollout, and set the cursor for the next one."""
        self._update(data_cursor=data_cursor)
        self.queue = (*self.queue, OpenRollout(len(steps), metrics=metrics))
        self.steps = (*self.steps, *steps)

    def begin_rollout(self, steps: Sequence[TrainBatch]) -> None:
        """Open the oldest queued rollout with the gradient steps to take on it."""
        num_queued = self.queue[0].num_steps if self.queue else 0
        self.queue, self.steps = self.queue[1:], (*steps, *self.steps[num_queued:])
        self.open_rollout = OpenRollout(len(steps))

    def finish_step(self, is_skipped: bool) -> None:
        """Count a gradient step of the open rollout, and drop its batch."""
        opened = self.open_rollout
        assert opened is not None, "steps are taken on a rollout"
        skipped = self.run_state.skipped_in_a_row + 1 if is_skipped else 0
        self._update(step=self.step + 1, skipped_in_a_row=skipped)
        self.steps = self.steps[1:]
        self.open_rollout = replace(opened, num_steps=opened.num_steps - 1, num_done=opened.num_done + 1)

    def finish_rollout(self, weight_version: int) -> None:
        """Close the open rollout; the engine has weights of this version."""
        self._update(rollout=self.rollout + 1, weight_version=weight_version)
        num_left = 0 if self.open_rollout is None else self.open_rollout.num_steps
        self.open_rollout, self.steps = None, self.steps[num_left:]

    def finish_evaluation(self) -> None:
        """Record that the current policy was evaluated."""
        self._update(last_evaluation=self.rollout)

    def _update(self, **changes: Any) -> None:
        self.run_state = replace(self.run_state, **changes)
        self._runtime.progress.rollout, self._runtime.progress.step = self.rollout, self.step


@dataclass(frozen=True)
class RunPoint:
    """A point between gradient steps that a run can resume from."""

    state: RunState
    metrics_offset: int  # bytes of metrics.jsonl that belong to the steps taken
    prompts_digest: str  # of the prompts that the state's cursor points into
    opened: OpenRollout | None = None  # rollout that is partly trained on, if any
    score: float | None = None  # checkpoint.best_metric of these weights
    config: str = ""  # resolved config of the training, as TOML; "" if an older version saved it
    queue: tuple[OpenRollout, ...] = ()  # rollouts that wait to be trained on, in order
    steps: tuple[TrainBatch, ...] = ()  # this rank's, as in `TrainingState`

    @property
    def keeps_steps(self) -> bool:
        """Whether a rollout is open or waits, so that each rank saves gradient steps next to state.json."""
        return self.opened is not None or bool(self.queue)

    def to_json(self, layout: Layout) -> str:
        """Return the text of state.json: all fields except the steps, which differ between ranks."""
        opened = self.opened
        kept = None
        if opened is not None:
            kept = {
                "num_done": opened.num_done,
                "metrics": dict(opened.metrics),
                "seconds": dict(opened.seconds),
                "listed": dict(opened.listed),
            }
        content = {
            "state": asdict(self.state),
            **{name: getattr(self, name) for name in _PLAIN},
            "layout": asdict(layout),
            "open_rollout": kept,
            "queue": [{"num_steps": each.num_steps, "metrics": dict(each.metrics)} for each in self.queue],
        }
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, content: dict[str, Any], read_steps: Callable[[], Sequence[TrainBatch]]) -> "RunPoint":
        """Return the point that a state.json describes.

        Args:
            content: Content of the file; files of older versions have no queue.
            read_steps: Function that reads this rank's `steps`; called if there are saved steps.
        """
        kept, waiting = content["open_rollout"], content.get("queue", ())
        steps = tuple(read_steps()) if kept is not None or waiting else ()
        queue = tuple(OpenRollout(**each) for each in waiting)
        num_open = len(steps) - sum(each.num_steps for each in queue)
        opened = None if kept is None else OpenRollout(num_open, **kept)
        plain = {name: content[name] for name in _PLAIN if name in content}
        return cls(RunState(**content["state"]), opened=opened, queue=queue, steps=steps, **plain)

"""The point that a run can resume from, and its form in a checkpoint's state.json."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from megatron_dppo.architectures.layout import Layout
from megatron_dppo.types import OpenRollout, RunState, SampledRollout, TrainBatch


@dataclass(frozen=True)
class RunPoint:
    """A point between gradient steps that a run can resume from."""

    state: RunState
    metrics_offset: int  # bytes of metrics.jsonl that belong to the steps taken
    prompts_digest: str  # of the prompts that the state's cursor points into
    opened: OpenRollout | None = None  # rollout that is partly trained on, if any
    score: float | None = None  # checkpoint.best_metric of these weights
    config: str = ""  # resolved config of the training, as TOML; "" if an older version saved it
    queue: tuple[SampledRollout, ...] = ()  # rollouts that wait to be trained on, in order

    @property
    def keeps_steps(self) -> bool:
        """Whether a rollout is open or waits, so that each rank saves gradient steps next to state.json."""
        return self.opened is not None or bool(self.queue)

    @property
    def steps(self) -> tuple[TrainBatch, ...]:
        """This rank's remaining gradient steps: the open rollout's first, then the waiting rollouts'."""
        opened = () if self.opened is None else self.opened.steps
        return (*opened, *(step for sampled in self.queue for step in sampled.steps))

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
            "queue": [{"num_steps": len(each.steps), "metrics": dict(each.metrics)} for each in self.queue],
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
        steps = read_steps() if kept is not None or waiting else ()
        remaining, opened = iter(steps), None
        if kept is not None:
            num_waiting = sum(each["num_steps"] for each in waiting)
            opened = OpenRollout(tuple(islice(remaining, len(steps) - num_waiting)), **kept)
        queue = [
            SampledRollout(tuple(islice(remaining, each["num_steps"])), each["metrics"]) for each in waiting
        ]
        plain = {name: content[name] for name in _PLAIN if name in content}
        return cls(RunState(**content["state"]), opened=opened, queue=tuple(queue), **plain)


_PLAIN = ("metrics_offset", "prompts_digest", "score", "config")  # same form in state.json

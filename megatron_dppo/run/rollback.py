"""Rolls a run back to a checkpoint from before an alarm, and continues with the next prompts."""

import logging
from dataclasses import replace

from megatron_dppo.config.schema import Config
from megatron_dppo.errors import TrainingError
from megatron_dppo.run.checkpoint_policy import CheckpointPolicy
from megatron_dppo.run.logger import Alarm
from megatron_dppo.run.session import Session
from megatron_dppo.run.state import TrainingState

log = logging.getLogger(__name__)


class Rollback:
    """Returns to an earlier checkpoint, at most tracking.max_roll_backs times. All ranks call it together."""

    def __init__(
        self, config: Config, session: Session, state: TrainingState, checkpoints: CheckpointPolicy
    ) -> None:
        self._runtime, self._logger = session.runtime, session.logger
        self._state, self._checkpoints = state, checkpoints
        self._limit = config.tracking.max_roll_backs

    def go_back(self, alarm: Alarm) -> None:
        """Restore weights and counters from before the alarm, keep the data cursor, and save.

        The engine still has the abandoned weights, so the caller must push the restored ones.

        Raises:
            TrainingError: There is no checkpoint to return to, or the run was rolled back too often.
        """
        left = self._state.run_state
        here = f"rollout {left.rollout}: {alarm.text} (rows: {alarm.evidence})"
        if left.roll_backs >= self._limit:
            raise TrainingError(
                f"{here}. The run went back {left.roll_backs} times; expected at most "
                f"tracking.max_roll_backs = {self._limit}. Change the settings, and start again from a "
                "checkpoint."
            )
        point = self._checkpoints.load_earlier(alarm.good_until)
        if point is None:
            raise TrainingError(
                f"{here}. Found no checkpoint of at most {alarm.good_until} rollouts to go back to. Lower "
                "checkpoint.every, raise checkpoint.keep_last, or set tracking.alarms = 'log'."
            )
        self._logger.go_back_to(point.metrics_offset, left.rollout - 1)
        restored = replace(
            point.state,
            data_cursor=left.data_cursor,
            weight_version=left.weight_version + 1,
            roll_backs=left.roll_backs + 1,
        )
        self._state.restore(restored, None)
        self._checkpoints.save(point.score)  # otherwise a resume would repeat the same prompts
        if self._runtime.is_main:
            log.warning("went back to %d rollouts; the prompts continue from here", self._state.rollout)

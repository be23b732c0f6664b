"""The actor: a Megatron-Core policy, its optimizer, and the steps that train it."""

# Megatron has no stubs.
# pyright: reportMissingTypeStubs=false
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from jaxtyping import Float32, Int64
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_dppo.actor.forward import LossFunction, OutputHead, Part, View, run_microbatches
from megatron_dppo.actor.observation import Observer, Step
from megatron_dppo.actor.offload import TrainerMemory
from megatron_dppo.actor.optimizer import (
    bad_gradients,
    build_optimizer,
    build_schedule,
    take_step,
    wrap_for_data_parallelism,
)
from megatron_dppo.actor.router_losses import RouterLosses
from megatron_dppo.algorithms import Objective, preset
from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.architectures.layout import Layout
from megatron_dppo.architectures.megatron_options import RouterCoefficients, shares_prefixes
from megatron_dppo.architectures.parameters import model_shape
from megatron_dppo.architectures.registry import family_of, model_sizes, read_hf_config
from megatron_dppo.checkpoints.megatron_folder import load_weights
from megatron_dppo.checkpoints.megatron_weights import describe_hf_weights, export_hf_weights
from megatron_dppo.config.schema import Config
from megatron_dppo.data.batches.balance import SampleCost
from megatron_dppo.data.batches.exchange import DataParallel
from megatron_dppo.data.batches.packing import filled_up, measured_part, microbatches_of, placeholder
from megatron_dppo.data.batches.prefixes import RepeatedRows
from megatron_dppo.errors import ConfigError
from megatron_dppo.kernels.ops import kernels_for
from megatron_dppo.mcore import cpu, fixes
from megatron_dppo.mcore.groups import (
    initialize_groups,
    megatron_sizes,
    reports_its_tokens,
    sequence_parallel_rows,
    speaks_for_its_group,
    sum_over_tokens_and_stages,
)
from megatron_dppo.metrics.masked_tokens import TokenLists
from megatron_dppo.metrics.metrics import Metrics
from megatron_dppo.metrics.step_metrics import add_agreement, add_bound_of_responses, add_mismatch
from megatron_dppo.models.build import agreed_layer_spec, build_model, transformer_config
from megatron_dppo.models.lora import add_lora
from megatron_dppo.routing_replay.replay import Replay, recording, replaying
from megatron_dppo.runtime.process import Runtime
from megatron_dppo.types import Microbatch, ModelRouting, TrainBatch

logger = logging.getLogger(__name__)


class Actor:
    """Owns the Megatron process groups, the model, the optimizer and its schedule, for the life of a run."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        """Build the model and load its weights."""
        kernels_for(runtime.device.type)  # may compile them: not after minutes of loading
        runtime.gpu_ledger.acquire("trainer")
        cpu.install()
        fixes.apply()
        self._config, self._runtime = config, runtime
        overrides = overrides_in(config.algorithm.model_dump())
        self.objective: Objective = preset(config.algorithm.preset, **overrides)
        self.layout = Layout.of(config.parallel, runtime.world_size)
        initialize_groups(self.layout, config.run.seed, config.run.timeout_s)
        own_group = cast(int, parallel_state.get_data_parallel_rank())
        self.data_parallel_groups: tuple[int, ...] = tuple(runtime.all_gather(own_group))
        self.hf = read_hf_config(config.model.load)
        self.hf_table = family_of(self.hf).weight_table(self.hf)
        dtype, sizes = getattr(torch, config.model.dtype), model_sizes(self.hf)
        spec = agreed_layer_spec(config, runtime, sizes)
        self.shares_prefixes = shares_prefixes(config, sizes, spec)
        parts = megatron_sizes(self.layout)
        self._model_config = transformer_config(self.hf, dtype, parts, config.megatron, spec)
        chunks = build_model(self.hf, self._model_config, spec)
        self.chunks: list[GPTModel] = [chunk.to(runtime.device) for chunk in chunks]
        load_weights(self.chunks, config.model.load, self.hf)
        if config.lora.rank:
            add_lora(self.chunks, self.hf, config.lora, config.run.seed)
        self._router_losses = RouterLosses(self.chunks, RouterCoefficients.of(config.megatron))
        num_topk = config.rollout.num_topk_log_probs
        self._observer = Observer(self.objective, config.tracking, num_topk_log_probs=num_topk)
        self._head = OutputHead(
            self.chunks,
            self.objective,
            config.algorithm,
            temperature=config.rollout.temperature,
            vocab_size=self.hf["vocab_size"],
            reported_topk=self._observer.topk_columns,
        )
        self._ddp = wrap_for_data_parallelism(self.chunks, self._model_config, config)
        self.optimizer: Any = build_optimizer(self._ddp, config.optimizer, dtype)
        self.memory = TrainerMemory(
            self.chunks,
            self.optimizer,
            runtime.device,
            is_offloading=config.optimizer.offload,
            ledger=runtime.gpu_ledger,
        )
        self.restart_schedule(num_done=0)
        self._model_config.grad_scale_func = self.optimizer.scale_loss

    @property
    def is_optimizer_distributed(self) -> bool:
        """Whether optimizer states are sharded over data-parallel ranks."""
        return self._config.optimizer.distributed

    @property
    def data_parallel(self) -> DataParallel:
        """Data-parallel groups of the job, and the cost of a sample."""
        cost = SampleCost.of_model(model_shape(self.hf))
        return DataParallel(self.data_parallel_groups, self._runtime, cost)

    @property
    def routing(self) -> ModelRouting | None:
        """Dimensions of this model's routes; None for a dense model."""
        return model_sizes(self.hf).routing

    @property
    def captured_routing(self) -> ModelRouting | None:
        """Dimensions of the samples' routes; None if routes are not captured."""
        return self.routing if self._config.rollout.routing_replay != "off" else None

    def restart_schedule(self, num_done: int) -> None:
        """Set the learning rate to its value after `num_done` gradient steps."""
        horizon = self._config.num_gradient_steps
        self._schedule = build_schedule(self.optimizer, self._config.optimizer, horizon, num_done=num_done)

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights in Hugging Face names, or this pipeline stage's; see `export_hf_weights`.

        If the trainer is offloaded, they come from the host, one parameter at a time.
        """
        if not self.memory.is_away:
            self.complete_parameters()
        return export_hf_weights(
            self.chunks, self.hf_table, of_own_stage=of_own_stage, max_bytes=max_bytes, read=self.memory.read
        )

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, Tensor]:
        """Return the tensors of `weights` without data; every rank must call it."""
        return describe_hf_weights(self.chunks, self.hf_table, of_own_stage=of_own_stage)

    @property
    def pipeline_place(self) -> tuple[int, int, bool]:
        """This rank's pipeline stage, the number of stages, and whether it is its stage's first rank."""
        stage = cast(int, parallel_state.get_pipeline_model_parallel_rank())
        stages = self._runtime.all_gather(stage)
        return stage, self.layout.pipeline, stages.index(stage) == self._runtime.rank

    def complete_parameters(self) -> None:
        """Wait until this rank has the parameters that others updated; forward passes do so by themselves."""
        for chunk in self._ddp:
            wrapped: Any = chunk
            if wrapped.ddp_config.overlap_param_gather:
                wrapped.start_param_sync(force_sync=True)

    def train_step(
        self,
        batch: TrainBatch,
        *,
        is_first: bool,
        weight_version: int | None = None,
        lists_clipped: bool = False,
    ) -> Step:
        """Take one gradient step; skip it on every rank if any rank's loss or gradient is not finite.

        Args:
            batch: This rank's micro-batches; every rank has the same number of them.
            is_first: The weights are still those that the rollout sampled with: measure the mismatch of the
                engines and the agreement of the routers, which later steps would mix with learning.
            weight_version: Version of these weights; enables mismatch metrics per staleness.
            lists_clipped: List the tokens that each mask drops.
        """
        step = self.accumulate_gradients(
            batch, is_first=is_first, weight_version=weight_version, lists_clipped=lists_clipped
        )
        metrics = step.metrics
        metrics.add_max("optimizer/lr", self.optimizer.param_groups[0]["lr"])
        faults = [*step.faults, *bad_gradients(self._ddp)]
        is_skipped = self._runtime.any(bool(faults))
        if not is_skipped:
            with self.memory.states_here():
                grad_norm, fault = take_step(self.optimizer)
            faults += [fault] if fault is not None else []
            is_skipped = grad_norm is None
            if grad_norm is not None:
                metrics.add_max("optimizer/grad_norm", grad_norm)
                self._router_losses.move_biases()
        metrics.add_max("optimizer/skipped_steps", float(is_skipped))
        self._schedule.step(1)
        return replace(step, faults=tuple(faults), is_skipped=is_skipped)

    def accumulate_gradients(
        self,
        batch: TrainBatch,
        *,
        is_first: bool,
        weight_version: int | None = None,
        lists_clipped: bool = False,
    ) -> Step:
        """Run forward and backward of every micro-batch, and average gradients over all learning tokens."""
        metrics, faults, lists = Metrics(), list[str](), TokenLists() if lists_clipped else None
        for chunk in self._ddp:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss(
            output: Tensor, microbatch: Microbatch, rows: RepeatedRows | None
        ) -> tuple[Tensor, Tensor, dict[str, Any]]:
            num_tokens = microbatch.loss_mask.sum().int()
            try:
                out = self._head.policy_loss(output, microbatch, rows)
            except ConfigError as error:  # the config was checked: these are values that no loss may be made of
                faults.append(str(error))
                return self._head.nothing(output), num_tokens, {}
            if not bool(out.loss_sum.isfinite()):
                faults.append(f"loss: found {float(out.loss_sum)} over {int(num_tokens)} tokens")
            if reports_its_tokens():
                self._observer.observe(
                    metrics, out, microbatch, is_first=is_first, weight_version=weight_version, lists=lists
                )
            return out.loss_sum, num_tokens, {}

        is_replaying = self._config.replays_routes
        is_measuring = is_first and self._config.rollout.routing_replay != "off"
        with self._routes(is_replaying, is_measuring) as replay, self._router_losses.added(batch):
            self._run(batch.microbatches, loss, replay)
        self._router_losses.add_metrics(metrics, batch.num_loss_tokens * self._runtime.is_main)
        if speaks_for_its_group():
            add_bound_of_responses(metrics, batch.microbatches)
        if lists is not None:
            lists.masked.read_around(batch.microbatches)
        if is_measuring and replay is not None:
            add_agreement(metrics, replay.agreement())
        return Step(metrics, tuple(faults), lists=lists)

    def with_old_log_probs(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with log-probs of the current weights, forwarded for "recomputed" anchors only."""
        if self._config.algorithm.replay_recomputed_routes:
            return self.with_recorded(batch)
        is_replaying = self._config.replays_routes
        return batch.with_column("old_log_probs", self.forward_log_probs(batch.microbatches, is_replaying))

    def with_recorded(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with log-probs of the current weights and the routes of that forward: R2."""
        assert self.routing is not None, "the checks require experts"
        with torch.no_grad(), recording(self.chunks, self.routing) as recorded:
            columns, views = self._forward_columns(batch.microbatches, None)
        device, of_batch = self._runtime.device, views[: len(columns)]
        routes = [each.recorded_routes(recorded, index, device) for index, each in enumerate(of_batch)]
        with_routes = batch.with_column("routed_experts", routes)
        return with_routes.with_column("old_log_probs", [values[:, 0] for values in columns])

    def paired_mismatch(self, batch: TrainBatch) -> Metrics:
        """Measure the mismatch of the same tokens with live routes and with the rollout's: R3's effect.

        Only samples that are to be measured are forwarded.
        """
        metrics, filler = Metrics(), placeholder(0, self.routing)
        microbatches = [measured_part(m, filler) for m in batch.microbatches]
        for prefix, is_replaying in (("mismatch_live", False), ("mismatch_replayed", True)):
            log_probs = self.forward_log_probs(microbatches, is_replaying)
            if speaks_for_its_group():
                for m, values in zip(microbatches, log_probs, strict=True):
                    add_mismatch(metrics, values, m.rollout_log_probs, m.loss_mask, prefix=prefix)
        return metrics

    def log_probs(self, sequences: Sequence[Int64[Tensor, " L"]]) -> list[Float32[Tensor, " L-1"]]:
        """Return the log-probs of each token given the tokens before it, at temperature 1, with live routes.

        The sequences are the same on every rank, and have more than one token. The result is on every CPU.
        """
        microbatches = microbatches_of(sequences, self._config.parallel.max_tokens_per_microbatch)
        with torch.no_grad():
            columns, _ = self._forward_columns(microbatches, None, temperature=1.0)
        is_scored = torch.cat([microbatch.loss_mask for microbatch in microbatches])
        return list(torch.split(torch.cat(columns)[is_scored, 0], [len(tokens) - 1 for tokens in sequences]))

    def token_log_probs(
        self, batch: TrainBatch, metrics: Metrics, *, is_replaying: bool, has_score_norms: bool = False
    ) -> list[Float32[Tensor, "T columns"]]:
        """Return the current weights' log-probs of the tokens of each micro-batch, without gradient.

        Args:
            batch: This rank's micro-batches; every rank calls this with the same number of them.
            metrics: Gets `routing/agreement_*` of this rank's live routers with the rollout's, where
                rollout.routing_replay captures routes.
            is_replaying: Use the rollout's experts.
            has_score_norms: Append a column, the norms of `OutputHead.log_probs`.

        Returns:
            [T, 1 + K] float32 for each complete micro-batch, on the CPU: log pi of the target, 0 outside the
            loss mask; then log pi of the rollout's K most probable tokens, -inf for absent ones.
        """
        is_measuring = self._config.rollout.routing_replay != "off"
        with torch.no_grad(), self._routes(is_replaying, is_measuring) as replay:
            columns, _ = self._forward_columns(
                batch.microbatches, replay, has_topk=True, has_score_norms=has_score_norms
            )
        if is_measuring and replay is not None:
            add_agreement(metrics, replay.agreement())
        return columns

    def forward_log_probs(
        self, microbatches: Sequence[Microbatch], is_replaying: bool
    ) -> list[Float32[Tensor, " T"]]:
        """Return log pi(target) of each complete micro-batch, without gradient, on every rank's CPU."""
        with torch.no_grad(), self._routes(is_replaying, is_measuring=False) as replay:
            return [columns[:, 0] for columns in self._forward_columns(microbatches, replay)[0]]

    def _forward_columns(
        self,
        microbatches: Sequence[Microbatch],
        replay: Replay | None,
        *,
        has_topk: bool = False,
        has_score_norms: bool = False,
        temperature: float | None = None,
    ) -> tuple[list[Tensor], list[View]]:
        """Return the result of `token_log_probs`, of which no Top-K is K = 0, and what this rank forwarded."""
        collected: list[Tensor] = []

        def keep(
            output: Tensor, microbatch: Microbatch, rows: RepeatedRows | None
        ) -> tuple[Tensor, Tensor, dict[str, Any]]:
            found = self._head.log_probs(
                output,
                microbatch,
                rows,
                has_topk=has_topk,
                has_score_norms=has_score_norms,
                temperature=temperature,
            )
            collected.append(found.columns)
            return found.log_probs.sum(), microbatch.loss_mask.sum().int(), {}

        views = self._run(microbatches, keep, replay, forward_only=True)
        whole: list[Tensor] = []
        for index, m in enumerate(microbatches):
            num_topk = m.topk.ids.shape[1] if has_topk and m.topk is not None else 0
            values = torch.zeros((m.tokens.numel(), 1 + num_topk + has_score_norms))
            if collected:
                values = views[index].of_tokens(collected[index].cpu())
                values[~m.loss_mask, 1 : 1 + num_topk] = -torch.inf  # rows of the loss may be missing there
            whole.append(sum_over_tokens_and_stages(values.to(self._runtime.device)).cpu())
        return whole, views

    def _routes(self, is_replaying: bool, is_measuring: bool) -> AbstractContextManager[Replay | None]:
        routes = replaying(self.chunks, is_replaying=is_replaying, is_measuring=is_measuring)
        return routes if is_replaying or is_measuring else nullcontext()

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        loss: LossFunction,
        replay: Replay | None,
        *,
        forward_only: bool = False,
    ) -> list[View]:
        """Run the micro-batches, and return what this rank forwarded of each."""
        assert not self.memory.is_away, "the trainer computes when it is on its GPU"

        def follow(chunk: int, part: Part) -> None:
            self._router_losses.follow(part, chunk)
            if replay is not None:
                view, tokens, scored = part
                routes, counted = tokens.routed_experts, view.num_learning(scored)
                assert routes is not None, "the checks require routes for replay"
                rows = sequence_parallel_rows(counted.numel())
                replay.follow(replace(routes, indices=routes.indices[rows]), counted[rows], chunk)

        # interleaving needs a multiple of the number of stages
        multiple = self.layout.pipeline if self.layout.virtual_pipeline > 1 else 1
        complete = filled_up(microbatches, multiple, self.routing, self._observer.reads_places)
        parts = [View.of(m, self.shares_prefixes) for m in complete]
        run_microbatches(
            self._ddp,
            parts,
            loss,
            device=self._runtime.device,
            before_forward=follow,
            forward_only=forward_only,
        )
        return [view for view, _, _ in parts]

"""The policy being trained: a Megatron-Core model, its optimizer, and the steps that change it."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_dppo.actor import cpu, mcore_fixes
from megatron_dppo.actor.forward import packed_logits, run_microbatches, to_device
from megatron_dppo.actor.layout import Layout
from megatron_dppo.actor.optimizer import build_optimizer, build_schedule
from megatron_dppo.algorithms import Objective, PolicyLossOutput, preset
from megatron_dppo.config.schema import Config
from megatron_dppo.diagnostics.metrics import Metrics
from megatron_dppo.diagnostics.mismatch import add_entropy, add_mismatch, add_trust_region
from megatron_dppo.errors import ConfigError
from megatron_dppo.kernels.reference import TokenLogProbs, policy_loss_from_logits, token_log_probs
from megatron_dppo.models.build import build_model, transformer_config
from megatron_dppo.models.convert import export_hf_weights
from megatron_dppo.models.family import read_hf_config
from megatron_dppo.models.megatron_checkpoint import load_weights
from megatron_dppo.routing_replay.replay import Replay, replaying
from megatron_dppo.runtime import Runtime
from megatron_dppo.types import Microbatch, ModelRouting, TrainBatch

logger = logging.getLogger(__name__)


class Actor:
    """Owns the Megatron process groups, the model, the optimizer and its schedule, for the life of a run."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        """Build the model and load its weights.

        Raises:
            LayoutError: The processes do not divide over `[parallel]`.
            ConversionError: The checkpoint does not hold the model that its config.json describes.
        """
        cpu.install()
        mcore_fixes.apply()
        self._config, self._runtime = config, runtime
        self.objective: Objective = preset(config.algorithm.preset, **config.algorithm.objective_overrides())
        self.layout = Layout.of(config.parallel, runtime.world_size)
        initialize_groups(self.layout, config.run.seed, config.run.timeout_s)
        self.hf = read_hf_config(config.model.load)
        dtype = getattr(torch, config.model.dtype)
        self._model_config = transformer_config(self.hf, dtype, megatron_sizes(self.layout), config.megatron)
        self.model: GPTModel = build_model(self.hf, self._model_config).to(runtime.device)
        load_weights(self.model, config.model.load, self.hf)
        module = Float16Module(self._model_config, self.model) if dtype == torch.bfloat16 else self.model
        self._ddp = DistributedDataParallel(
            self._model_config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=config.optimizer.distributed
            ),
            module,
        )
        self.optimizer: Any = build_optimizer(self._ddp, config.optimizer, dtype)
        self.restart_schedule(num_done=0)
        self._model_config.finalize_model_grads_func = finalize_model_grads
        self._model_config.grad_scale_func = self.optimizer.scale_loss

    @property
    def data_parallel_share(self) -> tuple[int, int]:
        """(rank, size): which share of the prompts this rank rolls out and trains on, of how many."""
        return parallel_state.get_data_parallel_rank(), self.layout.data

    @property
    def routing(self) -> ModelRouting | None:
        """What routes of this model look like; none for a dense model."""
        experts = self._model_config.num_moe_experts
        if experts is None:
            return None
        frequency = self._model_config.moe_layer_freq
        layers = range(self._model_config.num_layers)
        sparse = layers if isinstance(frequency, int) else (i for i in layers if frequency[i])
        return ModelRouting(tuple(sparse), experts, self._model_config.moe_router_topk)

    def restart_schedule(self, num_done: int) -> None:
        """Set the learning rate to where it stands after so many gradient steps."""
        options, horizon = self._config.optimizer, self._config.num_gradient_steps
        self._schedule = build_schedule(self.optimizer, options, horizon, num_done=num_done)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights in Hugging Face names; every rank must iterate."""
        return export_hf_weights(self.model, self.hf)

    def train_step(self, batch: TrainBatch, *, is_first: bool) -> "Step":
        """One gradient step; skipped, on every rank, where a loss or a gradient is not finite on any.

        Args:
            batch: This rank's micro-batches; as many on every rank.
            is_first: The weights are still those that the rollout sampled with: measure the mismatch of the
                engines and the agreement of the routers, which later steps would mix with learning.
        """
        step = self.accumulate_gradients(batch, is_first=is_first)
        metrics = step.metrics
        metrics.add_max("optimizer/lr", self.optimizer.param_groups[0]["lr"])
        faults = [*step.faults, *bad_gradients(self.model, self._ddp)]
        is_skipped = self._runtime.any(bool(faults))
        if not is_skipped:
            is_updated, grad_norm, _ = self.optimizer.step()
            is_skipped = not is_updated
            metrics.add_max("optimizer/grad_norm", float(grad_norm))
        metrics.add_max("optimizer/skipped_steps", float(is_skipped))
        self._schedule.step(1)
        return Step(metrics, tuple(faults), is_skipped)

    def accumulate_gradients(self, batch: TrainBatch, *, is_first: bool) -> "Step":
        """Forward and backward of every micro-batch; gradients are then averaged over all learning tokens."""
        metrics, faults = Metrics(), list[str]()
        self._ddp.train()
        self._ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss(logits: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor, dict[str, Any]]:
            temperature = self._config.rollout.temperature
            num_tokens = microbatch.loss_mask.sum().int()
            try:
                out, statistics = policy_loss_from_logits(logits, microbatch, self.objective, temperature)
            except ConfigError as error:  # the config was checked: these are values that no loss may be made of
                faults.append(str(error))
                return logits.sum() * 0.0, num_tokens, {}
            if not bool(out.loss_sum.isfinite()):
                faults.append(f"loss: found {float(out.loss_sum)} over {int(num_tokens)} tokens")
            _observe(metrics, out, statistics, microbatch, is_first)
            return out.loss_sum, num_tokens, {}

        replay_mode = self._config.rollout.routing_replay
        is_measuring = is_first and replay_mode != "off"
        with self._routes(replay_mode == "replay", is_measuring) as replay:
            self._run(batch.microbatches, loss, replay)
        if is_measuring and replay is not None:
            for layer, (total, count) in replay.agreement().items():
                metrics.add_mean(f"routing/agreement_layer_{layer}", total, count)
                metrics.add_mean("routing/agreement_mean", total, count)
        return Step(metrics, tuple(faults))

    def with_old_log_probs(self, batch: TrainBatch) -> TrainBatch:
        """The batch with log-probs of the current weights: one more forward, for "recomputed" anchors only."""
        is_replaying = self._config.rollout.routing_replay == "replay"
        log_probs = self._forward_log_probs(batch.microbatches, is_replaying)
        pairs = zip(batch.microbatches, log_probs, strict=True)
        return replace(batch, microbatches=tuple(replace(m, old_log_probs=old) for m, old in pairs))

    def paired_mismatch(self, batch: TrainBatch) -> Metrics:
        """Mismatch on the same tokens with live routes and with the rollout's: what R3 changes, noise apart."""
        metrics = Metrics()
        for prefix, is_replaying in (("mismatch_live", False), ("mismatch_replayed", True)):
            log_probs = self._forward_log_probs(batch.microbatches, is_replaying)
            for microbatch, values in zip(batch.microbatches, log_probs, strict=True):
                add_mismatch(metrics, values, microbatch.rollout_log_probs, microbatch.loss_mask, prefix=prefix)
        return metrics

    def _forward_log_probs(self, microbatches: Sequence[Microbatch], is_replaying: bool) -> list[Tensor]:
        """[T] log pi(target) of each micro-batch, without gradient, on the CPU."""
        collected: list[Tensor] = []

        def keep(logits: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor, dict[str, Any]]:
            values = token_log_probs(logits, microbatch.targets, self._config.rollout.temperature).log_probs
            collected.append(values.cpu())
            return values.sum(), microbatch.loss_mask.sum().int(), {}

        with torch.no_grad(), self._routes(is_replaying, is_measuring=False) as replay:
            self._run(microbatches, keep, replay, forward_only=True)
        return collected

    def _routes(self, is_replaying: bool, is_measuring: bool) -> AbstractContextManager[Replay | None]:
        if not (is_replaying or is_measuring):
            return nullcontext()
        return replaying(self.model, is_replaying, is_measuring)

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        loss: Any,
        replay: Replay | None,
        *,
        forward_only: bool = False,
    ) -> None:
        def follow(microbatch: Microbatch) -> None:
            if replay is not None:
                assert microbatch.routed_experts is not None, "checks.py asks for routes where they are used"
                replay.follow(microbatch.routed_experts, microbatch.loss_mask)

        on_device = [to_device(m, self._runtime.device) for m in microbatches]
        run_microbatches(self._ddp, on_device, loss, before_forward=follow, forward_only=forward_only)

    def logits(self, microbatch: Microbatch) -> Tensor:
        """[T, V] of one micro-batch, without gradient and with live routes."""
        with torch.no_grad():
            return packed_logits(self._ddp, to_device(microbatch, self._runtime.device))

    def main_gradients(self) -> list[Tensor]:
        """The accumulated gradient of each parameter, in their order.

        With the distributed optimizer a rank holds only its own shard of the reduced gradients.
        """
        return [parameter.main_grad for parameter in self.model.parameters()]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Step:
    """What one gradient step came to on this rank."""

    metrics: Metrics
    faults: tuple[str, ...] = ()  # values of this rank that were not finite, in words
    is_skipped: bool = False  # the weights were left as they were, on every rank


def bad_gradients(model: torch.nn.Module, ddp: DistributedDataParallel) -> list[str]:
    """What is not finite among this rank's gradients, in words; one pass over them where all are."""
    wrapped: Any = ddp
    buffers = [*wrapped.buffers, *wrapped.expert_parallel_buffers]
    if all(bool(torch.linalg.vector_norm(b.grad_data, ord=torch.inf).isfinite()) for b in buffers):
        return []
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    names = [name for name, parameter in parameters if not bool(parameter.main_grad.isfinite().all())]
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return [f"gradient: not finite in {len(names)} tensors ({shown})"]


def _observe(
    metrics: Metrics, out: PolicyLossOutput, statistics: TokenLogProbs, microbatch: Microbatch, is_first: bool
) -> None:
    metrics.add_mean("loss/policy", out.loss_sum.detach(), microbatch.num_loss_tokens)
    add_trust_region(metrics, out.metrics)
    add_entropy(metrics, statistics.entropy, microbatch.loss_mask)
    if is_first:
        add_mismatch(metrics, statistics.log_probs, microbatch.rollout_log_probs, microbatch.loss_mask)


def megatron_sizes(layout: Layout) -> dict[str, Any]:
    """The layout in TransformerConfig's words."""
    return dict(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.tensor > 1,
    )


def initialize_groups(layout: Layout, seed: int, timeout_s: float = 1800.0) -> None:
    """Megatron's process groups and random-number tracker, made anew; collectives wait `timeout_s` at most."""
    timeout_minutes: Any = timeout_s / 60  # annotated as int, and given to timedelta as it is
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=timeout_minutes,
    )
    model_parallel_cuda_manual_seed(seed + 1)

"""Builds the weight sync for a run's engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from megatron_dppo.architectures.published_names import SCALES, in_published_stacks
from megatron_dppo.architectures.registry import family_of, read_hf_config
from megatron_dppo.architectures.sizes import HFConfig
from megatron_dppo.architectures.weight_map import EMBEDDING, OUTPUT
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.checkpoints.megatron_folder import hf_files
from megatron_dppo.config.schema import Config
from megatron_dppo.engines.base import RolloutEngine
from megatron_dppo.engines.sglang.engine import SglangEngine
from megatron_dppo.engines.sglang.model import has_own_output, served_model
from megatron_dppo.engines.sglang.options import nccl_settings
from megatron_dppo.engines.sglang.quantization import served_folder, served_form
from megatron_dppo.engines.sglang.records import NCCL, api_key, read_records
from megatron_dppo.engines.weight_sync.broadcast import DistributedTransport, StagePlace
from megatron_dppo.engines.weight_sync.fleet import RunServers
from megatron_dppo.engines.weight_sync.probe import Limits, Probe, require_temperature
from megatron_dppo.engines.weight_sync.syncs import InProcessSync, SglangSync, WeightOwner, WeightSync
from megatron_dppo.engines.weight_sync.transports import DiskTransport, TensorTransport, Transport
from megatron_dppo.errors import WeightSyncError
from megatron_dppo.runtime.process import Runtime

__all__ = ["WeightSync", "build_sync", "build_transport", "release_servers", "require_cover", "served_dtype"]


def build_sync(config: Config, owner: WeightOwner, engine: RolloutEngine, runtime: Runtime) -> WeightSync:
    """Build the sync from the owner of the weights to the engine; all ranks call it together."""
    if not isinstance(engine, SglangEngine):
        return InProcessSync(owner.weights, engine, runtime)
    options, folder, key = config.rollout.sglang, hf_files(config.model.load), api_key()
    require_cover(owner.describe_weights(), folder)
    owner = as_served(config, owner)
    model = served_model(folder, ())
    probe = require_sampling = None
    if options.probe_every:
        require_sampling = partial(
            require_temperature, model=model, api_key=key, timeout_s=options.sync_timeout_s
        )
    if options.probe_every and owner.log_probs is not None:
        probe = Probe(
            owner.log_probs,
            model,
            runtime,
            limits=Limits.of(served_dtype(config)),
            seed=config.run.seed,
            api_key=key,
            timeout_s=options.sync_timeout_s,
        )
    transport, servers = build_transport(config, owner, runtime), run_servers(config, runtime)
    return SglangSync(
        transport,
        engine,
        servers,
        runtime,
        probe=probe,
        probe_every=max(options.probe_every, 1),
        require_sampling=require_sampling,
    )


def run_servers(config: Config, runtime: Runtime) -> RunServers:
    """Return the run's SGLang servers, which need not be ready yet."""
    folder, nccl = config.run.folder / "servers", nccl_settings(config)
    if nccl and (version := runtime.nccl_version) is not None:
        nccl |= {NCCL: version}
    return RunServers(
        partial(read_records, folder),
        runtime,
        folder / "released",
        timeout_s=config.rollout.sglang.sync_timeout_s,
        api_key=api_key(),
        nccl=nccl,
    )


def release_servers(config: Config, runtime: Runtime) -> None:
    """Begin the GPU ledger, and let servers that take turns with the trainer release their memory."""
    runtime.gpu_ledger.begin(takes_turns=config.rollout.colocated)
    if config.rollout.engine == "sglang" and runtime.gpu_ledger.takes_turns:
        run_servers(config, runtime).release()


def served_dtype(config: Config) -> str:
    """Return the dtype that servers compute in."""
    dtype = config.sglang.get("dtype", "auto")
    is_quantised = served_form(config) is not None
    return "bfloat16" if is_quantised else config.model.dtype if dtype == "auto" else str(dtype)


def build_transport(config: Config, owner: WeightOwner, runtime: Runtime) -> Transport:
    """Build the transport of rollout.sglang.weight_sync; all ranks call it together.

    One half of rollout.sglang.sync_bucket_bytes is for the buffer, the other half for gathering its tensors. No
    half is larger than the weights.
    """
    options = config.rollout.sglang
    described = owner.describe_weights(of_own_stage=options.weight_sync == "distributed")
    half = min(options.sync_bucket_bytes // 2, sum(tensor.nbytes for tensor in described.values()))
    if options.weight_sync == "disk":
        folder, template = config.run.folder / "weights", served_folder(config)
        return DiskTransport(partial(owner.weights, max_bytes=half), runtime, folder, template, half)
    hf = read_hf_config(config.model.load)
    together = travelling_together(hf)
    if options.weight_sync == "tensor":
        return TensorTransport(partial(owner.weights, max_bytes=half), len(described), runtime, half, together)
    return DistributedTransport(
        partial(owner.weights, of_own_stage=True, max_bytes=half),
        len(described),
        StagePlace(*owner.pipeline_place),
        runtime,
        bucket_bytes=half,
        timeout_s=options.sync_timeout_s,
        together=together,
    )


def require_cover(described: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse weights whose names differ from the names of the checkpoint in `folder`, before any is sent.

    If the folder has no weights, there is nothing to compare, and the names of the weight map are trusted.
    """
    if not any(folder.glob("*.safetensors")):
        return
    expected = HFWeights(folder).names - ({OUTPUT.hf[0]} - set(described))  # of a tied model, a copy
    missing, extra = sorted(expected - set(described)), sorted(set(described) - expected)
    if missing or extra:
        raise WeightSyncError(
            f"{folder}: found {len(missing)} tensors that the trainer does not send (first: {missing[:3]}) and "
            f"{len(extra)} that it sends in addition (first: {extra[:3]}); expected the same tensors. Servers "
            "keep old weights that are not sent, without an error: correct architectures/weight_map.py."
        )


def travelling_together(hf: HFConfig) -> dict[str, str]:
    """Map each tensor that must share a bucket with others to its group's name; scales travel as weights do."""
    together = family_of(hf).travelling_together(hf)
    return together | {name + SCALES: f"scales of {group}" for name, group in together.items()}


def as_served(config: Config, owner: WeightOwner) -> WeightOwner:
    """Return the owner of the tensors that servers load, under their names, and as 8-bit floats if they are."""
    owner, form = with_served_names(owner, read_hf_config(config.model.load)), served_form(config)
    return owner if form is None else ChangedWeights(owner, form.quantized)


def with_served_names(owner: WeightOwner, hf: HFConfig) -> WeightOwner:
    """Return the owner of the tensors that SGLang's model class loads: stacked experts, an own output layer.

    SGLang builds an output layer for some architectures even if config.json ties it to the embedding
    (`SglangFacts.has_own_output`), and no checkpoint of such a model fills it.
    """
    family = family_of(hf)
    if family.has_interleaved_stacks:
        num_experts = family.sizes_of(hf).num_experts or 0
        owner = ChangedWeights(owner, lambda weights: in_published_stacks(weights, num_experts))
    if has_own_output(hf):
        owner = ChangedWeights(owner, with_own_output)
    return owner


(_EMBEDDING,), (_OUTPUT,) = EMBEDDING.hf, OUTPUT.hf


def with_own_output(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a tied model, and the embedding again as the output layer."""
    for name, tensor in weights:
        yield name, tensor
        if name == _EMBEDDING:
            yield _OUTPUT, tensor


class ChangedWeights:
    """Weights that a function changes on their way to servers; implements `WeightOwner`."""

    def __init__(
        self,
        owner: WeightOwner,
        change: Callable[[Iterable[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]],
    ) -> None:
        """Store the owner of the weights, and the function, which also gets tensors without data."""
        self._owner, self._change = owner, change

    def weights(
        self, *, of_own_stage: bool = False, max_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Return the owner's weights, changed; the owner is called at once, as all ranks call it together."""
        return self._change(self._owner.weights(of_own_stage=of_own_stage, max_bytes=max_bytes))

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, Tensor]:
        """Return the tensors of `weights`, without data."""
        return dict(self._change(self._owner.describe_weights(of_own_stage=of_own_stage).items()))

    @property
    def pipeline_place(self) -> tuple[int, int, bool]:
        """See `WeightOwner.pipeline_place`."""
        return self._owner.pipeline_place

    @property
    def log_probs(self) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        """See `WeightOwner.log_probs`."""
        return self._owner.log_probs

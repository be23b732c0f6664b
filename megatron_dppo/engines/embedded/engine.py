"""The embedded engine: a transformers model in this process, with its own weights, dtype and arithmetic."""

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from megatron_dppo.architectures.published_names import STACKS
from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.checkpoints.weight_formats import BLOCK, WeightFormat, is_linear, round_linears
from megatron_dppo.config.rollout import EnginePrecision
from megatron_dppo.engines.base import (
    EngineCounts,
    Request,
    SamplingParams,
    Session,
    input_tokens,
    num_tokens_left,
)
from megatron_dppo.engines.batch_session import batch_session
from megatron_dppo.engines.embedded.continuous_batch import ContinuousBatch
from megatron_dppo.engines.embedded.slot_decoder import SlotDecoder
from megatron_dppo.errors import RolloutError, WeightSyncError
from megatron_dppo.types import Sample

_FORMATS: dict[str, WeightFormat] = {"modelopt_fp8": "fp8", "modelopt_nvfp4": "nvfp4"}
_BLOCK = 2**14  # words of 4 bytes; a block and its products fit into a core's cache


class WeightChecksum:
    """Digest of a stream of named tensors; depends on names, dtypes, shapes, bytes and their order.

    A block of words is reduced on its device, to its dot product with random odd numbers modulo 2**64. So one
    changed word always changes the digest, and several changed words fail to change it with a probability of at
    most 2**-32. It does not protect against someone who knows the numbers.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def update(self, name: str, tensor: Tensor) -> None:
        """Add one tensor that was sent or received.

        NumPy never views the tensor's storage: then it could not be resized, and the trainer frees its
        parameters' storage while responses are sampled.
        """
        self._digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        words, rest = torch.split(data, [data.numel() // 4 * 4, data.numel() % 4])
        if words.storage_offset() % 4:
            words = words.clone()
        factors = _odd_numbers(data.device)
        parts = torch.split(words.view(torch.int32), _BLOCK)
        blocks = [(part * factors[: len(part)]).sum() for part in parts]
        numbers: list[int] = [*torch.stack(blocks).tolist(), *rest.tolist()]  # pyright: ignore[reportUnknownMemberType]
        self._digest.update(repr(numbers).encode())

    def hexdigest(self) -> str:
        """Return the digest so far, in hexadecimal."""
        return self._digest.hexdigest()


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    """The same random odd numbers in every process; int64 [_BLOCK]."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (_BLOCK,), generator=generator) * 2 + 1).to(device)


class TransformersEngine:
    """Samples with continuous batching; implements `engines.base.RolloutEngine`.

    A sampled token depends only on its noise key, its position and the distribution, so batch size and order
    of requests change results only through rounding. Completions are CPU tensors.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        eos_token_ids: Sequence[int],
        weights: EnginePrecision = "bfloat16",
        batch_size: int = 256,
        device: torch.device | str = "cpu",
    ) -> None:
        """Build the model without weights; `load_weights` must come before `generate`.

        Args:
            config: Configuration of a causal language model that `AutoModelForCausalLM` supports; copied.
            eos_token_ids: Tokens that end a response; may be empty.
            weights: Precision of weights and arithmetic. bfloat16_fp8 also rounds linear weights to fp8-e4m3,
                with one scale per output channel. The modelopt_ formats round linear weights as a checkpoint
                of that format does, and multiply them in bfloat16; activations are not rounded further.
            batch_size: Number of sequences that decode together.
            device: Device of weights and cache.
        """
        self._device = torch.device(device)
        self._rounds_to_fp8 = weights == "bfloat16_fp8"
        self._format: WeightFormat | None = _FORMATS.get(weights)
        dtype = torch.float32 if weights == "float32" else torch.bfloat16
        self._decoder = SlotDecoder(config, dtype, self._device)
        self._targets = checkpoint_targets(self._decoder.model)
        if self._format == "nvfp4":
            _require_blocks(self._targets)
        self._eos = torch.tensor(tuple(eos_token_ids), dtype=torch.int64, device=self._device)
        self._batch_size = batch_size
        self._vocab_size = int(self._decoder.model.config.vocab_size)
        self._max_positions = int(self._decoder.model.config.max_position_embeddings)
        self._weight_version = -1
        self._released: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._counts = EngineCounts()
        self.changed_fraction: float | None = None
        """Fraction of the weights that the last `load_weights` changed. None after the first load and after a
        release, and for the modelopt formats, which round only after all weights have arrived."""

    @property
    def counts(self) -> EngineCounts:
        """See `RolloutEngine.counts`."""
        return self._counts

    @property
    def refusals(self) -> Mapping[str, int]:
        """See `RolloutEngine.refusals`."""
        return {}

    @property
    def weight_version(self) -> int:
        """Version of the last complete `load_weights`; -1 before the first and after a failed one."""
        return self._weight_version

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Copy all weights in, and return a checksum of the received tensors; see `RolloutEngine`.

        The stream is read to its end even after a fault, so that the sender never waits.
        """
        is_comparing = self._weight_version >= 0 and self._format is None
        self._weight_version, self.changed_fraction = -1, None
        self._restore_memory()
        checksum, received, faults = WeightChecksum(), Counter[str](), list[str]()
        num_changed = torch.zeros((), dtype=torch.int64, device=self._device)
        for name, tensor in weights:
            checksum.update(name, tensor)
            received[name] += 1
            target = self._targets.get(name)
            if target is None:
                faults.append(f"{name}: not a weight of the model")
            elif tensor.shape != target.shape:
                faults.append(f"{name}: shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
            else:
                rounds = self._rounds_to_fp8 and name.endswith("_proj.weight")
                served = (round_to_fp8(tensor) if rounds else tensor).to(target)
                if is_comparing:
                    num_changed += torch.count_nonzero(served != target)
                target.copy_(served)
        faults += [f"{name}: arrived {count} times" for name, count in received.items() if count > 1]
        faults += [f"{name}: missing" for name in self._targets if name not in received]
        if faults:
            raise WeightSyncError(
                f"weight version {version}: found {len(faults)} faults ({'; '.join(faults[:3])}"
                f"{'; ...' if len(faults) > 3 else ''}); expected each of {len(self._targets)} tensors "
                "exactly once. Check that engine and trainer were built from the same model; the engine "
                "refuses to sample until a complete load."
            )
        if self._format is not None:
            round_linears(self._targets, self._format)
        if is_comparing:
            num_weights = sum(target.numel() for target in self._targets.values())
            self.changed_fraction = int(num_changed) / num_weights
        self._weight_version = version
        return checksum.hexdigest()

    def release_weights(self) -> None:
        """Free the memory of the weights until the next `load_weights`."""
        self._weight_version = -1
        for target in self._targets.values():
            storage = target.untyped_storage()
            key = storage._cdata  # pyright: ignore[reportPrivateUsage] - a storage has no other identity
            self._released.setdefault(key, (storage, storage.nbytes()))
            storage.resize_(0)

    def _restore_memory(self) -> None:
        for storage, num_bytes in self._released.values():
            storage.resize_(num_bytes)
        self._released.clear()

    @torch.no_grad()  # not inference_mode: tensors made in it cannot enter the loss
    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Sample]:
        """Sample one response per request, in their order; see `RolloutEngine`.

        At temperature 0, log-probs and top-K are computed at temperature 1.
        """
        self._refuse(requests, params)
        if not requests:
            return []
        slots = min(self._batch_size, len(requests))
        batch = ContinuousBatch(self._decoder, requests, params, slots, self._eos)
        batch.run()
        num_prompt_tokens = sum(len(input_tokens(request)) for request in requests)
        self._counts += EngineCounts(
            num_prompt_tokens=num_prompt_tokens, num_cached_tokens=batch.num_cached_tokens
        )
        return batch.completions(self._weight_version)

    def session(self, *, may_be_held: bool = True) -> AbstractAsyncContextManager[Session]:
        """See `RolloutEngine.session`; one call of `generate` samples a turn of all open conversations."""
        return batch_session(self.generate)

    def _refuse(self, requests: Sequence[Request], params: SamplingParams) -> None:
        """Raise an error if a request cannot be served."""

        def refuse(found: str, expected: str, action: str) -> None:
            raise RolloutError(f"{found}; expected {expected}. {action}")

        if self._weight_version < 0:
            refuse("the engine holds no complete weights", "weights of one version", "Call load_weights first.")
        if params.max_response_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1:
            refuse(
                f"found {params}",
                "max_response_tokens >= 1, temperature >= 0 and 0 < top_p <= 1",
                "Correct the sampling parameters.",
            )
        if not 0 <= params.num_topk_log_probs <= self._vocab_size:
            refuse(
                f"found num_topk_log_probs = {params.num_topk_log_probs}",
                f"0 to the vocabulary of {self._vocab_size}",
                "Lower rollout.num_topk_log_probs.",
            )
        if params.capture_routes and not self._decoder.moe_layers:
            refuse(
                "found capture_routes for a model without experts",
                "a Mixture-of-Experts model",
                "Set rollout.routing_replay = 'off'.",
            )
        longest_prompt = self._max_positions - params.max_response_tokens
        for request in requests:
            tokens = request.prompt_tokens
            if not 1 <= len(tokens) <= longest_prompt:
                refuse(
                    f"request {request.id}: found {len(tokens)} prompt tokens and up to "
                    f"{params.max_response_tokens} response tokens",
                    f"at least 1 prompt token and at most {self._max_positions} tokens together",
                    "Lower data.max_prompt_tokens or rollout.max_response_tokens.",
                )
            tokens = input_tokens(request).tolist()
            if min(tokens) < 0 or max(tokens) >= self._vocab_size:
                refuse(
                    f"request {request.id}: found token ids {min(tokens)} to {max(tokens)}",
                    f"0 to {self._vocab_size - 1}",
                    "Use the tokenizer of this model.",
                )
            if request.partial is not None and num_tokens_left(request, params) < 1:
                refuse(
                    f"request {request.id}: found {request.partial.tokens.numel()} tokens of its response",
                    f"fewer than {params.max_response_tokens}",
                    "This is a fault of the caller: report it.",
                )
            if min(request.noise_key) < 0:
                refuse(
                    f"request {request.id}: found noise_key {request.noise_key}",
                    "none below 0",
                    "Correct run.seed.",
                )


def checkpoint_targets(model: torch.nn.Module) -> dict[str, Tensor]:
    """Map each Hugging Face name to the tensor to copy it into: an expert's is a slice of the fused tensor."""
    targets: dict[str, Tensor] = {}
    family = FAMILIES.get(type(model).__name__)
    is_interleaved = family is not None and family.has_interleaved_stacks
    stored = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    for name, tensor in [*model.named_parameters(), *buffers]:  # tied embeddings appear once, without lm_head
        prefix, _, last = name.rpartition(".experts.")
        data, kind = tensor.detach(), "bias" if is_interleaved and last.endswith("_bias") else "weight"
        linears = STACKS.get(last.removesuffix("_bias" if kind == "bias" else ""))
        if linears is None:
            targets[name] = data
            continue
        for expert, fused in enumerate(data):
            parts = fused.chunk(len(linears))
            if is_interleaved:  # [in, out], or [out] of biases
                parts = [fused[..., i :: len(linears)].movedim(-1, 0) for i in range(len(linears))]
            for linear, part in zip(linears, parts, strict=True):
                targets[f"{prefix}.experts.{expert}.{linear}.{kind}"] = part
    for ours, theirs in (family.module_names if family is not None else dict[str, str]()).items():
        targets = {name.replace(ours, theirs): target for name, target in targets.items()}
    return targets


def _require_blocks(targets: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        if is_linear(name) and target.shape[-1] % BLOCK:
            raise RolloutError(
                f"{name}: found {target.shape[-1]} inputs; expected a multiple of {BLOCK}, NVFP4's block. Set "
                "rollout.transformers.weights = 'modelopt_fp8' or 'bfloat16'."
            )


def round_to_fp8(weight: Tensor) -> Tensor:
    """Round `weight` `[out, in]` to float8-e4m3fn with one scale per output channel, as float32."""
    weight = weight.float()
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale

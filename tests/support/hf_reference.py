"""Hugging Face's models as the reference, in float32 and in float64: logits, losses and gradients."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tests.support.roundoff import OF_FLOAT64, Error, relative, worst

T = TypeVar("T")


def relative_error(found: Tensor, single: Tensor, double: Tensor) -> Error:
    """The relative error of what was found, by the reference in float32 and in float64."""
    return Error.of(relative(found.double(), double), relative(single.double(), double), OF_FLOAT64)


def relative_errors(
    found: Mapping[str, Tensor], single: Mapping[str, Tensor], double: Mapping[str, Tensor]
) -> dict[str, Error]:
    """The relative error of each tensor that all have."""
    names = found.keys() & double.keys()
    return {name: relative_error(found[name].cpu(), single[name], double[name]) for name in names}


@dataclass(frozen=True)
class Reference:
    """A model in float32, and one with the same weights that computes everything in float64."""

    single: Any
    double: Any

    @classmethod
    def of(cls, model: Any) -> "Reference":
        """Copy a float32 model, and let the copy compute in float64."""
        double = copy.deepcopy(model).double()
        for module in double.modules():
            if isinstance(module, PreTrainedModel):
                module.set_experts_implementation("eager")  # grouped products have no float64
        return cls(model, double)

    def compute(self, work: Callable[[Any], T]) -> tuple[T, T]:
        """`work(model)` in float32 and in float64."""
        single = work(self.single)
        with OnlyFloat64():
            return single, work(self.double)

    def packed_logit_error(self, logits: Tensor, microbatch: Any) -> Error:
        """The worst relative error of a packed sequence's logits."""
        lengths = torch.diff(microbatch.cu_seqlens).tolist()

        @torch.no_grad()
        def of_sequences(model: Any) -> list[Tensor]:
            return [model(input_ids=each[None]).logits[0] for each in torch.split(microbatch.tokens, lengths)]

        return worst(map(relative_error, torch.split(logits, lengths), *self.compute(of_sequences)))


def loss_error(loss: float, single: Tensor, double: Tensor, num_tokens: int) -> Error:
    """The error of a summed loss, divided by its tokens, by the losses [S] of the samples.

    Terms cancel in it, and their errors need not.
    """
    value, roundoff = abs(loss - float(double.sum())), float((single - double).abs().sum())
    return Error.of(value / num_tokens, roundoff / num_tokens, OF_FLOAT64)


def backward(model: Any, objective: Any, samples: Sequence[Any]) -> Tensor:
    """Accumulate the gradients of the summed loss, one sequence at a time; the loss [S] of each, in float64."""
    from megatron_dppo.algorithms import PolicyLossInputs, policy_loss

    losses: list[Tensor] = []
    for sample in samples:
        logits = model(input_ids=sample.tokens[None, :-1]).logits[0, sample.prompt_length - 1 :]
        log_probs = logits.log_softmax(-1).gather(1, sample.tokens[sample.prompt_length :, None])[:, 0]
        inputs = PolicyLossInputs(
            log_probs=log_probs,
            rollout_log_probs=sample.rollout_log_probs.to(log_probs.dtype),
            advantages=torch.full_like(log_probs, sample.advantage),
            loss_mask=sample.loss_mask,
        )
        losses.append(policy_loss(objective, inputs).loss_sum)
    sum(losses, torch.zeros(())).backward()
    return torch.stack(losses).detach().double()


class OnlyFloat64(TorchFunctionMode):
    """Gives float64 to models that ask for float32, as norms and routers do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def doubled(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(doubled, args), **{name: doubled(value) for name, value in (kwargs or {}).items()})

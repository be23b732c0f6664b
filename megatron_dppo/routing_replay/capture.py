"""Validates captured routes: routes that do not fit are refused, never filled in."""

from megatron_dppo.errors import RoutingReplayError
from megatron_dppo.types import ModelRouting, Sample

_WHAT_TO_DO = "Check that the engine serves the model being trained, or set rollout.routing_replay = 'off'."


def validate_routes(sample: Sample, routing: ModelRouting) -> None:
    """Check a sample's routes against the model they would be replayed on.

    Raises:
        RoutingReplayError: Routes are absent, of other layers or over another number of experts, have another
            number of rows than tokens - 1, name an expert that does not exist or one twice, or are all zero (an
            engine that captured nothing).
    """
    routes = sample.routed_experts
    if routes is None:
        raise RoutingReplayError(f"sample {sample.id}: no routed_experts came with the response. {_WHAT_TO_DO}")
    expected = (sample.tokens.numel() - 1, len(routing.layer_numbers), routing.top_k)
    if tuple(routes.indices.shape) != expected:
        raise RoutingReplayError(
            f"sample {sample.id}: routed_experts is {tuple(routes.indices.shape)}; expected {expected} "
            f"(rows, MoE layers, experts per token) for {sample.tokens.numel()} tokens. {_WHAT_TO_DO}"
        )
    if routes.layer_numbers != routing.layer_numbers:
        raise RoutingReplayError(
            f"sample {sample.id}: routes of layers {routes.layer_numbers}; "
            f"the model's MoE layers are {routing.layer_numbers}. {_WHAT_TO_DO}"
        )
    if routes.num_experts != routing.num_experts:
        raise RoutingReplayError(
            f"sample {sample.id}: routes over {routes.num_experts} experts; "
            f"the model has {routing.num_experts}. {_WHAT_TO_DO}"
        )
    indices = routes.indices.long()
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < routing.num_experts):
        raise RoutingReplayError(
            f"sample {sample.id}: expert ids {int(indices.min())}..{int(indices.max())}; "
            f"expected 0..{routing.num_experts - 1}. {_WHAT_TO_DO}"
        )
    if not bool(indices.any()) and routing.num_experts > 1:
        raise RoutingReplayError(
            f"sample {sample.id}: all routes are expert 0: nothing was captured. {_WHAT_TO_DO}"
        )
    in_order = indices.sort(dim=-1).values
    num_repeats = int((in_order.diff(dim=-1) == 0).any(dim=-1).sum())
    if num_repeats:
        raise RoutingReplayError(
            f"sample {sample.id}: {num_repeats} of its rows name an expert twice; "
            f"expected distinct. {_WHAT_TO_DO}"
        )

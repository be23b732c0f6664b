"""The actor equals Hugging Face, on one process and under expert parallelism: loss and every gradient."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_dppo.algorithms.presets import overrides_in
from megatron_dppo.config.schema import Config
from megatron_dppo.runtime.process import Runtime
from tests.support.hf_reference import OnlyFloat64, Reference, loss_error, relative_errors
from tests.support.ranks import run_ranks
from tests.support.roundoff import require_close
from tests.support.tiny import EXPERTS, TOP_K, gradients_of, random_groups, write_model

LAYOUTS = {"one process": (1, {}), "expert 2": (2, {"expert": 2})}
ROUTER_LOSSES = {
    "moe_z_loss_coeff": 0.02,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.3,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "binary tv": {"algorithm": {"preset": "dppo_binary_tv"}},
    "top-k kl, sequence means": {
        "algorithm": {"preset": "dppo_topk_kl", "top_k": 4, "aggregation": "seq_mean_token_mean"}
    },
    "routes replayed": {"rollout": {"routing_replay": "replay", "temperature": 0.7}},
    "routes replayed, recomputed activations": {
        "rollout": {"routing_replay": "replay"},
        "megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    },
    "entropy bonus, recomputed anchor": {"algorithm": {"preset": "minirl", "entropy_coef": 0.1}},
    "KL from another model": {"algorithm": {"preset": "grpo", "ref_kl_coef": 0.04}},
    "KL as a penalty, at a temperature": {
        "algorithm": {"preset": "cispo", "ref_kl_coef": 0.3, "ref_kl": "k1"},
        "rollout": {"temperature": 0.7},
    },
    "losses on routers": {"megatron": ROUTER_LOSSES},
    "losses on routers, routes replayed, recomputed activations": {
        "rollout": {"routing_replay": "replay"},
        "megatron": ROUTER_LOSSES
        | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    },
}


def measure(runtime: Runtime, model: str, parallel: dict[str, int], settings: dict[str, Any]) -> dict[str, Any]:
    """On one rank: the actor's loss and gradients, and the same of an unpacked Hugging Face model."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.actor.reference import ReferencePolicy
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages
    from megatron_dppo.metrics.metrics import Metrics

    has_kl = "ref_kl_coef" in settings.get("algorithm", {})
    config = Config.model_validate(
        {
            "model": {"load": model, "dtype": "float32", "reference": f"{model}_before" if has_kl else None},
            "parallel": parallel | {"max_tokens_per_microbatch": 60},
            "optimizer": {"distributed": False},
        }
        | {key: value for key, value in settings.items() if key != "rollout"}
        | {"rollout": {"num_topk_log_probs": 4} | settings.get("rollout", {})}
    )
    actor = Actor(config, runtime)
    groups = with_advantages(random_groups(5), normalize_std=False)
    own = [sample for group in groups[runtime.rank :: runtime.world_size] for sample in group.samples]
    shape = BatchShape(config.algorithm.aggregation, 16, 60, topk_columns=4, routing=actor.routing)
    (batch,), _ = train_batches([own], shape, actor.data_parallel)
    if actor.objective.anchor == "recomputed":
        batch = actor.with_old_log_probs(batch)
    if has_kl:
        before = {name: tensor.clone() for name, tensor in actor.weights()}
        (batch,) = ReferencePolicy(actor, config).with_log_probs([batch])
        assert all(torch.equal(tensor, before[name]) for name, tensor in actor.weights())
    metrics = actor.accumulate_gradients(batch, is_first=True).metrics
    means = runtime.all_gather(metrics.state()["means"])
    losses = [own["loss/policy"][0] for own in means]
    gradients = gradients_of(actor)
    reference = Reference.of(_hugging_face(model))
    before = Reference.of(_hugging_face(f"{model}_before"))
    single = _of_hugging_face(reference.single, before.single if has_kl else None, config, groups)
    with OnlyFloat64():
        double = _of_hugging_face(reference.double, before.double if has_kl else None, config, groups)
    added = Metrics().merge(runtime.all_gather(metrics.state())).values()
    return {
        "num_microbatches": len(batch.microbatches),
        "kl": sum(own["policy/ref_kl"][0] for own in means) / batch.num_loss_tokens if has_kl else 0.0,
        "reference_kl": double.kl / batch.num_loss_tokens,
        "router_losses": [added.get(name, 0.0) for name in ("loss/router_z", "loss/router_balance")],
        "reference_router_losses": double.router_losses,
        "errors": {
            "loss": loss_error(sum(losses) / batch.num_loss_tokens, single.losses, double.losses, 1),
            **relative_errors(gradients, single.gradients, double.gradients),
        },
        "names": set(gradients) == set(double.gradients),
    }


class _Found(NamedTuple):
    """What a model of Hugging Face's computes."""

    losses: Tensor  # float64 [samples], weighted as the mini-batch weighs their tokens
    gradients: dict[str, Tensor]
    kl: float
    router_losses: list[float]


def _hugging_face(folder: str) -> Any:
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


def _of_hugging_face(model: Any, before: Any, config: Config, groups: list[Any]) -> _Found:
    """One sequence at a time through a model, with routes forced where asked."""
    from megatron_dppo.algorithms import PolicyLossInputs, TopKLogProbs, policy_loss, preset, token_weights

    objective = preset(config.algorithm.preset, **overrides_in(config.algorithm.model_dump()))
    samples = [sample for group in groups for sample in group.samples]
    lengths = [int(sample.loss_mask.sum()) for sample in samples]
    weights = iter(token_weights(config.algorithm.aggregation, lengths, 16).split(lengths))
    kl, router_losses = torch.zeros(()), torch.zeros(2, dtype=torch.float64)
    losses: list[Tensor] = []
    for sample in samples:
        is_forced = config.rollout.routing_replay == "replay"
        hooks = _force_routes(model, sample.routed_experts.indices) if is_forced else []
        router_logits: list[Tensor] = []
        blocks: Any = model.model.layers
        for block in blocks:
            read = lambda module, inputs, output, found=router_logits: found.append(output[0])  # noqa: E731
            hooks.append(block.mlp.gate.register_forward_hook(read))
        logits = model(input_ids=sample.tokens[None, :-1]).logits[0, sample.prompt_length - 1 :]
        for hook in hooks:
            hook.remove()
        log_probs = (logits / config.rollout.temperature).log_softmax(-1)
        targets = sample.tokens[sample.prompt_length :, None]
        chosen, ref = log_probs.gather(1, targets)[:, 0], None
        if before is not None:
            with torch.no_grad():
                logits = before(input_ids=sample.tokens[None, :-1]).logits[0, sample.prompt_length - 1 :]
            ref = (logits / config.rollout.temperature).log_softmax(-1).gather(1, targets)[:, 0]
            d = (ref - chosen.detach())[sample.loss_mask]
            kl += (d.exp() - d - 1).sum()
        weight = logits.new_zeros(sample.response_length)
        weight = weight.masked_scatter(sample.loss_mask, next(weights).to(weight))
        topk = TopKLogProbs(
            ids=sample.topk.ids,
            rollout_log_probs=sample.topk.log_probs.to(log_probs),
            log_probs=log_probs.gather(1, sample.topk.ids.long()),
        )
        out = policy_loss(
            objective,
            PolicyLossInputs(
                log_probs=chosen,
                rollout_log_probs=sample.rollout_log_probs.to(log_probs),
                advantages=torch.full_like(chosen, sample.advantage),
                loss_mask=sample.loss_mask,
                old_log_probs=chosen.detach(),
                ref_log_probs=ref,
                topk=topk,
                targets=sample.tokens[sample.prompt_length :],
                token_weights=weight,
                entropy=-(log_probs.exp() * log_probs).sum(-1),
            ),
        )
        losses.append(out.loss_sum)
        learning = sample.loss_mask.nonzero()[:, 0] + sample.prompt_length - 1
        for logits in router_logits:
            router_losses = router_losses + _router_losses(
                config.megatron, logits.double()[learning], sum(lengths), len(samples)
            )
    (torch.stack(losses).sum() + router_losses.sum()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    of_samples = torch.stack(losses).detach().double()
    return _Found(of_samples, _checkpoint_names(gradients), float(kl), router_losses.tolist())


def _router_losses(megatron: dict[str, Any], logits: Tensor, num_tokens: int, num_samples: int) -> Tensor:
    """What a sample adds to the z-loss and to the load-balancing loss of one layer, by hand: [2] float64.

    Args:
        megatron: Tables with both coefficients, or empty.
        logits: [T, experts] float64 at the positions that learn.
        num_tokens: Positions that learn in the mini-batch.
        num_samples: Samples in it.
    """
    if not megatron.get("moe_aux_loss_coeff") or not len(logits):
        return torch.zeros(2, dtype=torch.float64)
    z = logits.exp().sum(1).log().square().sum() / num_tokens
    probs = logits.softmax(1)
    chosen = torch.zeros_like(probs).scatter(1, probs.topk(TOP_K).indices, 1.0)
    balance = EXPERTS * (chosen.mean(0) / TOP_K * probs.mean(0)).sum() / num_samples
    return torch.stack([megatron["moe_z_loss_coeff"] * z, megatron["moe_aux_loss_coeff"] * balance])


def _force_routes(model: Any, indices: Tensor) -> list[Any]:
    """Make each router of the reference choose the given experts, with probabilities of its live logits."""
    hooks = []
    for layer, block in enumerate(model.model.layers):
        chosen = indices[:, layer].long()

        def forced(module: Any, inputs: Any, output: Any, chosen: Tensor = chosen) -> Any:
            logits = output[0]
            scores = logits.gather(1, chosen).softmax(-1)
            return logits, scores.to(output[1].dtype), chosen

        hooks.append(block.mlp.gate.register_forward_hook(forced))
    return hooks


def _checkpoint_names(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of transformers' fused experts under one name per expert."""
    named: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for e in range(EXPERTS):
                gate, up = gradient[e].chunk(2)
                named |= {f"{prefix}.{e}.gate_proj.weight": gate, f"{prefix}.{e}.up_proj.weight": up}
        elif kind == "down_proj":
            named |= {f"{prefix}.{e}.down_proj.weight": gradient[e] for e in range(EXPERTS)}
        else:
            named[name] = gradient
    return named


def measure_all(runtime: Runtime, model: str, parallel: dict[str, int]) -> dict[str, dict[str, Any]]:
    """All settings in one spawn."""
    return {name: measure(runtime, model, parallel, settings) for name, settings in SETTINGS.items()}


@pytest.fixture(scope="session", params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    world_size, parallel = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("parity")
    model = write_model(folder / "model")
    write_model(folder / "model_before", seed=1)
    return run_ranks(measure_all, world_size, folder, str(model), parallel)[0]


@pytest.mark.parametrize("setting", SETTINGS)
def test_loss_and_every_gradient_equal_hugging_face(measured: dict[str, dict[str, Any]], setting: str) -> None:
    result = measured[setting]
    assert result["num_microbatches"] > 1, "packing must be part of what is compared"
    assert result["names"], "each parameter's gradient is compared, none twice"
    assert result["kl"] == pytest.approx(result["reference_kl"], rel=1e-5)
    assert result["router_losses"] == pytest.approx(result["reference_router_losses"], rel=1e-5)
    assert all(result["router_losses"]) == ("moe_z_loss_coeff" in SETTINGS[setting].get("megatron", {}))
    require_close(result["errors"])

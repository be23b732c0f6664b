"""Every supported architecture equals Hugging Face: logits, loss, each gradient, conversion, generation."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo.architectures.registry import FAMILIES
from megatron_dppo.runtime.process import Runtime
from tests.support.converting import converted
from tests.support.hf_reference import Reference, backward, loss_error, relative_errors
from tests.support.ranks import run_ranks
from tests.support.roundoff import OF_FLOAT64, Error, require_close, worst
from tests.support.tiny import gradients_of, logits_of, random_groups
from tests.support.tiny_families import LLAMA3, SIZES, YARN, write_family

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    **{f"{name}, tied": (name, {"tie_word_embeddings": True}) for name in FAMILIES},
    "GLM-4.5: head norms": ("Glm4MoeForCausalLM", {"use_qk_norm": True}),
    "GLM without biases and dense layers": (
        "Glm4MoeForCausalLM",
        {"attention_bias": False, "n_shared_experts": 2, "first_k_dense_replace": 0},
    ),
    "DeepSeek-V3: four groups, of which two": (
        "DeepseekV3ForCausalLM",
        {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    ),
    "DeepSeek-V3: one mscale is not the other": (
        "DeepseekV3ForCausalLM",
        {"rope_parameters": YARN | {"mscale": 0.707}},
    ),
    "DeepSeek-V3: YaRN without mscale": (
        "DeepseekV3ForCausalLM",
        {"rope_parameters": {key: value for key, value in YARN.items() if "mscale" not in key}},
    ),
    "Moonlight": (
        "DeepseekV3ForCausalLM",
        {"q_lora_rank": None, "n_shared_experts": 2, "n_group": 1, "rope_parameters": SIZES["rope_parameters"]},
    ),
    "Qwen2-MoE, weights normalised": ("Qwen2MoeForCausalLM", {"norm_topk_prob": True}),
    "LlamaForCausalLM, llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "Qwen3ForCausalLM, fractional base": (
        "Qwen3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1234.5}},
    ),
}


def measure_all(runtime: Runtime, folder: str) -> dict[str, dict[str, Any]]:
    """Every case in one process."""
    return {case: measure(runtime, Path(folder) / case) for case in CASES}


def measure(runtime: Runtime, folder: Path) -> dict[str, Any]:
    """An actor with what the tool makes of `folder`, against transformers with the folder; conversion too."""
    return compare(runtime, folder, _converted(folder), is_converted=True)


def compare(runtime: Runtime, folder: Path, load: Path, *, is_converted: bool = False) -> dict[str, Any]:
    """An actor with the weights of `load`, against transformers with the weights of `folder`, on a CPU."""
    from transformers import AutoModelForCausalLM

    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.architectures.parameters import model_shape
    from megatron_dppo.config.schema import Config
    from megatron_dppo.data.batches.gradient_steps import BatchShape, train_batches, with_advantages

    config = Config.model_validate(
        {
            "model": {"load": str(load), "dtype": "float32"},
            "parallel": {"max_tokens_per_microbatch": 60},
            "algorithm": {"preset": "dppo_binary_tv"},
            "optimizer": {"distributed": False},
        }
    )
    actor = Actor(config, runtime)
    groups = random_groups(4, routing=actor.routing)
    samples = [s for group in with_advantages(groups, False) for s in group.samples]
    shape = BatchShape("token_mean", 16, 60, routing=actor.routing)
    (batch,), _ = train_batches([list(samples)], shape, actor.data_parallel)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = Reference.of(model)
    logit_error = worst(reference.packed_logit_error(logits_of(actor, m), m) for m in batch.microbatches)
    planned = model_shape(actor.hf).num_parameters
    loss = actor.accumulate_gradients(batch, is_first=True).metrics.state()["means"]["loss/policy"][0]
    gradients = gradients_of(actor)
    num_tokens = batch.num_loss_tokens
    (losses, single), (exact_losses, double) = reference.compute(
        lambda each: _losses_and_gradients(each, actor.objective, samples, num_tokens)
    )
    found: dict[str, Any] = {
        "num_parameters": (sum(p.numel() for p in actor.chunks[0].parameters()), planned),
        "num_microbatches": len(batch.microbatches),
        "logit_error": logit_error,
        "loss_error": loss_error(loss, losses, exact_losses, num_tokens),
        "names": (sorted(gradients), sorted(double)),
        "errors": relative_errors(gradients, single, double),
    }
    if is_converted:
        found["changed"] = _changed_by_conversion(actor, folder)
        found["generation_error"] = _generation_error(actor, reference)
    return found


def _converted(folder: Path) -> Path:
    return folder.with_name(f"{folder.name} converted")


def _losses_and_gradients(
    model: Any, objective: Any, samples: list[Any], num_tokens: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each sample, and the gradients of the summed losses, divided by the number of tokens."""
    from megatron_dppo.architectures.published_names import stays_float32
    from megatron_dppo.engines.embedded.engine import checkpoint_targets

    losses = backward(model, objective, samples)
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for gradient, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
            gradient.copy_(parameter.grad / num_tokens)
    targets = checkpoint_targets(gradients).items()
    return losses, {name: gradient for name, gradient in targets if not stays_float32(name)}


def _changed_by_conversion(actor: Any, folder: Path) -> list[str]:
    """What is not bitwise the same after Hugging Face -> Megatron -> its checkpoint -> Hugging Face."""
    from megatron_dppo.checkpoints.hf_folder import HFWeights
    from megatron_dppo.checkpoints.megatron_folder import load_weights
    from megatron_dppo.checkpoints.megatron_weights import export_hf_weights, weight_buffers
    from tests.support.saving import save_weights

    out = folder.with_name(f"{folder.name} as megatron")
    save_weights(actor.chunks, out, folder)
    with torch.no_grad():
        for tensor in (*actor.chunks[0].parameters(), *(b for _, b in weight_buffers(actor.chunks[0]))):
            tensor.fill_(float("nan"))
    load_weights(actor.chunks, out, actor.hf)
    before, after = HFWeights(folder), dict(export_hf_weights(actor.chunks, actor.hf_table))
    changed = sorted(before.names ^ after.keys())
    return changed + [n for n in before.names & after.keys() if not torch.equal(before.tensor(n), after[n])]


def _generation_error(actor: Any, reference: Reference) -> Error:
    """Worst difference of the embedded engine's log-probs from a plain forward's."""
    from megatron_dppo.engines.base import Request, SamplingParams
    from megatron_dppo.engines.embedded.engine import TransformersEngine

    engine = TransformersEngine(reference.single.config, eos_token_ids=(), weights="float32", batch_size=2)
    engine.load_weights(actor.weights(), version=1)
    requests = [Request(str(i), tuple(range(3, 5 + 4 * i)), (0, 0, i)) for i in range(4)]
    completions = engine.generate(requests, SamplingParams(9))

    @torch.no_grad()
    def plainly(model: Any) -> Tensor:
        log_probs: list[Tensor] = []
        for request, completion in zip(requests, completions, strict=True):
            tokens = torch.tensor([*request.prompt_tokens, *completion.tokens.tolist()])
            logits = model(input_ids=tokens[None, :-1]).logits[0, len(request.prompt_tokens) - 1 :]
            log_probs.append(logits.log_softmax(-1).gather(1, completion.tokens[:, None])[:, 0])
        return torch.cat(log_probs).double()

    single, double = reference.compute(plainly)
    found = torch.cat([completion.log_probs for completion in completions]).double()
    return Error.of(float((found - double).abs().max()), float((single - double).abs().max()), OF_FLOAT64)


def decay_all(runtime: Runtime, folder: str) -> dict[str, list[str]]:
    """Tensors of each family whose shapes do not say whether a step without gradients shrinks them."""
    from megatron_dppo.actor.actor import Actor
    from megatron_dppo.actor.optimizer import take_step
    from megatron_dppo.config.schema import Config

    wrong: dict[str, list[str]] = {}
    for family in FAMILIES:
        tables = {
            "model": {"load": f"{folder}/{family}", "dtype": "float32"},
            "optimizer": {"lr": 0.1, "weight_decay": 0.5, "distributed": family != "GptOssForCausalLM"},
        }
        actor = Actor(Config.model_validate(tables), runtime)
        before = {name: tensor.clone() for name, tensor in actor.weights() if "correction_bias" not in name}
        assert take_step(actor.optimizer)[0] == 0.0
        after = dict(actor.weights())
        expected = {name: x * 0.95 if x.dim() > 1 else x for name, x in before.items()}
        wrong[family] = [name for name, x in expected.items() if not torch.allclose(after[name], x, rtol=1e-6)]
    return wrong


def test_matrices_decay_and_norms_and_biases_do_not(tmp_path: Path) -> None:
    """Also if experts' biases are stacked, and then have two dimensions."""
    for family in FAMILIES:
        write_family(tmp_path / family, family)
    (wrong,) = run_ranks(decay_all, 1, tmp_path, str(tmp_path))
    assert wrong == {family: [] for family in FAMILIES}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("families")
    for case, (architecture, changes) in CASES.items():
        write_family(folder / case, architecture, **changes)
        converted("to-megatron", "--hf", folder / case, "--out", _converted(folder / case))
    return run_ranks(measure_all, 1, folder, str(folder))[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient_equal_hugging_face(
    measured: dict[str, dict[str, Any]], case: str
) -> None:
    result = measured[case]
    assert result["num_microbatches"] > 1, "packing must be part of what is compared"
    ours, theirs = result["names"]
    assert ours == theirs
    require_close({"logits": result["logit_error"], "loss": result["loss_error"], **result["errors"]})


@pytest.mark.parametrize("case", CASES)
def test_the_rules_count_the_parameters_of_megatron_s_model(
    measured: dict[str, dict[str, Any]], case: str
) -> None:
    built, planned = measured[case]["num_parameters"]
    assert built == planned


@pytest.mark.parametrize("case", CASES)
def test_conversion_there_and_back_changes_no_bit(measured: dict[str, dict[str, Any]], case: str) -> None:
    assert measured[case]["changed"] == []


@pytest.mark.parametrize("case", CASES)
def test_the_embedded_engine_equals_a_plain_forward(measured: dict[str, dict[str, Any]], case: str) -> None:
    require_close({"log-probs": measured[case]["generation_error"]})

"""Makes a Mixture-of-Experts model of a dense one: each expert starts as its layer's feed-forward.

The tensors are made while they are written, each with random numbers that its name seeds. So they depend
neither on the files nor on the number of processes.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.architectures.registry import family_of, value_problems, variant_problems
from megatron_dppo.architectures.sizes import HFConfig, architecture_of, read_model_config
from megatron_dppo.checkpoints.convert.sources import HuggingFaceSource
from megatron_dppo.checkpoints.convert.to_megatron import require_fit
from megatron_dppo.checkpoints.hf_folder import HFWeights
from megatron_dppo.checkpoints.model_files import read_convertible_config
from megatron_dppo.errors import ConfigError, ConversionError, Problem

_MIXTRAL, _QWEN2_MOE, _QWEN3_MOE = "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"
_TARGETS: Mapping[str, tuple[str, str]] = {
    "LlamaForCausalLM": (_MIXTRAL, "mixtral"),
    "MistralForCausalLM": (_MIXTRAL, "mixtral"),
    "Qwen2ForCausalLM": (_QWEN2_MOE, "qwen2_moe"),
    "Qwen3ForCausalLM": (_QWEN3_MOE, "qwen3_moe"),
}
"""Architecture and `model_type` of the model with experts, by the dense architecture."""
_MISTRAL: Mapping[str, Any] = {"num_key_value_heads": 8, "sliding_window": 4096}
"""transformers' values of the keys in which Mistral differs from Llama; its layers are Llama's."""
_OF_DENSE = (
    *("attention_bias", "mlp_bias", "pretraining_tp", "layer_types", "auto_map"),
    *("sliding_window", "use_sliding_window", "max_window_layers"),
)
"""Keys of a dense config.json that are left out: all have the only value that the families implement."""
_FEED_FORWARD = re.compile(r"(model\.layers\.\d+\.mlp)\.(gate|up|down)_proj\.weight")
_ROUTER_STD = 0.02


@dataclass(frozen=True)
class Upcycling:
    """Options of making experts.

    Attributes:
        num_experts: Number of experts in each layer.
        experts_per_token: Number of experts that process a token, top-k.
        noise: Standard deviation of the Gaussian noise added to each expert, relative to its tensor's.
        reinit: Fraction of each expert's intermediate features that are drawn again (Drop-Upcycling's r).
        seed: Seed of routers, noise and drawn features.
    """

    num_experts: int
    experts_per_token: int
    noise: float = 0.0
    reinit: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a top-k that no router can learn, or with more experts than there are."""
        if not 2 <= self.experts_per_token <= self.num_experts:
            raise ConversionError(
                f"--top-k: found {self.experts_per_token} with --experts {self.num_experts}; expected at least "
                "2 and at most --experts. The weights of the chosen experts sum to 1, so a single one always "
                "weighs 1 and its router gets no gradient. Choose another --top-k."
            )

    @property
    def is_exact(self) -> bool:
        """Whether the model computes the dense model's logits."""
        return self.noise == 0 and self.reinit == 0


def read_dense_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a dense model that can be upcycled; Mistral's as a Llama's, whose layers it has."""
    path, content = read_model_config(folder)
    architecture = architecture_of(content)
    if architecture not in _TARGETS:
        expected = f"a dense model: {', '.join(_TARGETS)}"
        action = "Name the folder of a dense model. A model that has experts already is trained as it is."
        raise ConfigError(Problem("model.load", f"{architecture} in {path}", expected, action))
    if architecture != "MistralForCausalLM":
        return read_convertible_config(folder)
    hf = {**_MISTRAL, **content, "architectures": ["LlamaForCausalLM"]}
    problems = [*value_problems(hf, {"sliding_window": (4096, None)}), *variant_problems(hf)]
    if problems:
        raise ConfigError(problems)
    return hf


def moe_config(hf: HFConfig, how: Upcycling) -> dict[str, Any]:
    """Return config.json of the model with experts, with every value that the two families default differently.

    Args:
        hf: Dense model's config.json, from `read_dense_config`.
        how: Options of making experts.
    """
    family = family_of(hf)
    sizes = family.sizes_of(hf)
    architecture, model_type = _TARGETS[family.architecture]
    kept = {key: value for key, value in family.completed(hf).items() if key not in _OF_DENSE}
    found: dict[str, Any] = {
        **kept,
        "architectures": [architecture],
        "model_type": model_type,
        "num_key_value_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "num_experts_per_tok": how.experts_per_token,
        "output_router_logits": False,
    }
    if architecture == _MIXTRAL:
        return found | {"num_local_experts": how.num_experts, "sliding_window": None}
    found |= {
        "num_experts": how.num_experts,
        "moe_intermediate_size": sizes.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }
    shared = {"shared_expert_intermediate_size": sizes.intermediate_size}
    return found | shared if architecture == _QWEN2_MOE else found


class UpcycledSource(HuggingFaceSource):
    """The tensors of the model with experts, made of a dense model's folder when they are read.

    Weights of the chosen experts sum to 1, so equal experts give the dense layer's output for any router. A
    Qwen2-MoE also has a shared expert: a copy whose gate is 0, so that it counts half, and experts with half
    the output.
    """

    def __init__(self, weights: HFWeights, hf: HFConfig, how: Upcycling) -> None:
        """Compare the dense model's tensors with its config.json, and name the new ones.

        Args:
            weights: Dense model's folder.
            hf: Dense model's config.json, from `read_dense_config`.
            how: Options of making experts.
        """
        super().__init__(weights)
        self._how = how
        self._dense = require_fit(HuggingFaceSource(weights), hf)
        self._family = family_of(moe_config(hf, how))
        self._made_of = {name: tuple(self._names(name)) for name in self._dense}
        self._origin = {new: name for name, made in self._made_of.items() for new in made}

    def _names(self, name: str) -> Iterator[str]:
        """Yield the names of the tensors that are made of a dense model's tensor."""
        match = _FEED_FORWARD.fullmatch(name)
        if match is None:
            yield name
            return
        layer, linear = match[1], match[2]
        has_shared = self._family.architecture == _QWEN2_MOE
        if linear == "gate":
            yield self._spelled(f"{layer}.gate.weight")
            if has_shared:
                yield f"{layer}.shared_expert_gate.weight"
        for expert in range(self._how.num_experts):
            yield self._spelled(f"{layer}.experts.{expert}.{linear}_proj.weight")
        if has_shared:
            yield f"{layer}.shared_expert.{linear}_proj.weight"

    def _spelled(self, name: str) -> str:
        for ours, theirs in self._family.module_names.items():
            name = name.replace(ours, theirs)
        return name

    def outline(self) -> dict[str, Tensor]:
        """Return names, shapes and dtypes, in the order of the dense model's files."""
        return {
            new: torch.empty(self._shape(new, tensor), dtype=tensor.dtype, device="meta")
            for name, tensor in self._dense.items()
            for new in self._made_of[name]
        }

    def _shape(self, new: str, dense: Tensor) -> tuple[int, ...]:
        rows = {"router": self._how.num_experts, "shared gate": 1}.get(_kind(new), dense.shape[0])
        return rows, *dense.shape[1:]

    def groups(self) -> list[tuple[str, ...]]:
        """Return the names that are made of one dense tensor, for each of them."""
        return list(self._made_of.values())

    def read(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Make the tensors of one group of one dense tensor, which is read once."""
        dense = self.weights.tensor(self._origin[names[0]])
        for name in names:
            yield name, self._make(name, dense)

    def _make(self, name: str, dense: Tensor) -> Tensor:
        kind, how = _kind(name), self._how
        if kind == "router":
            drawn = torch.randn(how.num_experts, dense.shape[1], generator=_generator(how.seed, name))
            return (_ROUTER_STD * drawn).to(dense.dtype)
        if kind == "shared gate":
            return torch.zeros(1, dense.shape[1], dtype=dense.dtype)
        if kind != "expert":
            return dense
        made = dense if how.is_exact else self._changed(name, dense.float()).to(dense.dtype)
        is_half = self._family.architecture == _QWEN2_MOE and name.endswith(".down_proj.weight")
        return made / 2 if is_half else made

    def _changed(self, name: str, weight: Tensor) -> Tensor:
        """Return an expert's linear with noise and drawn features: `[I, H]`; down_proj `[H, I]`."""
        how, generator = self._how, _generator(self._how.seed, name)
        if how.noise:
            weight = weight + how.noise * weight.std() * torch.randn(weight.shape, generator=generator)
        if how.reinit:
            axis = 1 if self._origin[name].endswith(".down_proj.weight") else 0
            expert = name.rpartition(".experts.")[2].partition(".")[0]
            of_expert = self._origin[name].rpartition(".mlp.")[0] + f" {expert}"
            order = torch.randperm(weight.shape[axis], generator=_generator(how.seed, of_expert))
            drawn = order[: round(how.reinit * weight.shape[axis])]
            old = weight.index_select(axis, drawn)
            new = old.mean() + old.std() * torch.randn(old.shape, generator=generator)
            weight = weight.index_copy(axis, drawn, new)
        return weight


def _kind(name: str) -> str:
    if name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
        return "router"
    if name.endswith(".shared_expert_gate.weight"):
        return "shared gate"
    return "expert" if ".experts." in name else "copy"


def _generator(seed: int, name: str) -> torch.Generator:
    """Return a generator for one name, on the CPU."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def model_card(folder: Path, config: HFConfig, how: Upcycling) -> str:
    """Return README.md of the model with experts: what it is made of, how, and the literature."""
    name, architecture = folder.resolve().name, architecture_of(config)
    options = f"--experts {how.num_experts} --top-k {how.experts_per_token}"
    options += f" --noise {how.noise:g} --reinit {how.reinit:g} --seed {how.seed}"
    function = (
        f"Its logits equal {name}'s, up to rounding: nothing was trained yet."
        if how.is_exact
        else f"Its logits differ from {name}'s: it is to be trained before it is used."
    )
    notes = _SHARED if architecture == _QWEN2_MOE else ""
    notes += _TIED if config["tie_word_embeddings"] and family_of(config).sglang.has_own_output else ""
    return _CARD.format(
        name=name,
        architecture=architecture,
        options=options,
        function=function,
        notes=notes,
        router_std=_ROUTER_STD,
        **{key: getattr(how, key) for key in ("num_experts", "experts_per_token", "noise", "reinit", "seed")},
    )


_SHARED = """
- The shared expert is a copy. Its gate is 0, which weights it 1/2. `down_proj` of all other experts is halved,
  so that both halves sum to the dense layer's output."""
_TIED = """
- The output layer is the embedding. SGLang builds another one for this architecture and loads nothing into it
  from this folder. megatron-dppo pushes it by name. A server that was started by hand samples nonsense."""
_CARD = """# {name}, upcycled to {num_experts} experts

A `{architecture}` made of the dense model {name} by

```bash
megatron-dppo convert upcycle --hf {name} --out NEW {options}
```

{function}

- Each of the {num_experts} experts of a layer is a copy of the dense feed-forward, of the same width.
  {experts_per_token} of them process a token.
- Noise: a Gaussian with {noise:g} of each tensor's standard deviation, for each expert another.
- Re-initialised: a fraction {reinit:g} of each expert's intermediate features, drawn with mean and standard
  deviation of the weights that they replace, for each expert other features.
- Routers are Gaussian with standard deviation {router_std}. The weights of the chosen experts sum to 1.{notes}
- Embedding, attention, norms and output layer are the dense model's. Seed: {seed}.

Equal experts give a router no gradient, because any choice has the same output. They first become different by
training on different tokens. Noise and re-initialisation start them different, at the price of a worse start.

## Literature

Copies of the feed-forward and new routers: sparse upcycling, [2212.05055](https://arxiv.org/abs/2212.05055).
Re-initialised features (there with a fraction of 0.5 for long training): Drop-Upcycling,
[2502.19261](https://arxiv.org/abs/2502.19261). Narrower experts, and a softmax before the choice, which do not
keep the function in this form: [2410.07524](https://arxiv.org/abs/2410.07524). A published model with experts
made from a dense one, and a shared expert: Qwen2, [2407.10671](https://arxiv.org/abs/2407.10671).
"""

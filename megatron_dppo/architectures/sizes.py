"""Reads config.json: a model's sizes and rotary frequencies, without torch, so that `check` is fast."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dppo.errors import ConfigError, Problem
from megatron_dppo.types import ModelRouting

WIDE_NORM = "norm over all heads"
"""Option of models that normalise queries, and keys, over all heads at once."""
SINKS = "attention sinks"
"""Option of models with a learned attention sink of each head."""
BIASED_OUTPUT = "biased attention output"
"""Option of models whose attention has a bias in its output projection."""
BIASED_EXPERTS = "biased experts"
"""Option of models whose router and experts have biases, and whose experts' activation is clamped."""
DELTA_CHUNK = 64
"""Tokens that linear attention computes together, as in transformers and in flash-linear-attention."""
ZERO_CENTRED = "norms of 1 + weight"
"""Option of models whose norms multiply by 1 + weight."""
OUTPUT_GATE = "gated attention"
"""Option of models that multiply attention's output by sigmoids, projected together with the queries."""
HFConfig = Mapping[str, Any]  # config.json, in either spelling of transformers 4 and 5


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of multi-head latent attention: queries, keys and values are projected up from small latents."""

    query_rank: int | None  # of the queries' latent; None: queries are projected directly from hidden states
    rank: int  # of the latent of keys and values
    plain_head_dim: int  # of a query and a key, without rotation
    rotary_head_dim: int  # of a query, and of the one key part that all heads share
    value_head_dim: int


@dataclass(frozen=True)
class LinearSizes:
    """Sizes of linear attention (Gated DeltaNet): each key head serves several consecutive value heads."""

    layers: tuple[int, ...]  # 0-based indices of the layers that have it instead of attention
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int  # of queries too
    value_head_dim: int
    conv_width: int  # tokens that the causal convolution of queries, keys and values sees

    @property
    def key_width(self) -> int:
        """Size of all heads' keys, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Size of all heads' values, gates and outputs."""
        return self.num_value_heads * self.value_head_dim

    @property
    def multiplications(self) -> float:
        """Multiplications of a token in one layer's forward pass, besides its weights.

        The backward pass computes them once more, so a third is added: a step counts the forward three times.
        """
        of_chunk = DELTA_CHUNK * (3 * self.key_head_dim + 2 * self.value_head_dim)
        return 4 / 3 * (self.num_value_heads * of_chunk + 3 * self.state_size)

    @property
    def state_size(self) -> int:
        """Elements of a sequence's recurrent state in one layer."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model in its Hugging Face config.json."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # of queries and keys
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    num_experts: int | None  # None: a dense model
    experts_per_token: int
    moe_intermediate_size: int
    moe_layers: tuple[int, ...]  # 0-based indices of the layers that have experts
    is_tied: bool = False  # the output layer is the embedding
    shared_expert_intermediate_size: int = 0  # total width of the experts that process every token
    latent: LatentSizes | None = None  # None: grouped-query attention
    rotary_percent: float = 1.0  # part of a head that is rotated, in grouped-query attention
    options: frozenset[str] = frozenset()  # what weight rules are `only_with`
    linear: LinearSizes | None = None  # None: attention in every layer

    @property
    def value_head_dim(self) -> int:
        """Size of a head's values and output."""
        return self.head_dim if self.latent is None else self.latent.value_head_dim

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """0-based indices of the layers with linear attention instead of attention."""
        return () if self.linear is None else self.linear.layers

    @property
    def routing(self) -> ModelRouting | None:
        """Dimensions of this model's routes; None for a dense model."""
        if self.num_experts is None:
            return None
        return ModelRouting(self.moe_layers, self.num_experts, self.experts_per_token)

    @property
    def dimensions(self) -> dict[str, int]:
        """Sizes by the letters in which weight rules write shapes."""
        heads, latent = self.num_attention_heads, self.latent
        of_latents = {} if latent is None else _latent_dimensions(latent, heads)
        return {
            "V": self.vocab_size,
            "H": self.hidden_size,
            "T": heads,
            "D": self.head_dim,
            "Q": heads * self.head_dim,
            "K": self.num_key_value_heads * self.head_dim,
            "O": heads * self.value_head_dim,
            "I": self.intermediate_size,
            "F": self.moe_intermediate_size,
            "S": self.shared_expert_intermediate_size,
            "E": self.num_experts or 0,
            "1": 1,
            **of_latents,
            **({} if self.linear is None else _linear_dimensions(self.linear)),
            "G": 2 * heads * self.head_dim,
        }


def _latent_dimensions(latent: LatentSizes, heads: int) -> dict[str, int]:
    return {
        "A": latent.query_rank or 0,
        "C": latent.rank,
        "B": latent.rank + latent.rotary_head_dim,
        "U": heads * (latent.plain_head_dim + latent.value_head_dim),
    }


def _linear_dimensions(linear: LinearSizes) -> dict[str, int]:
    mixed = 2 * linear.key_width + linear.value_width
    return {
        "L": linear.key_width,
        "Z": linear.value_width,
        "N": linear.num_value_heads,
        "P": linear.value_head_dim,
        "W": linear.conv_width,
        "X": mixed,
        "Y": mixed + linear.value_width,
        "M": 2 * linear.num_value_heads,
    }


def dense_sizes(hf: HFConfig) -> ModelSizes:
    """Read the sizes of a dense model; KeyError, TypeError or ValueError if one is missing or not a number."""
    return replace(_backbone_sizes(hf), intermediate_size=int(hf["intermediate_size"]))


def moe_sizes(
    hf: HFConfig,
    num_experts: int,
    width: int,
    moe_layers: Sequence[int] | None = None,
    *,
    shared_width: int = 0,
) -> ModelSizes:
    """Read the sizes of a model with experts; raises like `dense_sizes`.

    Args:
        hf: Content of config.json.
        num_experts: Number of experts in each MoE layer.
        width: Width of an expert's feed-forward.
        moe_layers: 0-based layers that have experts. None means all.
        shared_width: Total width of the experts that process every token; 0 without such experts.
    """
    sizes = _backbone_sizes(hf)
    layers = tuple(range(sizes.num_layers) if moe_layers is None else moe_layers)
    width_of_dense = hf.get("intermediate_size") if len(layers) == sizes.num_layers else hf["intermediate_size"]
    return replace(
        sizes,
        intermediate_size=int(width_of_dense or 0),
        num_experts=num_experts,
        experts_per_token=int(hf["num_experts_per_tok"]),
        moe_intermediate_size=width,
        moe_layers=layers,
        shared_expert_intermediate_size=shared_width,
    )


def _backbone_sizes(hf: HFConfig) -> ModelSizes:
    hidden_size, num_heads = int(hf["hidden_size"]), int(hf["num_attention_heads"])
    return ModelSizes(
        architecture=architecture_of(hf),
        num_layers=int(hf["num_hidden_layers"]),
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=int(hf.get("num_key_value_heads") or num_heads),
        head_dim=int(hf.get("head_dim") or hidden_size // num_heads),
        intermediate_size=0,
        vocab_size=int(hf["vocab_size"]),
        max_position_embeddings=int(hf["max_position_embeddings"]),
        rope_theta=float(hf["rope_theta"]),
        num_experts=None,
        experts_per_token=0,
        moe_intermediate_size=0,
        moe_layers=(),
        is_tied=bool(hf.get("tie_word_embeddings")),
    )


def config_file(folder: Path) -> Path | None:
    """Return config.json of a Hugging Face folder, or of a Megatron checkpoint (in its hf/), if any."""
    candidates = (folder / "config.json", folder / "hf" / "config.json")
    return next((path for path in candidates if path.is_file()), None)


# What lists are made of, before any model is built.
_LARGEST = {
    "num_hidden_layers": 10_000,
    "first_k_dense_replace": 10_000,
    "num_nextn_predict_layers": 10_000,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 100_000),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group"), 100_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1_000_000),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 100_000_000),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 1_000_000_000),
}


def read_model_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Read the path and content of a model folder's config.json."""
    path = config_file(folder)
    expected = "a Hugging Face folder (config.json) or a Megatron checkpoint (hf/config.json)"
    if path is None:
        what = "has neither" if folder.is_dir() else "is a file" if folder.exists() else "does not exist"
        raise ConfigError(Problem("model.load", f"{folder}, which {what}", expected, _where_models_are(folder)))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        action = "Copy or download the model again."
        raise ConfigError(Problem("model.load", f"{path}: {error}", expected, action)) from error
    if not isinstance(content, dict):
        action = "Copy or download the model again."
        raise ConfigError(Problem("model.load", f"{path}: no JSON object", expected, action))
    model = text_model(content)
    for name, most in _LARGEST.items():
        value = model.get(name)
        if isinstance(value, int) and value > most:
            action = "Copy or download the model again."
            found = f"{path}: {name} = {value}"
            raise ConfigError(Problem("model.load", found, f"at most {most}, as no model has more", action))
    return path, model


def has_vision(folder: Path) -> bool:
    """Whether a model folder's config.json describes a model with vision, whose text model is trained."""
    path = config_file(folder)
    return path is not None and architecture_of(json.loads(path.read_text(encoding="utf-8"))) in TEXT_MODELS


def text_model(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the text model in a model with vision; any other config.json unchanged."""
    text, name = content.get("text_config"), TEXT_MODELS.get(architecture_of(content))
    if name is None or not isinstance(text, Mapping):
        return dict(content)
    of_both = {key: content[key] for key in _OF_BOTH if key in content}
    return {**text, **of_both, "architectures": [name]}


def _where_models_are(folder: Path) -> str:
    """Return advice on a name that is not a model folder."""
    of_run = sorted(path for path in folder.glob("checkpoints/step_*") if path.name[5:].isdigit())
    if of_run:
        return f"It is a run: name one of its checkpoints, such as {of_run[-1]}."
    if not folder.exists() and folder.parts[:1] == ("models",):
        return (
            f"Download it there (hf download OWNER/{folder.name} --local-dir {folder}, with the owner that the "
            "Hugging Face hub names, such as Qwen), or name the folder of the model."
        )
    if not folder.exists() and not folder.is_absolute() and len(folder.parts) == 2:
        return (
            f"Names on the Hugging Face hub are not read: download it first (hf download {folder} --local-dir "
            f"models/{folder.name}), then name the folder."
        )
    return "Name the folder of the model."


def architecture_of(content: Mapping[str, Any]) -> str:
    """Return the first of `architectures` in a config.json, or "no architecture"."""
    names = content.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "no architecture"


def end_tokens(hf_folder: Path, default: Any) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of generation_config.json if it has any, and of config.json otherwise.

    Nothing else is read from generation_config.json, because our config sets the sampling parameters.
    """
    file = hf_folder / "generation_config.json"
    ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ids = default if ids is None else ids
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (int(ids),)


TEXT_MODELS: Mapping[str, str] = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
"""Architectures with vision whose text model is trained, and the architecture of that text model."""
_OF_BOTH = ("tie_word_embeddings", "quantization_config", "transformers_version")


def rope_scaling_factor(hf: Mapping[str, Any]) -> float | None:
    """Return the factor of llama3's frequencies; None for other rotary frequencies."""
    return float(rope_table(hf)["factor"]) if rope_kind(hf) == "llama3" else None


def rope_kind(hf: Mapping[str, Any]) -> str:
    """Return the kind of a model's rotary frequencies, `rope_type`."""
    rope = rope_table(hf)
    return rope.get("rope_type") or rope.get("type") or "default"


def rotary_part(hf: Mapping[str, Any], default: float = 1.0) -> float:
    """Return the part of a head that is rotated."""
    return float(hf.get("partial_rotary_factor") or rope_table(hf).get("partial_rotary_factor") or default)


def yarn_table(hf: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return YaRN's numbers for Megatron; None for other rotary frequencies.

    transformers scales cosines and sines by the quotient of both mscales if both are set, and otherwise as if
    they were 1 and 0.
    """
    if rope_kind(hf) != "yarn":
        return None
    rope = rope_table(hf)
    both: tuple[Any, Any] = rope.get("mscale"), rope.get("mscale_all_dim")
    mscale, of_all = both if all(both) else (1.0, 0.0)
    return {**rope, "mscale": float(mscale), "mscale_all_dim": float(of_all)}


def rope_table(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary embedding's table that transformers reads; the older key takes precedence."""
    table = hf.get("rope_scaling") or hf.get("rope_parameters")
    return table if isinstance(table, Mapping) else {}

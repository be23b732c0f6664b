"""Layouts crossed with features: what is compared with one process.

Every layout is crossed with every feature value at least once (a covering set, not the full product), and every
pair of features meets in some layout.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

FEATURES: dict[str, tuple[str, ...]] = {
    "objective": ("dppo_topk_kl", "pg_is"),
    "routes": ("off", "replay"),
    "recompute": ("none", "selective", "full"),
    "optimizer": ("plain", "distributed", "distributed, overlapped"),
    "loss from": ("hidden states", "logits"),
    "attention": ("padded", "varlen"),
    "prefixes": ("alone", "shared"),
}


@dataclass(frozen=True)
class Case:
    """One layout with one value of each feature."""

    name: str
    world_size: int
    parallel: Mapping[str, int]
    features: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Name of the model; a layout's name begins with it unless it is the Qwen3-MoE."""
        return next(
            (name for name in (*OTHER_LAYOUTS, "dense", "uneven") if self.name.startswith(name)), "experts"
        )

    @property
    def is_dense(self) -> bool:
        """Whether the model has no experts."""
        return self.model == "dense"

    @property
    def reference(self) -> str:
        """The name of what one process gives, for each sample alone: the rest may not change that."""
        samples = ".trees" if self.has_trees else ""
        return f"{self.model}.{self.features['objective']}.{self.features['routes']}{samples}"

    @property
    def has_trees(self) -> bool:
        """Whether samples begin alike."""
        return self.features["prefixes"] != "alone"

    def tables(self) -> dict[str, dict[str, Any]]:
        """The case as tables of a config."""
        of = self.features
        overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
        recompute: dict[str, dict[str, Any]] = {
            "none": {},
            "selective": {
                "recompute_granularity": "selective",
                "recompute_modules": ["core_attn", "mlp" if self.is_dense else "moe"],
            },
            "full": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
        }
        return {
            "parallel": {
                **self.parallel,
                **(overlap if "overlapped" in of["optimizer"] else {}),
                "share_prefixes": of["prefixes"] == "shared",
            },
            "algorithm": {
                "preset": of["objective"],
                "loss_from": of["loss from"].replace(" ", "_"),
                "logits_chunk_bytes": 3000,  # some ten tokens
                **({"top_k": 4} if "topk" in of["objective"] else {}),
            },
            "rollout": {"routing_replay": of["routes"], "num_topk_log_probs": 4},
            "optimizer": {"distributed": of["optimizer"] != "plain"},
            "megatron": recompute[of["recompute"]] | self._router_losses(),
        }

    def _router_losses(self) -> dict[str, Any]:
        """Losses on routers and moves of expert biases, which come with one of the objectives."""
        if self.is_dense or self.features["objective"] != "pg_is":
            return {}
        losses = {
            "moe_z_loss_coeff": 0.02,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 0.3,
        }
        return losses | ({"moe_router_bias_update_rate": 0.1} if self.model in ("GLM", "DeepSeek") else {})


# A dense model with biases and tied embeddings: the first and the last pipeline stage share a weight.
DENSE_LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {
        "dense DP2": {},
        "dense TP2": {"tensor": 2},
        "dense PP2": {"pipeline": 2},
        "dense PP2 VPP2": {"pipeline": 2, "virtual_pipeline": 2},
        "dense CP2": {"context": 2},
    },
    4: {
        "dense TP2 PP2": {"tensor": 2, "pipeline": 2},
        "dense TP2 CP2": {"tensor": 2, "context": 2},
        "dense PP2 CP2": {"pipeline": 2, "context": 2},
    },
    8: {"dense TP2 CP2 PP2": {"tensor": 2, "context": 2, "pipeline": 2}},
}
LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {
        "DP2": {},
        "TP2": {"tensor": 2},
        "EP2": {"expert": 2},
        "TP2 EP2 ETP1": {"tensor": 2, "expert": 2, "expert_tensor": 1},
        "PP2": {"pipeline": 2},
        "PP2 VPP2": {"pipeline": 2, "virtual_pipeline": 2},
        "CP2": {"context": 2},
        "CP2 EP2": {"context": 2, "expert": 2},
    },
    4: {
        "DP4": {},
        "DP2 EP2": {"expert": 2},
        "EP4": {"expert": 4},
        "DP2 TP2": {"tensor": 2},
        "TP2 EP2 DP2": {"tensor": 2, "expert": 2, "expert_tensor": 1},
        "TP2 EP4": {"tensor": 2, "expert": 4, "expert_tensor": 1},
        "TP2 EP2 ETP2": {"tensor": 2, "expert": 2},
        "EP2 ETP2": {"expert": 2, "expert_tensor": 2},
        "TP2 PP2": {"tensor": 2, "pipeline": 2},
        "PP2 EP2": {"pipeline": 2, "expert": 2},
        "PP2 VPP2 EP2": {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
        "PP4": {"pipeline": 4},
        "CP2 EP2 DP2": {"context": 2, "expert": 2},
        "TP2 CP2": {"tensor": 2, "context": 2},
        "TP2 CP2 EP2": {"tensor": 2, "context": 2, "expert": 2, "expert_tensor": 1},
        "CP4": {"context": 4},
        "PP2 CP2": {"pipeline": 2, "context": 2},
        "TP2 PP2 VPP2": {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2},
        "TP2 PP2 VPP2 EP2": {
            "tensor": 2,
            "pipeline": 2,
            "virtual_pipeline": 2,
            "expert": 2,
            "expert_tensor": 1,
        },
        "PP2 VPP2 CP2": {"pipeline": 2, "virtual_pipeline": 2, "context": 2},
    },
    8: {
        "TP2 PP2 EP2": {"tensor": 2, "pipeline": 2, "expert": 2, "expert_tensor": 1},
        "TP2 PP2 EP2 ETP2": {"tensor": 2, "pipeline": 2, "expert": 2},
        "TP2 CP2 PP2": {"tensor": 2, "context": 2, "pipeline": 2},
        "PP2 VPP2 CP2 EP4": {"pipeline": 2, "virtual_pipeline": 2, "context": 2, "expert": 4},
        "TP2 CP2 PP2 EP4": {"tensor": 2, "context": 2, "pipeline": 2, "expert": 4, "expert_tensor": 1},
        "EP8": {"expert": 8},
    },
}


_KEPT = (
    *("DP2", "TP2", "EP2", "TP2 EP2 ETP1", "PP2", "CP2", "CP2 EP2"),
    *("EP2 ETP2", "TP2 PP2", "TP2 CP2 EP2", "PP2 EP2", "PP2 CP2", "TP2 EP2 ETP2"),
)
_WITH_CHUNKS = ("PP2 VPP2", "PP2 VPP2 EP2")
_WITH_WIDE_NORM = ("TP2", "TP2 EP2 ETP1", "PP2", "CP2", "TP2 PP2", "TP2 CP2 EP2")
_WITH_SINKS = ("TP2", "TP2 EP2 ETP1", "PP2", "PP2 VPP2", "CP2", "EP2 ETP2", "TP2 CP2 EP2")
_WITH_STATE = ("TP2", "TP2 EP2 ETP1", "PP2", "PP2 VPP2", "TP2 PP2", "PP2 EP2")
_WITHOUT_SHARING = ("Qwen3-Next", "Qwen3_5")
_WITH_GATE = ("TP2", "TP2 EP2 ETP1", "PP2", "CP2", "TP2 PP2", "TP2 CP2 EP2")


def _of_model(model: str, names: tuple[str, ...]) -> dict[int, dict[str, dict[str, int]]]:
    return {
        size: {f"{model} {name}": parallel for name, parallel in of_size.items() if name in names}
        for size, of_size in LAYOUTS.items()
    }


# Latent attention has three layers: two stages of a pipeline do not divide them.
OTHER_LAYOUTS = {
    "GLM": _of_model("GLM", (*_KEPT, *_WITH_CHUNKS)),
    "DeepSeek": _of_model("DeepSeek", _KEPT),
    "Qwen2-MoE": _of_model("Qwen2-MoE", _WITH_GATE),
    "MiniMax": _of_model("MiniMax", _WITH_WIDE_NORM),
    "gpt-oss": _of_model("gpt-oss", _WITH_SINKS),
    "Qwen3-Next": _of_model("Qwen3-Next", _WITH_STATE),
    "Qwen3_5": _of_model("Qwen3_5", ("TP2", "TP2 PP2")),
}
# Six layers, which four stages do not divide: 1, 2, 2 and 1.
UNEVEN_LAYOUTS: dict[int, dict[str, dict[str, int]]] = {2: {}, 4: {"uneven PP4": {"pipeline": 4}}, 8: {}}


def layouts_of(world_size: int) -> dict[str, dict[str, int]]:
    """All layouts of so many processes, of all models."""
    others = (of[world_size] for of in (DENSE_LAYOUTS, UNEVEN_LAYOUTS, *OTHER_LAYOUTS.values()))
    return {name: parallel for of in (LAYOUTS[world_size], *others) for name, parallel in of.items()}


def _rows() -> list[dict[str, str]]:
    """Values of all features such that each pair of values of two features occurs in some row."""
    names = list(FEATURES)
    product = [dict(zip(names, values, strict=True)) for values in itertools.product(*FEATURES.values())]

    def pairs(row: dict[str, str]) -> set[tuple[tuple[str, str], ...]]:
        return set(itertools.combinations(row.items(), 2))

    missing = set().union(*map(pairs, product))
    rows: list[dict[str, str]] = []
    while missing:
        best = max(product, key=lambda row: len(pairs(row) & missing))
        rows.append(best)
        missing -= pairs(best)
    return rows


def cases(world_size: int, at_most: int | None = None, of_others: int | None = None) -> Iterator[Case]:
    """The covering set on so many processes: each layout meets each value of each feature.

    Replayed routes with full recomputation come first for pipelines: they forward further micro-batches before
    they recompute one. The others each begin with another row, so that first cases alone mix features too.

    Args:
        world_size: Processes.
        at_most: Cases of each layout.
        of_others: Cases of each layout of the models in OTHER_LAYOUTS.
    """
    rows = _rows()
    for index, (name, parallel) in enumerate((LAYOUTS[world_size] | UNEVEN_LAYOUTS[world_size]).items()):
        yield from itertools.islice(_covering(name, world_size, parallel, rows, index), at_most)
    dense_rows = [row for row in rows if row["routes"] == "off"]
    for index, (name, parallel) in enumerate(DENSE_LAYOUTS[world_size].items()):
        yield from itertools.islice(_covering(name, world_size, parallel, dense_rows, index), at_most)
    for first, layouts in enumerate(OTHER_LAYOUTS.values()):
        for index, (name, parallel) in enumerate(layouts[world_size].items(), first):
            yield from itertools.islice(_covering(name, world_size, parallel, rows, index), of_others)


def _covering(
    name: str, world_size: int, parallel: dict[str, int], rows: list[dict[str, str]], index: int
) -> Iterator[Case]:
    if "context" in parallel or name.startswith(_WITHOUT_SHARING):
        rows = [{**row, "prefixes": "alone"} for row in rows]
    missing = {item for row in rows for item in row.items()}
    first = [row for row in rows if (row["routes"], row["recompute"]) == ("replay", "full")][:1]
    for row in (*(first if "pipeline" in parallel else ()), *rows[index % len(rows) :], *rows):
        if set(row.items()) & missing:
            missing -= set(row.items())
            yield Case(name, world_size, parallel, row)


def references() -> Iterator[Case]:
    """What one process computes, for each objective, with and without replay, and for the dense model."""
    with_routes = [
        (model, routes) for model in ("experts", "uneven", *OTHER_LAYOUTS) for routes in FEATURES["routes"]
    ]
    for model, routes in (*with_routes, ("dense", "off")):
        for objective in FEATURES["objective"]:
            features = {name: values[0] for name, values in FEATURES.items()}
            features |= {"objective": objective, "routes": routes, "loss from": "logits"}
            yield Case(model, 1, {}, features)
            yield Case(model, 1, {}, features | {"prefixes": "alone, in trees"})

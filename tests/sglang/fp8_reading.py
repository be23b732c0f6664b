"""Run by SGLang's interpreter: what its linears and models make of 8-bit floats, as JSON on the last line."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.layers.linear import ReplicatedLinear  # type: ignore[import-not-found]
from sglang.srt.layers.quantization import QUANTIZATION_METHODS  # type: ignore[import-not-found]
from sglang.srt.layers.quantization.fp8_utils import (  # type: ignore[import-not-found]
    per_block_cast_to_fp8,
)
from sglang.srt.layers.quantization.mxfp8_block_convert import (  # type: ignore[import-not-found]
    bf16_to_block_fp8_128,
)
from sglang.srt.model_loader.loader import DefaultModelLoader  # type: ignore[import-not-found]
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket  # type: ignore[import-not-found]

from tests.sglang.parameters_reading import build

QUANTISE_THEMSELVES = ("fp8", "w8a8_fp8")  # the methods of which a CPU can process unquantised weights


def keeps_its_loader(config: Any) -> bool:
    """Whether a linear's weight can be loaded again after its first processing."""
    linear = ReplicatedLinear(
        192,
        256,
        bias=False,
        quant_config=config,
        prefix="model.layers.0.self_attn.o_proj",
        params_dtype=torch.bfloat16,
    )
    linear.quant_method.process_weights_after_loading(linear)
    return hasattr(linear.weight, "weight_loader")


def values_of(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the parameters that a checkpoint fills, as bytes; scales of a quantised cache have defaults."""
    return {
        name: parameter.detach().clone().reshape(-1).view(torch.uint8)
        for name, parameter in model.named_parameters()
        if not name.endswith(("k_scale", "v_scale"))
    }


@torch.no_grad()
def load(model: Any, buckets: list[dict[str, torch.Tensor]]) -> None:
    """Load buckets as a server does between `begin` and `end`."""
    device = torch.device("cpu")
    DefaultModelLoader.restore_weights_before_loading(model, device)
    for bucket in buckets:
        flat = FlattenedTensorBucket(named_tensors=list(bucket.items()))
        model.load_weights(flat.reconstruct_tensors())
    DefaultModelLoader.postprocess_weights(model, device)


def reading(case: Path, port: int | None) -> dict[str, Any]:
    """What a server's parameters are after a first folder and a push, against a fresh load of a second folder.

    A case has the folders `first` and `second`, and `pushed/` with the buckets of a push.
    """
    model = build(str(case / "first"), port, "auto", "bfloat16")
    first = values_of(model)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    load(model, [load_file(file) for file in sorted((case / "pushed").glob("*.safetensors"))])
    pushed = values_of(model)
    fresh = values_of(build(str(case / "second"), None, "auto", "bfloat16"))
    moved = [name for name, value in model.named_parameters() if value.data_ptr() != addresses[name]]
    return {
        "differ": [name for name in fresh if not torch.equal(fresh[name], pushed[name])],
        "unchanged": [name for name in fresh if torch.equal(first[name], pushed[name])],
        "moved": moved,
        "quantised": sorted(
            name for name, value in model.named_parameters() if value.dtype == torch.float8_e4m3fn
        ),
    }


def scaling(file: str) -> dict[str, bool]:
    """Whether our values and scales of the weights in a file are SGLang's."""
    tensors = load_file(file)
    equal: dict[str, bool] = {}
    for name, function in (("plain", bf16_to_block_fp8_128), ("ue8m0", per_block_cast_to_fp8)):
        values, scales = function(tensors["weight"])
        equal[name] = torch.equal(values.view(torch.uint8), tensors[f"{name}.values"].view(torch.uint8))
        equal[f"{name} scales"] = torch.equal(scales, tensors[f"{name}.scales"])
    return equal


if __name__ == "__main__":
    port, weights, *cases = sys.argv[1:]
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    configs = {name: QUANTIZATION_METHODS[name]() for name in QUANTISE_THEMSELVES}
    configs["blocks"] = QUANTIZATION_METHODS["fp8"].from_config(blocks)
    found = {
        "methods": sorted(QUANTIZATION_METHODS),
        "keep": {name: keeps_its_loader(config) for name, config in configs.items()},
        "scaling": scaling(weights),
        "cases": [reading(Path(case), None if index else int(port)) for index, case in enumerate(cases)],
    }
    print()
    print(json.dumps(found))

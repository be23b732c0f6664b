"""Run by SGLang's interpreter: what its models make of pushed tensors, as JSON on the last line."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.configs.device_config import DeviceConfig  # type: ignore[import-not-found]
from sglang.srt.configs.load_config import LoadConfig  # type: ignore[import-not-found]
from sglang.srt.configs.model_config import ModelConfig  # type: ignore[import-not-found]
from sglang.srt.distributed import bootstrap  # type: ignore[import-not-found]
from sglang.srt.environ import envs  # type: ignore[import-not-found]
from sglang.srt.model_loader import get_model  # type: ignore[import-not-found]
from sglang.srt.runtime_context import SpawnRanks, publish  # type: ignore[import-not-found]
from sglang.srt.sampling.sampling_params import SamplingParams  # type: ignore[import-not-found]
from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]


def build(folder: str, port: int | None, load_format: str = "dummy", dtype: str = "float32") -> Any:
    """A model of a folder; `port` is for the process's first one."""
    is_refused = "GptOssForCausalLM" in Path(folder, "config.json").read_text()  # by this backend; none runs
    arguments = ServerArgs(
        model_path=folder,
        device="cpu",
        attention_backend="triton" if is_refused else "torch_native",
        sampling_backend="pytorch",
        dtype=dtype,
        load_format=load_format,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_radix_cache=True,  # a cache of recurrent states needs a GPU
        disable_shared_experts_fusion=True,
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    config = ModelConfig.from_server_args(arguments)
    if port is not None:
        bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    load = LoadConfig(load_format=load_format)
    return get_model(model_config=config, load_config=load, device_config=DeviceConfig("cpu"))


@torch.no_grad()
def reading(folder: str, port: int | None) -> dict[str, list[str]]:
    """Parameters that no tensor of the folder fills, and tensors that reach no parameter.

    Each tensor is filled with a different value.
    """
    model = build(folder, port)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    tensors = load_file(f"{folder}/model.safetensors")
    model.load_weights(tensors.items())
    arrived = {value for parameter in model.parameters() for value in parameter.unique().tolist()}
    return {
        "unfilled": [name for name, parameter in model.named_parameters() if parameter.isnan().any()],
        "dropped": [name for name, tensor in tensors.items() if tensor.flatten()[0].item() not in arrived],
    }


if __name__ == "__main__":
    port, *folders = sys.argv[1:]
    readings = [reading(folder, None if index else int(port)) for index, folder in enumerate(folders)]
    variables = [name for name in dir(type(envs)) if name.startswith("SGLANG_")]
    print()
    print(json.dumps([readings, list(SamplingParams.__struct_fields__), variables]))

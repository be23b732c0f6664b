"""Every tensor of a push has a parameter in SGLang's models, family by family; settings have SGLang's names."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.architectures.registry import FAMILIES, read_hf_config
from megatron_dppo.engines.base import Request, SamplingParams
from megatron_dppo.engines.sglang.options import server_environment
from megatron_dppo.engines.sglang.protocol import ServedModel, generation_of
from megatron_dppo.engines.sglang.sampling_settings import REFUSED_VARIABLES, SET_VARIABLES
from megatron_dppo.engines.sglang.server import free_port
from megatron_dppo.engines.weight_sync.factory import with_served_names
from tests.distributed.test_families import CASES as OF_FAMILIES
from tests.support.serving import PYTHON, VERSION
from tests.support.tiny_families import SIZES, config_of
from tools.versions import gpu_pins

SCRIPT = Path(__file__).with_name("parameters_reading.py")
# SGLang sets linear attention up for a CPU in another way: test_served_families has servers of it.
CASES = {
    case: (architecture, changes)
    for case, (architecture, changes) in OF_FAMILIES.items()
    if "linear_attention" not in FAMILIES[architecture].layer_types
}
OF_SGLANG_ALONE = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}
"""Fields of SamplingParams that SGLang fills."""


class Described:
    """An owner of weights that have shapes alone."""

    log_probs = None
    pipeline_place = (0, 1, True)

    def __init__(self, hf: dict[str, Any]) -> None:
        self._shapes = FAMILIES[hf["architectures"][0]].hf_shapes(hf)

    def describe_weights(self, *, of_own_stage: bool = False) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape, device="meta") for name, shape in self._shapes.items()}

    def weights(self, *, of_own_stage: bool = False, max_bytes: int | None = None) -> Any:
        yield from self.describe_weights().items()


def complete_config(folder: Path, architecture: str, **more: Any) -> dict[str, Any]:
    """Add the keys that publishers write, and more, to a config.json, and return what is read from it."""
    family, file = FAMILIES[architecture], folder / "config.json"
    hf: dict[str, Any] = json.loads(file.read_text()) | {"architectures": [architecture]}
    keys = dict(family.sglang.config_keys)
    if family.sglang.has_dense_layers and (sparse := family.sizes_of(hf).moe_layers):
        keys["first_k_dense_replace"] = sparse[0]
    file.write_text(json.dumps(hf | keys | more))
    return read_hf_config(folder)


def write_pushed(folder: Path, case: str) -> None:
    """Write config.json as publishers do, and the tensors of a push, each filled with a different number."""
    architecture, changes = CASES[case]
    family = FAMILIES[architecture]
    if family.sglang.derives_head_dim:
        changes = {"head_dim": SIZES["hidden_size"] // SIZES["num_attention_heads"]} | changes
    config_of(architecture, **changes).save_pretrained(folder)
    hf = complete_config(folder, architecture)
    owner = with_served_names(Described(hf), hf)
    tensors = {name: torch.full(t.shape, float(n + 1)) for n, (name, t) in enumerate(owner.weights())}
    assert tensors.keys() == owner.describe_weights().keys()
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the script prints, of every case."""
    folders = [tmp_path_factory.mktemp("pushed") for _ in CASES]
    for folder, case in zip(folders, CASES, strict=True):
        write_pushed(folder, case)
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", str(SCRIPT), str(free_port()), *map(str, folders)],
        env=server_environment(is_on_cpu=True),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_push_fills_every_parameter_and_sends_no_other(found: list[Any]) -> None:
    of_cases = dict(zip(CASES, found[0], strict=True))
    assert of_cases == {case: {"unfilled": [], "dropped": []} for case in CASES}


def test_a_request_names_every_sampling_parameter(found: list[Any]) -> None:
    body = generation_of(VERSION).generate_body(
        Request("a", (1,), (0, 0, 0)), SamplingParams(1), ServedModel(8, 1, (), None)
    )
    named = body["sampling_params"].keys()
    assert named | OF_SGLANG_ALONE | {"ebnf_full_assistant"} == set(found[1])


def test_the_environment_variables_are_sglang_s(found: list[Any]) -> None:
    names = {name for name in (*REFUSED_VARIABLES, *SET_VARIABLES) if name.startswith("SGLANG_")}
    unknown = [name for name in names if not any(known.startswith(name.rstrip("*")) for known in found[2])]
    assert not unknown


def test_gpu_pins_equal_sglangs_metadata() -> None:
    program = "import importlib.metadata as m, json; print(json.dumps(m.requires('sglang')))"
    ended = subprocess.run([str(PYTHON), "-c", program], capture_output=True, text=True, check=True)
    required = json.loads(ended.stdout.splitlines()[-1])
    pins = gpu_pins(VERSION)
    assert {f"{name}=={pins[name]}" for name in ("torch", "transformers")} <= set(required)

"""The file of a GPU's speeds: what is written is read, what is not valid is refused, and `plan` uses it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_dppo.cli import app
from megatron_dppo.errors import ConfigError
from megatron_dppo.plan import read_rates
from megatron_dppo.plan.cost import step_time
from megatron_dppo.plan.gpu_rates import ASSUMED, NUMBERS, RATES_FILE, GpuRates, write_rates
from tests.support.plan_models import QWEN3_30B, job_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_numbers_of_one_device_are_kept_and_those_of_another_are_not() -> None:
    assert read_rates(None) is ASSUMED
    write_rates(RATES_FILE, "H100", {"layer_flops_per_s": 3e14, "host_bytes_per_s": 5e10})
    write_rates(RATES_FILE, "H100", {"host_bytes_per_s": 6e10})
    found = read_rates(None)
    assert (found.device, found.measured) == ("H100", ("layer_flops_per_s", "host_bytes_per_s"))
    assert (found.layer_flops_per_s, found.host_bytes_per_s) == (3e14, 6e10)
    assert found.output_flops_per_s == ASSUMED.output_flops_per_s
    write_rates(RATES_FILE, "B200", {"host_bytes_per_s": 7e10})
    assert json.loads(RATES_FILE.read_text()) == {"device": "B200", "host_bytes_per_s": 7e10}


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ('{"device": "H100", "layer_flops": 1}', "rates.json: layer_flops"),
        ('{"device": "H100", "layer_flops_per_s": "1"}', "rates.json: layer_flops_per_s"),
        ('{"device": "H100", "layer_flops_per_s": 0}', "rates.json: layer_flops_per_s"),
        ('{"device": "H100", "layer_flops_per_s": Infinity}', "rates.json: layer_flops_per_s"),
        ('{"device": "H100", "host_bytes_per_s": true}', "rates.json: host_bytes_per_s"),
        ('{"layer_flops_per_s": 1e14}', "rates.json: device"),
        ("[1]", "rates.json"),
        ("{", "rates.json"),
        (None, "rates.json"),
    ],
)
def test_a_file_that_is_not_valid_is_refused_by_name(content: str | None, where: str) -> None:
    file = Path("rates.json")
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_rates(file)
    assert [problem.where for problem in error.value.problems] == [where]


def test_each_rate_changes_the_seconds_that_depend_on_it() -> None:
    job = job_of(QWEN3_30B, {"optimizer.offload": True, "algorithm.ref_kl_coef": 0.1}, num_gpus=1)
    before = step_time(job, job.layout)
    changed = {
        "layer_flops_per_s": {"compute", "reference"},
        "output_flops_per_s": {"compute", "reference"},
        "update_parameters_per_s": {"update"},
        "host_bytes_per_s": {"optimizer", "reference"},
    }
    assert set(changed) == set(NUMBERS)
    for name, parts in changed.items():
        rates = replace(ASSUMED, **{name: 2 * getattr(ASSUMED, name)})
        after = step_time(replace(job, machine=replace(job.machine, rates=rates)), job.layout)
        assert {part for part in vars(before) if getattr(before, part) > getattr(after, part)} == parts, name


def test_the_command_takes_the_file_and_says_what_it_has_from_it() -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(QWEN3_30B))
    Path("base.toml").write_text('[model]\nload = "model"\n[rollout]\nengine = "sglang"\n')
    command = ["plan", "base.toml", "--gpus", "16", "--gpu-memory", "80GB", "--json"]

    def planned(*arguments: str) -> tuple[float, GpuRates]:
        found = json.loads(CliRunner().invoke(app, [*command, *arguments]).stdout)
        rates = found["machine"]["rates"]
        return found["proposals"][0]["step_s"]["total"], GpuRates(
            **rates | {"measured": tuple(rates["measured"])}
        )

    slow, rates = planned()
    assert rates == ASSUMED
    write_rates(Path("mine.json"), "B200", {"layer_flops_per_s": 1e15})
    fast, rates = planned("--rates", "mine.json")
    assert fast < slow and (rates.device, rates.file) == ("B200", "mine.json")
    write_rates(RATES_FILE, "B200", {"layer_flops_per_s": 1e15})
    assert planned()[0] == fast
    text = CliRunner().invoke(app, command[:-1]).stdout
    assert f"Measured on one B200 ({RATES_FILE}): layers at 1000 TFLOP/s." in text
    assert "Measured on one NVIDIA H200 (examples/guides/gpu_measurements.md): the output layer" in text
    refused = CliRunner().invoke(app, [*command, "--rates", "missing.json"])
    assert refused.exit_code == 2 and "missing.json" in refused.stderr

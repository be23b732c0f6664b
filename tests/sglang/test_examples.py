"""The server arguments of the experiments are SGLang's."""

import pytest
from experiments import EXPERIMENTS, ROOT
from serving import PYTHON

from megatron_dppo.config.load import load_config
from megatron_dppo.engines.sglang.options import option_problems, read_options


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_installed_server_takes_the_arguments(experiment: str) -> None:
    options = read_options(PYTHON)
    assert options is not None
    config = load_config([ROOT / "examples" / experiment / "base.toml"])
    assert config.sglang
    assert list(option_problems(config.sglang, options)) == []

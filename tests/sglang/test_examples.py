"""The server arguments of the experiments are SGLang's."""

import pytest

from megatron_dppo.config.load import load_config
from megatron_dppo.engines.sglang.options import option_problems, read_options
from tests.support.experiments import EXPERIMENTS, ROOT
from tests.support.serving import PYTHON


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_installed_server_takes_the_arguments(experiment: str) -> None:
    options = read_options(PYTHON)
    assert options is not None
    config = load_config([ROOT / "examples" / experiment / "base.toml"])
    assert config.sglang
    assert list(option_problems(config.sglang, options)) == []

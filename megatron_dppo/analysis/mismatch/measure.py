"""Measures, writes and shows the mismatch of engine and trainer."""

import json
from pathlib import Path
from typing import Any

from megatron_dppo.analysis.mismatch.forwards import Measurement, measure
from megatron_dppo.analysis.mismatch.servers import require_usable_servers
from megatron_dppo.analysis.mismatch.table import show
from megatron_dppo.analysis.report.mismatch_plot import write_plot
from megatron_dppo.config.load import dump_config
from megatron_dppo.config.schema import Config
from megatron_dppo.metrics.token_mismatch import token_rows
from megatron_dppo.rollout.sglang.own_servers import own_servers
from megatron_dppo.run.session import joined_processes
from megatron_dppo.run_folder.folder import json_number
from megatron_dppo.run_folder.versions import versions
from megatron_dppo.runtime.jsonl import write_jsonl
from megatron_dppo.runtime.process import Runtime


def run(config: Config, folder: Path) -> None:
    """Measure, write, and show the mismatch; every rank of the job calls this.

    Raises:
        MegatronDppoError: What a run raises too; with several ranks the job ends instead.
    """
    with joined_processes(config) as runtime:
        runtime.on_main(lambda: _begin(config, folder))
        with own_servers(config, runtime):
            if config.rollout.engine == "sglang":
                runtime.on_main(lambda: require_usable_servers(config))
            found = measure(config, runtime)
        runtime.on_main(lambda: _write(folder, config, found, runtime))
        if runtime.is_main:
            show(found, folder)


def _begin(config: Config, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mismatch.toml").write_text(dump_config(config))


def _write(folder: Path, config: Config, found: Measurement, runtime: Runtime) -> None:
    """Write the files of the output folder; mismatch.json comes last."""
    write_jsonl(folder / "tokens.jsonl", token_rows(found.responses))
    title = f"{config.model.load.name}: {config.rollout.engine} engine, {config.model.dtype} trainer"
    write_plot(folder / "mismatch.html", found.responses, list(found.statistics), title)
    content: dict[str, Any] = {
        "engine": config.rollout.engine,
        "num_processes": runtime.world_size,
        "num_responses": len(found.responses),
        "rollout": {name.removeprefix("rollout/"): value for name, value in found.counts.metrics().items()},
        "seconds": found.seconds,
        **{
            routes: {name: json_number(value) for name, value in values.items()}
            for routes, values in found.statistics.items()
        },
        "versions": versions(),
        "config": config.model_dump(mode="json"),
    }
    (folder / "mismatch.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")

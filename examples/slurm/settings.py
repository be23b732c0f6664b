"""Prints a line about a config for the job: where servers run, the GPUs of each, and the run folder.

    python examples/slurm/settings.py --world-size 16 base.toml dppo.toml --set run.seed=1

With `--seed N`, of a job array, the run has that seed, and the folder seed_N in run.folder.

Servers that the job has to start are `nowhere`, `here` on the trainer's own nodes, or `elsewhere` on others.
Problems that `megatron-dppo check` finds end the job here, before any rank starts. So does a run folder that
another process uses; that of a node that was lost is waited for.
"""

import argparse
import json
import sys
from pathlib import Path

from megatron_dppo.checks import require_valid
from megatron_dppo.config.load import load_config
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, InUseError
from megatron_dppo.run.preemption import EXIT_CODE as START_AGAIN
from megatron_dppo.run_folder.lock import locked


def main() -> int:
    """Print the line. Return 2 if the config has problems, 75 if the run folder stays in use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--accept-changes", action="store_true")
    parser.add_argument("--rollout-only", type=Path)
    parser.add_argument("--train-only", type=Path)
    options = parser.parse_intermixed_args()
    try:
        config = load_config(options.configs, options.set)
        if options.seed is not None:
            folder = json.dumps(f"{config.run.folder}/seed_{options.seed}", ensure_ascii=False)
            of_seed = [f"run.seed={options.seed}", f"run.folder={folder}"]
            config = load_config(options.configs, [*options.set, *of_seed])
        require_valid(config, options.world_size, accepts_changes=options.accept_changes)
        print(engine_place(config), config.sglang.get("tp_size", 1), config.run.folder, flush=True)
        with locked(config.run.folder):  # waits for an attempt before, while no rank waits for this one
            pass
    except InUseError as error:
        print(error, file=sys.stderr)
        return START_AGAIN
    except ConfigError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def engine_place(config: Config) -> str:
    """Where the job is to start servers: nowhere, here or elsewhere."""
    options = config.rollout.sglang
    if config.rollout.engine != "sglang" or options.num_own_servers:
        return "nowhere"
    return "here" if options.colocated else "elsewhere"


if __name__ == "__main__":
    sys.exit(main())

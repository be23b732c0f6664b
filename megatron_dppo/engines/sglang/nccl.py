"""NCCL's settings that both ends of a process group must share: the trainer's, and a server's."""

import os
from collections.abc import Mapping

from megatron_dppo.config.schema import Config

CUMEM, NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"


def nccl_settings(config: Config) -> dict[str, str]:
    """Return the variables for the environment of trainer and servers; none unless NCCL carries weights.

    SGLang turns both off in its own process where neither the environment nor its arguments say otherwise
    (`_set_envs_and_config`); NCCL alone would have them on. Ranks of one group that differ in how they
    allocate buffers end in an invalid-usage error, or hang, at the first broadcast on a common node.
    """
    if config.rollout.engine != "sglang" or config.rollout.sglang.weight_sync != "distributed":
        return {}
    has_symmetric_memory = bool(config.sglang.get("enable_symm_mem", False))
    has_nvls = has_symmetric_memory or bool(config.sglang.get("enable_nccl_nvls", False))
    arguments = {CUMEM: has_symmetric_memory, NVLS: has_nvls}
    return {name: "1" if is_on else os.environ.get(name, "0") for name, is_on in arguments.items()}


def differences(own: Mapping[str, str], of_server: Mapping[str, str]) -> str | None:
    """Return where a server's settings differ from the trainer's own, for a message; none where they are equal.

    A server of an older version registered none, and is taken at its word.
    """
    found = [
        f"{name}={of_server[name]} there and {value} in the trainer"
        for name, value in own.items()
        if of_server.get(name, value) != value
    ]
    return f"{' and '.join(found)}; export the same values on every node" if found else None

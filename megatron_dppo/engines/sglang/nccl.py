"""NCCL settings that the trainer and a server must share in one process group."""

import os
from collections.abc import Mapping

from megatron_dppo.config.schema import Config

CUMEM, NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"


def nccl_settings(config: Config) -> dict[str, str]:
    """Return environment variables for trainer and servers; empty unless NCCL transfers the weights.

    SGLang turns both off in its own process unless the environment or its arguments set them
    (`_set_envs_and_config`). NCCL's own default is on. If ranks of one group allocate buffers differently, the
    first broadcast on a common node fails with an invalid-usage error, or hangs.
    """
    if config.rollout.engine != "sglang" or config.rollout.sglang.weight_sync != "distributed":
        return {}
    has_symmetric_memory = bool(config.sglang.get("enable_symm_mem", False))
    has_nvls = has_symmetric_memory or bool(config.sglang.get("enable_nccl_nvls", False))
    arguments = {CUMEM: has_symmetric_memory, NVLS: has_nvls}
    return {name: "1" if is_on else os.environ.get(name, "0") for name, is_on in arguments.items()}


def differences(own: Mapping[str, str], of_server: Mapping[str, str]) -> str | None:
    """Describe how a server's settings differ from the trainer's, or return None if they are equal.

    A server that an older version of this package registered has no settings here, and counts as equal.
    """
    found = [
        f"{name}={of_server[name]} there and {value} in the trainer"
        for name, value in own.items()
        if of_server.get(name, value) != value
    ]
    return f"{' and '.join(found)}; export the same values on every node" if found else None

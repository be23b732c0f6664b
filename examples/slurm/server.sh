#!/usr/bin/env bash
# One SGLang server of the engine's step: GPUS_PER_SERVER, then the arguments of the run.
gpus=$1
shift
exec "$PYTHON" -m megatron_dppo serve "$@" --name "node-$SLURM_PROCID" --set sglang.host=0.0.0.0 \
    --set "sglang.base_gpu_id=$((SLURM_LOCALID * gpus))"

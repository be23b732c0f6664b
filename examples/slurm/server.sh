#!/usr/bin/env bash
# One SGLang server of the engine's step: GPUS_PER_SERVER, then the arguments of the run.
gpus=$1
shift
((SLURM_LOCALID == 0)) || set -- "$@" --set "sglang.base_gpu_id=$((SLURM_LOCALID * gpus))"
exec "$PYTHON" -m megatron_dppo serve "$@" --name "node-$SLURM_PROCID" --set sglang.host=0.0.0.0

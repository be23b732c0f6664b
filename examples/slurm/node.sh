#!/usr/bin/env bash
# The trainer's task on one node: torchrun, with a log of its own, and below it a process for each GPU.
trap '' USR1 # SLURM signals all processes of a step, and torchrun would end; ranks answer it
if ((SLURM_STEP_NUM_NODES > 1)) && [[ -z ${GLOO_SOCKET_IFNAME:-} ]]; then # gloo takes that of the host's name
    peer=$MASTER_ADDR
    ((SLURM_NODEID)) || peer=$SECOND_ADDR
    device=$(ip -oneline route get "$peer" 2>/dev/null | sed -nE 's/.* dev ([^ ]+).*/\1/p')
    [[ -z $device ]] || export GLOO_SOCKET_IFNAME=$device
fi
exec "$PYTHON" -m torch.distributed.run --nnodes="$SLURM_STEP_NUM_NODES" --node-rank="$SLURM_NODEID" \
    --nproc-per-node="$PROCESSES_PER_NODE" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    --shutdown-timeout="${SAVE_SECONDS:-480}" --no-python \
    bash examples/slurm/rank.sh "$@" 2>"$LOGS/torchrun-$SLURM_NODEID.log"

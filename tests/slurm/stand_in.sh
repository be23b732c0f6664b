#!/usr/bin/env bash
# In the place of a job's Python: servers that only register, and a trainer that only says what it was given.
servers=$STAND_IN_FOLDER/servers
case "$*" in
    *settings.py*) exec "$STAND_IN_PYTHON" "$@" ;;
    *"megatron_dppo serve"*)
        mkdir -p "$servers"
        echo "$SLURMD_NODENAME: $*" >"$servers/node-$SLURM_PROCID.json"
        trap 'echo "$SLURMD_NODENAME: ended"; exit 0' TERM
        while :; do sleep 0.1; done
        ;;
    *)
        echo "$SLURMD_NODENAME: $*"
        trap 'touch "$STOPPED"; exit 0' USR1
        ready=$STAND_IN_FOLDER/ready
        touch "$ready"
        for ((i = 0; i < 10 * ${STAND_IN_SECONDS:-0}; i++)); do sleep 0.1; done
        ;;
esac

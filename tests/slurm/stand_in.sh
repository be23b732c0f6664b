#!/usr/bin/env bash
# In the place of a job's Python: servers that only register, and a trainer that only says what it was given, then
# waits in the first attempt, deaf to USR1.
case "$*" in
    *settings.py*) exec "$STAND_IN_PYTHON" "$@" ;;
    *"megatron_dppo serve"*)
        mkdir -p "$STAND_IN_FOLDER/servers"
        echo "$SLURMD_NODENAME: $*" >"$STAND_IN_FOLDER/servers/node-$SLURM_PROCID.json"
        trap 'echo "$SLURMD_NODENAME: ended"; exit 0' TERM
        while :; do sleep 0.1; done
        ;;
    *)
        echo "$SLURMD_NODENAME: $*"
        mkdir -p "$STAND_IN_FOLDER"
        touch "$STAND_IN_FOLDER/begun"
        [[ -n ${SLURM_RESTART_COUNT:-} ]] || sleep "${STAND_IN_SECONDS:-0}"
        ;;
esac

#!/usr/bin/env bash
# In the place of a job's Python: servers that only register, and a trainer that only says what it was given, then
# waits in the first attempt (STAND_IN_ATTEMPTS of them), deaf to USR1, or until there is a file "end". With STAND_IN_STATUS, the rank of the first
# node ends with it in the first attempt, and others wait for their end.
case "$*" in
    *settings.py*) exec "$STAND_IN_PYTHON" "$@" ;;
    *"megatron_dppo serve"*)
        mkdir -p "$STAND_IN_FOLDER/servers"
        echo "$SLURMD_NODENAME: $*" >"$STAND_IN_FOLDER/servers/node-$SLURM_PROCID.json"
        trap 'echo "$SLURMD_NODENAME: ended"; exit 0' TERM
        while :; do sleep 0.1; done
        ;;
    *"megatron_dppo train"*)
        ((SLURM_NODEID)) || exit "$STAND_IN_STATUS"
        sleep 1000
        ;;
    *)
        echo "$SLURMD_NODENAME: $*"
        mkdir -p "$STAND_IN_FOLDER"
        touch "$STAND_IN_FOLDER/begun"
        ((${SLURM_RESTART_COUNT:-0} < ${STAND_IN_ATTEMPTS:-1})) || exit 0
        if [[ -n ${STAND_IN_STATUS:-} ]]; then
            RANK=$SLURM_NODEID exec bash examples/slurm/rank.sh
        fi
        for ((tenths = 10 * ${STAND_IN_SECONDS:-0}; tenths > 0; tenths--)); do
            [[ ! -e $STAND_IN_FOLDER/end ]] || break
            sleep 0.1
        done
        ;;
esac

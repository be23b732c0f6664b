#!/usr/bin/env bash
# One process of the trainer. Status 75 says: stopped and saved, start me again. torchrun and srun would make
# another number of it, and of any other, and end the other ranks: so files among the logs say it.
exec 2>&1
trap : TERM # outlives the request to stop, as Python does
"$PYTHON" -m megatron_dppo train "$@"
status=$?
if ((status == 75)); then
    touch "$LOGS/stopped"
    status=0
fi
if ((status != 0)); then
    echo "rank $RANK on $(hostname) ended with status $status"
    set -o noclobber # the first rank of all nodes writes
    { echo "${SLURMD_NODENAME:-}" >"$LOGS/failed_on"; } 2>/dev/null
    ((status >= 128)) || { echo "$status" >"$LOGS/status"; } 2>/dev/null
fi
exit "$status"

#!/usr/bin/env bash
# One process of the trainer. Status 75 says: stopped and saved, start me again. torchrun and srun would make
# another number of it, and end the other ranks: so a file among the logs says it.
exec 2>&1
trap : TERM # outlives the request to stop, as Python does
"$PYTHON" -m megatron_dppo train "$@"
status=$?
if ((status == 75)); then
    touch "$LOGS/stopped"
    status=0
fi
((status == 0)) || echo "rank $RANK on $(hostname) ended with status $status"
exit "$status"

#!/usr/bin/env bash
# One process of the trainer. Status 75 says: stopped and saved, start me again. torchrun and srun would make another
# number of it, and end the other ranks: so it is kept in a file that the job looks for.
trap : TERM # outlives the request to stop, as Python does
"$PYTHON" -m megatron_dppo train "$@"
status=$?
if ((status == 75)); then
    touch "$STOPPED"
    status=0
fi
((status == 0)) || echo "rank $RANK on $(hostname) ended with status $status" >&2
exit "$status"

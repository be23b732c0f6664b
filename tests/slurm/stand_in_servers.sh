#!/usr/bin/env bash
# In the place of a job's Python: it is Python, but for servers, which are stand-ins.
case "$*" in
    *"megatron_dppo serve"*)
        shift 3
        exec "$STAND_IN_PYTHON" -m tests.slurm.serve_stand_in "$@"
        ;;
esac
exec "$STAND_IN_PYTHON" "$@"

# shellcheck shell=bash
# What a job says about a failed step, the status that it ends with, and another try. Sourced by arguments.sh.

show_error() { # status, folder of logs
    tail -n 40 "$2/trainer.log" >&2 || true # without a step there is no log
    grep -qs 'ended with status' "$2/trainer.log" || tail -n 20 "$2"/torchrun-*.log >&2 || true # no rank failed first
    echo "the trainer's step ended with $1; its logs: $2" >&2
}

own_status() { # status of the trainer's step, folder of logs: 2 for an error of the user's, otherwise 1
    # Launchers end the other ranks by signals, and return the largest status: 143, whatever happened.
    if [[ $1 != 0 && -s $2/status ]]; then
        cat "$2/status"
    else
        echo $(($1 < 128 ? $1 : 1))
    fi
}

node_at_fault() { # folder of logs: as failure detection or else the first rank that failed names it; nothing if unknown
    local host verbs='died|failed in|cannot be reached|is silent|sent what|did not come'
    host=$(sed -nE "s/^.*rank [0-9]+ \(host ([^,]+), pid [0-9]+\) ($verbs).*/\1/p" "$1/trainer.log" | head -n 1)
    [[ -n $host || ! -s $1/failed_on ]] || host=$(head -n 1 "$1/failed_on")
    echo "${host%%.*}"
}

retry() { # status, folder of logs of this attempt without its number: returns where there is no further try
    local number num_tries=1 node nodes attempt=${SLURM_RESTART_COUNT:-0}
    [[ $1 != 2 ]] || return 0
    for ((number = 0; number < attempt; number++)); do
        [[ ! -e $2$number/retried ]] || num_tries=$((num_tries + 1))
    done
    ((num_tries <= ${RETRIES:-0})) || return 0
    touch "$2$attempt/retried"
    node=$(node_at_fault "$2$attempt")
    nodes=$(ask sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --format=%N | sort -u) || nodes=''
    if ! grep -qxF -- "$node" <<<"$nodes" || (($(wc -l <<<"$nodes") <= SLURM_JOB_NUM_NODES)); then
        node='' # unknown, or there is no other
    fi
    requeue "failed with status $1, try $num_tries of $RETRIES" "$node"
}

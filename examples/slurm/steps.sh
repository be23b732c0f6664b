# shellcheck shell=bash
# Waits for a job's steps, and ends them. Sourced by arguments.sh.

trainer='' timer='' logs='' is_interrupted=0 is_stopping=0

# shellcheck disable=SC2034,SC2317,SC2329 # a trap calls it, and train.sh reads is_stopping
on_stop() { # the time limit is near, or a preemption
    is_interrupted=1 is_stopping=1
    [[ -z $logs || -n $trainer ]] || come_back "asked to stop before training began"
    # Without logs the run folder is not known yet, where it is seen if the attempt before came further.
    [[ -z $trainer ]] || kill -USR1 "$trainer" 2>/dev/null || return 0 # it has just ended
    (sleep "${SAVE_SECONDS:-480}" && come_back "asked to stop, and not saved in ${SAVE_SECONDS:-480} s") &
    timer=$!
}

end_timer() { # the trainer has ended: what is left of the time for saving is of no interest
    [[ -z $timer ]] || kill "$timer" 2>/dev/null || true
}

outlast() { # pid: returns its status, however many signals interrupt the waiting
    local status
    while :; do
        is_interrupted=0 status=0
        wait "$1" || status=$?
        ((is_interrupted && status > 128)) || return "$status"
    done
}

wait_for_servers() { # pid of the step, folder, how many, log
    until [[ $(find "$2" -name 'node-*.json' 2>/dev/null | wc -l) == "$3" ]]; do
        kill -0 "$1" 2>/dev/null || {
            tail -n 40 "$4"
            explain "no $3 servers: the engine's step ended" "it to outlast training" "Fix what $4 says."
        }
        sleep 1
    done
}

end_engine() { # pid of the engine's step, its name: first the servers, after a minute whatever is left of the step
    local tries=0
    # A signal to srun itself would kill its tasks at once.
    scancel --signal=TERM "$2" || echo "scancel did not reach the servers" >&2
    while kill -0 "$1" 2>/dev/null && ((++tries <= 300)); do sleep 0.2; done
    ((tries <= 300)) || { echo "the servers did not end; their step is killed" >&2; kill -KILL "$1" || true; }
    wait "$1" || true
}

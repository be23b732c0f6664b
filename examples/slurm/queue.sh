# shellcheck shell=bash
# How a job talks to SLURM's controller, which may be away for minutes, and goes back to the queue. Sourced by arguments.sh.

unset SLURM_EXPORT_ENV # of sbatch --export: the steps of a job have its whole environment
own_job=${SLURM_JOB_ID:-} # of an array, this element alone
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || own_job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}_$SLURM_ARRAY_TASK_ID

attempt=${SLURM_RESTART_COUNT:-0}

ask() { # COMMAND ...: what it prints, once the controller answers
    local answer tries=0
    until answer=$("$@"); do
        ((++tries < 30)) || { echo "no answer to '$*' for minutes: is SLURM's controller away?" >&2; exit 1; }
        echo "no answer to '$*'; again in 10 s" >&2
        sleep 10
    done
    printf '%s\n' "$answer"
}

time_limit() { # of the job, or of the array's element
    ask squeue --noheader --job "$own_job" --format=%l
}

requeue() { # REASON [node to leave out from now on]: does not return
    local said is_ended=0
    trap 'is_ended=1' TERM # the requeueing ends this script, but not before it says so
    until said=$(trap '' TERM && scontrol requeue "$own_job" 2>&1); do
        case $said in *disabled* | *denied* | *'Invalid job id'*)
            echo "attempt $attempt: $1, but it cannot go back to the queue: $said. Submit the job again: it goes on" \
                "from the last checkpoint" >&2
            exit 75 ;;
        esac
        ((is_ended == 0)) || exit 143
        echo "attempt $attempt: $1, and scontrol requeue says: $said; again in 10 s"
        sleep 10 || true
    done
    [[ -z ${2:-} ]] || exclude "$2"
    echo "attempt $attempt: $1; the job goes back to the queue, and on from the last checkpoint"
    trap - TERM
    ((is_ended)) || sleep infinity # ending by itself would complete the job
    exit 143
}

begin_attempt() { # run folder: sets logs, this attempt's folder in it, where the newest checkpoint is written down
    logs=$1/slurm/$SLURM_JOB_ID-attempt_$attempt
    newest=$1/checkpoints/latest
    mkdir -p "$logs"
    rm -f "$logs"/{stopped,stalled,status,failed_on} # of a job of the same number, before the controller lost its state
    cat "$newest" >"$logs/began_at" 2>/dev/null || true # there is none yet
}

come_back() { # REASON: requeues, unless the newest checkpoint is older than the attempt before. Does not return
    local before=${logs%_*}_$((attempt - 1))/began_at
    [[ -n $logs && -e $before && $(cat "$newest" 2>/dev/null) == "$(<"$before")" ]] || requeue "$1"
    echo "attempt $attempt: $1. found two attempts in a row without a new training step that is saved; expected one in" \
        "each. Give the job more time with --time, or find in $logs what takes so long, and submit it again" >&2
    touch "$logs/stalled"
    [[ -z $trainer ]] || kill -KILL "$trainer" 2>/dev/null || true # a timer cannot end the job by itself
    exit 1
}

exclude() { # NODE: SLURM allows it only for a job in the queue, and before this script has ended
    local others
    others=$(trap '' TERM && scontrol show job --oneliner "$own_job" | sed -nE 's/.* ExcNodeList=([^ (]+).*/\1/p') || true
    if (trap '' TERM && scontrol update "JobId=$own_job" "ExcNodeList=${others:+$others,}$1"); then
        echo "attempt $attempt: node $1 is left out from now on"
    else
        echo "attempt $attempt: node $1 could not be left out" >&2
    fi
}

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

exclude() { # NODE: SLURM allows it only for a job in the queue, and before this script has ended
    local others
    others=$(trap '' TERM && scontrol show job --oneliner "$own_job" | sed -nE 's/.* ExcNodeList=([^ (]+).*/\1/p') || true
    if (trap '' TERM && scontrol update "JobId=$own_job" "ExcNodeList=${others:+$others,}$1"); then
        echo "attempt $attempt: node $1 is left out from now on"
    else
        echo "attempt $attempt: node $1 could not be left out" >&2
    fi
}

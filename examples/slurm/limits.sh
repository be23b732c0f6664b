# shellcheck shell=bash
# Time limits: in seconds, and whether a job has time to train before it must save. Sourced by arguments.sh.

seconds_of() { # a time as SLURM takes and prints it, [DAYS-]HOURS:MINUTES:SECONDS or shorter; nothing if it is none
    local days=0 fields
    [[ $1 =~ ^([0-9]+-)?[0-9]+(:[0-9]+){0,2}$ ]] || return 0
    IFS=: read -ra fields <<<"${1#*-}"
    if [[ $1 == *-* ]]; then
        days=${1%%-*} fields+=(0 0)
    elif ((${#fields[@]} < 3)); then # minutes, or minutes and seconds
        fields=(0 "${fields[@]}" 0)
    fi
    echo $((((10#$days * 24 + 10#${fields[0]}) * 60 + 10#${fields[1]}) * 60 + 10#${fields[2]}))
}

require_time() { # EXPERIMENT, time limit: time to train, and after the signal to save. A job does not see --signal
    local save=${SAVE_SECONDS:-480} signal=${SBATCH_SIGNAL:-} limit needed action
    require_count SAVE_SECONDS "is the time limit for saving."
    [[ -n $signal ]] || signal=$(sed -n 's/^#SBATCH --signal=//p' "examples/$1/train.sbatch")
    [[ $signal =~ ^R?B:(SIG)?USR1@([1-9][0-9]*)$ ]] || explain "SBATCH_SIGNAL=$signal" "B:USR1@SECONDS" \
        "The job saves at this signal, SECONDS before its time limit."
    signal=${BASH_REMATCH[2]}
    action="Export SBATCH_SIGNAL=B:USR1@$((save * 5 / 4 + 1)) (a job does not see the option --signal), or lower SAVE_SECONDS."
    ((save < signal)) || explain "SAVE_SECONDS=$save, and a signal $signal s before the time limit" \
        "less time for saving than after the signal" "$action"
    limit=$(seconds_of "$2")
    [[ -n $limit ]] || explain "the time limit '$2'" "a time such as 24:00:00" "Submit the job with --time."
    needed=$((save * 5 / 2))
    [[ -z ${SBATCH_SIGNAL:-} ]] || needed=$((needed > 2 * signal ? needed : 2 * signal))
    action="Raise --time. Or, if saving takes less time, submit with SAVE_SECONDS=$((limit / 5)) in the environment and"
    action+=" --signal=B:USR1@$((limit / 4 + 1)); SBATCH_SIGNAL=B:USR1@$((limit / 4 + 1)) is the same."
    ((limit >= needed)) || explain "a time limit of $2, and SAVE_SECONDS=$save" "$(((needed + 59) / 60)) minutes or more" "$action"
}

require_limit() { # EXPERIMENT: SBATCH_TIMELIMIT, if it is set, fits its jobs, and the partition that SBATCH_PARTITION names
    local longest
    [[ -n ${SBATCH_TIMELIMIT:-} ]] || return 0
    require_time "$1" "$SBATCH_TIMELIMIT"
    [[ -n ${SBATCH_PARTITION:-} && $SBATCH_PARTITION != *,* ]] || return 0
    longest=$(sinfo --noheader "--partition=$SBATCH_PARTITION" --format=%l 2>/dev/null | head -n 1) || return 0
    longest=${longest// /}
    [[ -z $(seconds_of "$longest") ]] || (($(seconds_of "$SBATCH_TIMELIMIT") <= $(seconds_of "$longest"))) ||
        explain "a time limit of $SBATCH_TIMELIMIT" "$longest at most, the limit of partition $SBATCH_PARTITION" \
            "Set SBATCH_TIMELIMIT=$longest: a run goes back to the queue at its limit, and resumes."
}

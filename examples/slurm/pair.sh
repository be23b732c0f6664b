# shellcheck shell=bash
# Submits the runs of a comparison and the report on them. To be sourced in the repository's root by a *_compare.sbatch,
# which is a job itself, or is run by hand with SBATCH_ACCOUNT, SBATCH_PARTITION and SBATCH_TIMELIMIT set.

. examples/slurm/arguments.sh
submitted=() runs=()

leave_job() { # EXPERIMENT: what is submitted from here on has this job's account, partition and time limit, not its shape
    local name
    [[ -n ${SLURM_JOB_ID:-} ]] || return 0
    require_job "$1"
    SBATCH_TIMELIMIT=$(time_limit)
    export SBATCH_TIMELIMIT SBATCH_PARTITION=$SLURM_JOB_PARTITION
    [[ -z ${SLURM_JOB_ACCOUNT:-} ]] || export SBATCH_ACCOUNT=$SLURM_JOB_ACCOUNT
    for name in ${!SLURM_@}; do # they describe this job, and would shape the others
        [[ $name == SLURM_CONF ]] || unset "$name"
    done
}

submit_run() { # EXPERIMENT FOLDER NAME ALGORITHM.toml ...: a run for each of SEEDS, in FOLDER/NAME
    submitted+=("$(sbatch --parsable "--output=$2/slurm-%x-%j.out" "--job-name=$3" "--array=${SEEDS:-0}" \
        "examples/$1/train.sbatch" "${@:4}" --set "run.folder=$(toml_string "$2/$3")")")
    runs+=("$2/$3")
}

submit_report() { # FOLDER: once all runs are done
    local after=afterok report run said=''
    for run in "${!runs[@]}"; do
        after+=":${submitted[run]}"
        said+="${runs[run]##*/}: job ${submitted[run]}; "
    done
    report=$(sbatch --parsable "--output=$1/slurm-%x-%j.out" "--dependency=$after" --kill-on-invalid-dep=yes \
        examples/slurm/report.sbatch "$1/report.html" "${runs[@]}")
    echo "${said}then job $report writes $1/report.html"
}

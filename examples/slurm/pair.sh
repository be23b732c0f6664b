# shellcheck shell=bash
# Submits the runs of a comparison and the report on them. To be sourced in the repository's root by a *_compare.sbatch,
# which is a job itself, or is run by hand with SBATCH_ACCOUNT, SBATCH_PARTITION and SBATCH_TIMELIMIT set.

. examples/slurm/arguments.sh
submitted=() runs=()

of_gpus=(SBATCH_GPUS_PER_NODE SBATCH_GPUS SBATCH_GRES) # not for the report

prepare_to_submit() { # EXPERIMENT: jobs get what SBATCH_ variables say, or else this job has, but not its shape
    local name value shown=''
    if [[ -z ${SBATCH_GPUS_PER_NODE:-} && ${SBATCH_GRES:-} =~ (^|,)(gres[:/])?gpu:([^,:]+:[0-9]+)(\(|,|$) ]]; then
        export SBATCH_GPUS_PER_NODE=${BASH_REMATCH[3]} # SLURM refuses a type there, and none in the script
    fi
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        for name in ACCOUNT PARTITION QOS RESERVATION; do
            value=SLURM_JOB_$name name=SBATCH_$name
            [[ -z ${!value:-} || -n ${!name:-} ]] || export "$name=${!value}"
        done
        if [[ -z ${SBATCH_CONSTRAINT:-} ]]; then # no variable of a job has it
            shown=$(timeout 20 scontrol show job --oneliner "$own_job" 2>&1) ||
                echo "this job's --constraint is not known. If it has one, set SBATCH_CONSTRAINT: $shown" >&2
        fi
        if [[ $shown =~ \ Features=([^ ]+) && ${BASH_REMATCH[1]} != '(null)' ]]; then
            export SBATCH_CONSTRAINT=${BASH_REMATCH[1]}
        fi
        for name in ${!SLURM_@}; do # they describe this job, and would shape the others
            [[ $name == SLURM_CONF ]] || unset "$name"
        done
    fi
    require_limit "$1"
}

leave_job() { # EXPERIMENT: what is submitted from here on is as this job is, with its time limit
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        require_job "$1"
        SBATCH_TIMELIMIT=$(time_limit)
        export SBATCH_TIMELIMIT
        unset SBATCH_{ACCOUNT,PARTITION,QOS,RESERVATION,CONSTRAINT} # options of sbatch may have replaced them
    fi
    prepare_to_submit "$1"
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
    report=$(unset "${of_gpus[@]}" && sbatch --parsable "--output=$1/slurm-%x-%j.out" "--dependency=$after" --kill-on-invalid-dep=yes \
        examples/slurm/report.sbatch "$1/report.html" "${runs[@]}")
    echo "${said}then job $report writes $1/report.html"
}

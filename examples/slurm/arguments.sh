# shellcheck shell=bash
# What the job scripts require, and how they say what is missing. To be sourced in the repository's root.

. examples/slurm/containers.sh
. examples/slurm/failure.sh
. examples/slurm/limits.sh
. examples/slurm/network.sh
. examples/slurm/queue.sh
. examples/slurm/steps.sh
PYTHON=$(python_in "$container_trainer")
export PYTHON

explain() { # found, expected, what to do
    printf 'found %s; expected %s. %s\n' "$@" >&2
    exit 2
}

toml_string() { # TEXT: as --set takes it, whatever quotes it holds
    local text=${1//\\/\\\\}
    printf '"%s"' "${text//\"/\\\"}"
}

split_arguments() { # ARGUMENT ...: adds to arguments, and to of_trainer what megatron-dppo train alone takes
    while (($#)); do
        case $1 in
            --set) arguments+=("${@:1:2}") && shift $(($# > 1)) ;;
            --rollout-only | --train-only) of_trainer+=("${@:1:2}") && shift $(($# > 1)) ;;
            --set=* | [^-]*) arguments+=("$1") ;;
            *) of_trainer+=("$1") ;;
        esac
        shift
    done
}

require_job() { # EXPERIMENT ...
    local limit config submit="Submit it in the repository's root: sbatch --account=NAME --time=24:00:00"
    submit+=" examples/$1/train.sbatch ALGORITHM.toml; or set SBATCH_ACCOUNT and SBATCH_TIMELIMIT once."
    [[ -n ${SLURM_JOB_ID:-} ]] || explain "no SLURM job" "to be started by one" "$submit"
    [[ -z ${SLURM_HET_SIZE:-} ]] || explain "a heterogeneous job of $SLURM_HET_SIZE components, of which one would train" \
        "one job for all nodes" "Submit it without ':'. NUM_ENGINE_NODES=N gives the last nodes to SGLang's servers."
    limit=$(time_limit)
    [[ $limit != UNLIMITED ]] ||
        explain "a job without a time limit" "one, before which the run is saved and requeued" "$submit"
    require_time "$1" "$limit"
    [[ -n ${SLURM_JOB_ACCOUNT:-} ]] || config=$(ask scontrol show config)
    [[ -n ${SLURM_JOB_ACCOUNT:-} ]] || ! grep -q '^AccountingStorageType.*slurmdbd' <<<"$config" ||
        explain "a job without an account" "one, on a cluster that keeps accounts" "$submit"
}

require_algorithm() { # EXPERIMENT ALGORITHM.toml ...
    local file=${2:-} found=() path
    for path in "examples/$1"/*.toml; do
        [[ $path == */base.toml ]] || found+=("${path##*/}")
    done
    [[ " ${found[*]} " == *" $file "* ]] || explain "${file:-no algorithm}" "one of ${found[*]}" \
        "These are the TOML files in examples/$1; further files and --set go after it."
}

require_count() { # NAME of a variable, what it says
    [[ ${!1:-0} =~ ^(0|[1-9][0-9]*)$ ]] || explain "$1='${!1}'" "a number" "It $2"
}

require_engine_nodes() { # num_engine_nodes, nodes of the job: before the config is read
    [[ $1 =~ ^(0|[1-9][0-9]*)$ ]] || explain "NUM_ENGINE_NODES='$1'" "a number of nodes" \
        "It says how many of the job's nodes, the last ones, are for SGLang servers."
    (($1 < $2)) || explain "NUM_ENGINE_NODES=$1 in a job of $2 node(s)" "one node for the trainer at least" \
        "Ask for more nodes: sbatch --nodes=N, or for fewer servers."
}

require_place() { # engine_on, num_engine_nodes
    [[ $1 != nowhere || $2 == 0 ]] || explain "NUM_ENGINE_NODES=$2" "0, where no server is to be started" \
        "Set rollout.engine = 'sglang' and no rollout.sglang.num_own_servers, or NUM_ENGINE_NODES=0."
    [[ $1 != elsewhere || $2 != 0 ]] || explain "servers that share no GPU with the trainer, and no node" \
        "NUM_ENGINE_NODES=N" "Or set rollout.sglang.colocated, or rollout.sglang.num_own_servers."
    [[ $1 != here || $2 == 0 ]] || explain "NUM_ENGINE_NODES=$2 and rollout.sglang.colocated" "one of them" \
        "Add --set rollout.sglang.colocated=false --set rollout.sglang.weight_sync=distributed."
}

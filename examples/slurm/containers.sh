# shellcheck shell=bash
# The images of a job's steps, as options of pyxis, and what is wrong with them. Sourced by arguments.sh.

container_trainer=${CONTAINER_TRAINER-${CONTAINER:-}} container_server=${CONTAINER_SERVER-${CONTAINER:-}}

python_in() { # image, or nothing: the interpreter of its steps
    local python=${MEGATRON_DPPO_VENV:-.venv}/bin/python
    if [[ -n ${MEGATRON_DPPO_VENV:-} || (-x $python && -z $1) ]]; then echo "$python"; else echo python3; fi
}

container_options() { # image, or nothing: one option of srun per line, for its steps
    [[ -z $1 ]] || printf '%s\n' "--container-image=$1" "--container-workdir=$PWD" \
        "--container-mounts=${CONTAINER_MOUNTS:-$PWD:$PWD}"
}

require_containers() { # before anything starts: an image's file is there, and mounts are pairs of absolute paths
    local name image mount part mounts=()
    for name in CONTAINER CONTAINER_TRAINER CONTAINER_SERVER; do
        image=${!name:-}
        [[ $image != *[[:space:]]* ]] || explain "$name='$image'" "an image's name or file without blanks" "Rename it."
        [[ $image != /* && $image != ./* && $image != *.sqsh ]] || [[ -r $image ]] ||
            explain "$name=$image, which is no file that can be read" "an image" \
                "Make it (enroot import), or name one of a registry: REGISTRY#NAME:TAG."
    done
    [[ -n $container_trainer$container_server || -z ${CONTAINER_MOUNTS:-} ]] ||
        explain "CONTAINER_MOUNTS and no image" "one" "Set CONTAINER, CONTAINER_TRAINER or CONTAINER_SERVER."
    IFS=, read -ra mounts <<<"${CONTAINER_MOUNTS:-}"
    for mount in "${mounts[@]}"; do
        IFS=: read -r part _ <<<"$mount"
        [[ $mount == /*:/* && -e $part ]] || explain "'$mount' in CONTAINER_MOUNTS" \
            "FOLDER:FOLDER, absolute, of which the first exists" "Correct it; commas separate several."
    done
}

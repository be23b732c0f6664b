# shellcheck shell=bash
# The images of a job's steps: options of pyxis or a command of Apptainer, and what is wrong with them. Sourced by arguments.sh.

container_trainer=${CONTAINER_TRAINER-${CONTAINER:-}} container_server=${CONTAINER_SERVER-${CONTAINER:-}}

python_in() { # image, or nothing: the interpreter of its steps
    local python=${MEGATRON_DPPO_VENV:-.venv}/bin/python
    if [[ -n ${MEGATRON_DPPO_VENV:-} || (-x $python && -z $1) ]]; then echo "$python"; else echo python3; fi
}

is_for_apptainer() { # image: its file, a folder, or an address; pyxis takes .sqsh and REGISTRY#NAME
    [[ $1 == *.sif || $1 == *://* || -d $1 ]]
}

linked() { # what links lead to outside of the repository, of its folders of models, data and runs, and in them
    find models data runs models/ data/ runs/ -maxdepth 1 -type l -exec realpath -e -- {} + 2>/dev/null |
        grep -v "^$(pwd -P)/" | sort -u
}

mounts() { # FOLDER:FOLDER, one a line
    if [[ -n ${CONTAINER_MOUNTS:-} ]]; then tr , '\n' <<<"$CONTAINER_MOUNTS"; else { echo "$PWD" && linked; } | sed 's/.*/&:&/'; fi
}

step_options() { # image, or nothing: options of srun for its steps, one a line
    [[ -z $1 ]] || is_for_apptainer "$1" ||
        printf '%s\n' "--container-image=$1" "--container-workdir=$PWD" "--container-mounts=$(mounts | paste -sd ,)"
}

inside() { # image, or nothing: the command of its steps starts with these words, one a line
    [[ -n $1 ]] && is_for_apptainer "$1" || return 0
    printf '%s\n' apptainer exec --nv --pwd "$PWD"
    mounts | sed 's/^/--bind=/'
    printf '%s\n' "$1"
}

is_mounted() { # path
    local mount to
    while IFS=: read -r _ to _; do
        [[ $1 != "$to" && $1 != "${to%/}"/* ]] || return 0
    done < <(mounts)
    return 1
}

require_mounted() { # run folder: one that no mount contains would be gone with the container
    local place
    [[ -n $container_trainer$container_server ]] || return 0
    place=$(realpath -m -- "$1")
    is_mounted "$place" && return 0
    while [[ ! -e $place ]]; do place=$(dirname "$place"); done
    explain "run.folder = $1, which no mount contains" "one that the containers share" \
        "Set CONTAINER_MOUNTS=$(mounts | paste -sd ,),$place:$place"
}

require_containers() { # before anything starts: an image's file is there, and mounts are pairs of absolute paths
    local name image mount part place mounts=()
    for name in CONTAINER CONTAINER_TRAINER CONTAINER_SERVER; do
        image=${!name:-}
        [[ $image != *[[:space:]]* ]] || explain "$name='$image'" "an image's name or file without blanks" "Rename it."
        [[ $image != /* && $image != ./* && $image != *.sqsh && ($image != *.sif || $image == *://*) ]] || [[ -r $image ]] ||
            explain "$name=$image, which is no file that can be read" "an image" \
                "Make it (enroot import, apptainer build), or name one of a registry: REGISTRY#NAME:TAG or docker://NAME:TAG."
        [[ -z $image ]] || ! is_for_apptainer "$image" || command -v apptainer >/dev/null ||
            explain "$name=$image and no apptainer on PATH" "it" "Load its module, or name an image for pyxis."
    done
    [[ -n $container_trainer$container_server ]] || [[ -z ${CONTAINER_MOUNTS:-} ]] ||
        explain "CONTAINER_MOUNTS and no image" "one" "Set CONTAINER, CONTAINER_TRAINER or CONTAINER_SERVER."
    IFS=, read -ra mounts <<<"${CONTAINER_MOUNTS:-}"
    for mount in "${mounts[@]}"; do
        IFS=: read -r part _ <<<"$mount"
        [[ $mount == /*:/* && -e $part ]] || explain "'$mount' in CONTAINER_MOUNTS" \
            "FOLDER:FOLDER, absolute, of which the first exists" "Correct it; commas separate several."
    done
    [[ -n $container_trainer$container_server ]] || return 0
    while IFS= read -r place; do
        is_mounted "$place" || explain "$place, of the repository or where a link in it leads, in no mount" \
            "CONTAINER_MOUNTS to contain it" "Add $place:$place, or set no CONTAINER_MOUNTS: it is mounted then."
    done < <(echo "$PWD" && linked)
}

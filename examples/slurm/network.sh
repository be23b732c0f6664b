# shellcheck shell=bash
# Addresses by which the trainer's nodes reach each other. A host's own name may mean loopback there. Sourced by arguments.sh.

address_of() { # NODE: where SLURM reaches it, as a number, and not on loopback if there is a choice
    local place addresses
    place=$(ask scontrol show node --oneliner "$1" | sed -nE 's/.* NodeAddr=([^ ]+).*/\1/p')
    addresses=$(getent ahosts "${place:-$1}" | awk '{print $1}' | sort -u)
    grep -vE '^(127\.|::1$)' <<<"$addresses" || printf '%s\n' "${addresses:-$place}"
}

meet_at() { # NODE ...: the trainer's, this one first. Sets MASTER_ADDR, and SECOND_ADDR of the second node
    export MASTER_ADDR=127.0.0.1 SECOND_ADDR=
    (($# > 1)) || return 0
    SECOND_ADDR=$(address_of "$2" | head -n 1)
    MASTER_ADDR=$(ip -oneline route get "$SECOND_ADDR" 2>/dev/null | sed -nE 's/.* src ([^ ]+).*/\1/p')
    [[ -n $MASTER_ADDR ]] || MASTER_ADDR=$(address_of "$1" | head -n 1)
}

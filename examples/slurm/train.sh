#!/usr/bin/env bash
# The job of an experiment's train.sbatch: EXPERIMENT ALGORITHM.toml [MORE.toml ...] [--set KEY=VALUE ...]
# The README beside this file says what it does, and which variables it reads.
set -euo pipefail
. examples/slurm/arguments.sh
require_job "$@"
require_algorithm "$@"
require_containers
num_engine_nodes=${NUM_ENGINE_NODES:-0}
require_engine_nodes "$num_engine_nodes" "$SLURM_JOB_NUM_NODES"
num_trainer_nodes=$((SLURM_JOB_NUM_NODES - num_engine_nodes))
export PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
step=(srun --kill-on-bad-exit=1 --cpu-bind=none --overlap)
mapfile -t in_trainer < <(container_options "$container_trainer")
mapfile -t in_server < <(container_options "$container_server")

arguments=("examples/$1/base.toml" "examples/$1/$2") of_trainer=() of_seed=()
split_arguments "${@:3}"
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || of_seed=(--seed "$SLURM_ARRAY_TASK_ID")
settings=$("${step[@]}" "${in_trainer[@]}" --nodes=1 --ntasks=1 "$PYTHON" examples/slurm/settings.py "${arguments[@]}" "${of_trainer[@]}" \
    "${of_seed[@]}" --world-size $((num_trainer_nodes * PROCESSES_PER_NODE)))
read -r engine_on gpus_per_server folder <<<"$settings"
require_place "$engine_on" "$num_engine_nodes"
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    arguments+=(--set "run.seed=$SLURM_ARRAY_TASK_ID" --set "run.folder=$(toml_string "$folder")")
fi
attempt=${SLURM_RESTART_COUNT:-0}
logs=$folder/slurm/$SLURM_JOB_ID-attempt_$attempt
mkdir -p "$logs"
export LOGS=$logs MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((15000 + SLURM_JOB_ID % 10000))}
MASTER_ADDR=$(hostname)

trainer='' engine='' is_interrupted=0
requeue() {
    echo "attempt $attempt: $1; the job goes back to the queue, and on from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    sleep infinity # until the requeueing ends this script: ending by itself would complete the job
}
# shellcheck disable=SC2317,SC2329 # a trap calls it
on_stop() { # the time limit is near, or a preemption
    is_interrupted=1
    [[ -n $trainer ]] || requeue "asked to stop before training began"
    kill -USR1 "$trainer"
    (sleep "${SAVE_SECONDS:-480}" && requeue "asked to stop, and not saved in ${SAVE_SECONDS:-480} s") &
}
trap on_stop USR1

if [[ $engine_on != nowhere ]]; then
    nodes=("--nodes=$num_trainer_nodes")
    ((num_engine_nodes == 0)) || nodes=("--nodes=$num_engine_nodes" "--relative=$num_trainer_nodes")
    per_node=${SERVERS_PER_NODE:-$((${SLURM_GPUS_ON_NODE:-1} / gpus_per_server))}
    ((per_node > 0)) || explain "sglang.tp_size = $gpus_per_server" "a node's GPUs at most" "Lower it."
    num_servers=$((per_node * (num_engine_nodes ? num_engine_nodes : num_trainer_nodes)))
    key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    export MEGATRON_DPPO_SGLANG_API_KEY=${MEGATRON_DPPO_SGLANG_API_KEY:-$key}
    rm -f "$folder"/servers/node-*.json # of an attempt that was killed
    PYTHON=$(python_in "$container_server") "${step[@]}" "${in_server[@]}" "${nodes[@]}" "--ntasks=$num_servers" "--ntasks-per-node=$per_node" \
        "--output=$logs/engine.log" bash examples/slurm/server.sh "$gpus_per_server" "${arguments[@]}" &
    engine=$!
    wait_for_servers "$engine" "$folder/servers" "$num_servers" "$logs/engine.log"
fi
echo "attempt $attempt: $num_trainer_nodes x $PROCESSES_PER_NODE processes; logs in $logs"
"${step[@]}" "${in_trainer[@]}" "--nodes=$num_trainer_nodes" "--ntasks=$num_trainer_nodes" --ntasks-per-node=1 \
    "--output=$logs/trainer.log" bash examples/slurm/node.sh "${arguments[@]}" "${of_trainer[@]}" &
trainer=$!
while :; do # a signal interrupts wait
    is_interrupted=0 status=0
    wait "$trainer" || status=$?
    ((is_interrupted)) || break
done
# Step 0 looked at the config, step 1 is the engine; a signal to srun itself would kill its tasks at once.
[[ -z $engine ]] || { scancel --signal=TERM "$SLURM_JOB_ID.1" 2>/dev/null || true; wait "$engine" || true; }
[[ ! -e $logs/stopped ]] || requeue "stopped and saved"
((status == 0)) || show_error "$status" "$logs"
exit "$status"

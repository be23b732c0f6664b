#!/usr/bin/env bash
# The job of an experiment's train.sbatch: EXPERIMENT ALGORITHM.toml [MORE.toml ...] [--set KEY=VALUE ...]
# The README beside this file says what it does, and which variables it reads.
set -euo pipefail
. examples/slurm/arguments.sh
trap on_stop USR1
require_job "$@"
require_algorithm "$@"
require_containers
require_count RETRIES "says how often a job starts again that failed otherwise than by an error of yours."
engine=''
require_engine_nodes "${NUM_ENGINE_NODES:=0}" "$SLURM_JOB_NUM_NODES"
num_trainer_nodes=$((SLURM_JOB_NUM_NODES - NUM_ENGINE_NODES))
export PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
# A node's tasks are neighbours, whatever the cluster's default: a server shares the GPUs of its node's ranks.
step=(srun --kill-on-bad-exit=1 --cpu-bind=none --overlap --distribution=block)
mapfile -t on_trainer < <(step_options "$container_trainer")
mapfile -t in_trainer < <(inside "$container_trainer")
mapfile -t on_server < <(step_options "$container_server")
mapfile -t in_server < <(inside "$container_server")

arguments=("examples/$1/base.toml" "examples/$1/$2") of_trainer=() of_seed=()
split_arguments "${@:3}"
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || of_seed=(--seed "$SLURM_ARRAY_TASK_ID")
exec {settings}< <("${step[@]}" "${on_trainer[@]}" --nodes=1 --ntasks=1 "${in_trainer[@]}" "$PYTHON" examples/slurm/settings.py \
    "${arguments[@]}" "${of_trainer[@]}" "${of_seed[@]}" --world-size $((num_trainer_nodes * PROCESSES_PER_NODE)))
status=0
outlast $! || status=$?
((status == 0 || status == 75)) || exit "$status"
read -r engine_on gpus_per_server folder <&"$settings" || ((status))
require_place "$engine_on" "$NUM_ENGINE_NODES"
require_mounted "$folder"
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    arguments+=(--set "run.seed=$SLURM_ARRAY_TASK_ID" --set "run.folder=$(toml_string "$folder")")
fi
begin_attempt "$folder"
((status == 0)) || come_back "its run folder is in use"
((is_stopping == 0)) || come_back "asked to stop before training began"
# Another port in each attempt: a node that was lost may still run the attempt before.
export LOGS=$logs MASTER_PORT=${MASTER_PORT:-$((15000 + (SLURM_JOB_ID + 101 * attempt) % 10000))}
mapfile -t trainer_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n "$num_trainer_nodes")
meet_at "${trainer_nodes[@]}"

if [[ $engine_on != nowhere ]]; then
    nodes=("--nodes=$num_trainer_nodes")
    ((NUM_ENGINE_NODES == 0)) || nodes=("--nodes=$NUM_ENGINE_NODES" "--relative=$num_trainer_nodes")
    per_node=${SERVERS_PER_NODE:-$((${SLURM_GPUS_ON_NODE:-1} / gpus_per_server))}
    ((per_node > 0)) || explain "sglang.tp_size = $gpus_per_server" "a node's GPUs at most" "Lower it."
    num_servers=$((per_node * (NUM_ENGINE_NODES ? NUM_ENGINE_NODES : num_trainer_nodes)))
    key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
    export MEGATRON_DPPO_SGLANG_API_KEY=${MEGATRON_DPPO_SGLANG_API_KEY:-$key}
    rm -f "$folder"/servers/node-*.json # of an attempt that was killed
    PYTHON=$(python_in "$container_server") "${step[@]}" "${on_server[@]}" "${nodes[@]}" "--ntasks=$num_servers" \
        "--ntasks-per-node=$per_node" "--output=$logs/engine.log" "${in_server[@]}" \
        bash examples/slurm/server.sh "$gpus_per_server" "${arguments[@]}" &
    engine=$!
    wait_for_servers "$engine" "$folder/servers" "$num_servers" "$logs/engine.log"
fi
echo "attempt $attempt: $num_trainer_nodes x $PROCESSES_PER_NODE processes; logs in $logs"
"${step[@]}" "${on_trainer[@]}" "--nodes=$num_trainer_nodes" "--ntasks=$num_trainer_nodes" --ntasks-per-node=1 \
    "--output=$logs/trainer.log" "${in_trainer[@]}" bash examples/slurm/node.sh "${arguments[@]}" "${of_trainer[@]}" &
trainer=$!
status=0
outlast "$trainer" || status=$?
end_timer
[[ -z $engine ]] || end_engine "$engine" "$own_job.1" # step 0 looked at the config
[[ ! -e $logs/stalled ]] || exit 1
[[ ! -e $logs/stopped ]] || come_back "stopped and saved"
((status != 0)) || exit 0
status=$(own_status "$status" "$logs")
show_error "$status" "$logs"
retry "$status" "${logs%"$attempt"}"
exit "$status"

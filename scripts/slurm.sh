#!/bin/bash
# Train on a SLURM cluster, one supervisor a node and one process a GPU:
#
#     sbatch --nodes 4 scripts/slurm.sh llama3_8b --mesh fsdp=32 --log.run-dir /shared/out/llama3_8b
#
# What ends, and what goes on by itself:
# - A process that dies or hangs: the supervisors (`ultrascale launch`) start all processes again on the same nodes, from
#   the newest checkpoint, without a wait in the queue.
# - A node that is lost: the number of processes is fixed, so no supervisor can help. SLURM ends the step and, for
#   --requeue, starts the job again on whole nodes; it continues by itself.
# - The time limit: 300 seconds before it SLURM sends SIGTERM; the run saves one checkpoint and exits 0. Submit the same
#   command again to continue.
#
# To see first whether the nodes are well: ULTRASCALE_COMMAND=doctor sbatch --nodes 4 scripts/slurm.sh llama3_8b --mesh ...
#SBATCH --job-name=ultrascale
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

# The processes talk to each other directly; a web proxy in between makes them wait for ever.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

command=("${PYTHON:-.venv/bin/python}" -u -m ultrascale_jax "${ULTRASCALE_COMMAND:-launch}")
if [ "${ULTRASCALE_COMMAND:-launch}" = launch ]; then
    command+=(--processes "${SLURM_GPUS_ON_NODE:-8}" --devices-per-process 1 --)
fi

# --kill-on-bad-exit: when one supervisor gives up the others have nothing left to do.
# --cpu-bind=none: SLURM would bind the one task of a node, and with it all its processes, to one core.
exec srun --kill-on-bad-exit=1 --cpu-bind=none "${command[@]}" "$@"

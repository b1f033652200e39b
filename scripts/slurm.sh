#!/bin/bash
# Train on a SLURM cluster, one process per GPU:
#
#     sbatch --nodes 4 scripts/slurm.sh llama3_8b --mesh fsdp=32 --run-dir /shared/out/llama3_8b
#
# 300 seconds before the time limit SLURM sends SIGTERM; the run saves one checkpoint and exits 0. Submit the same
# command again to continue. After a node failure SLURM requeues the job, which continues by itself.
#SBATCH --job-name=ultrascale
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
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

# --kill-on-bad-exit: when one process fails the others have nothing left to compute.
exec srun --kill-on-bad-exit=1 "${PYTHON:-.venv/bin/python}" -u -m scripts.train "$@"

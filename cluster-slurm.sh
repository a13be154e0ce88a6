#!/usr/bin/env bash
# A command of rayfed on the nodes of a SLURM job, which become one Ray cluster for as long as it runs:
#
#   sbatch cluster-slurm.sh rayfed sweep demo placement.gpus=1 checkpoint.every=5 resume=true
#
# Submit it from a folder that all nodes share, with the environment of rayfed in .venv below it. A job that is cancelled
# or preempted is queued again and, with resume=true, skips what is done. Adjust these lines:
#SBATCH --job-name=rayfed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0
# Other users of the nodes can reach Ray's ports. Every request must carry this token, which lies in the shared home.
export RAY_AUTH_MODE=token
umask 077
[[ -e ~/.ray/auth_token ]] || ray get-auth-token --generate > /dev/null
chmod 600 ~/.ray/auth_token

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # which reads all names: head would end scontrol early
port=$((20000 + SLURM_JOB_ID % 20000)) # two jobs may share a node
srun ray symmetric-run --address "$head:$port" --min-nodes "$SLURM_NNODES" \
  --num-cpus "${SLURM_CPUS_PER_TASK:-1}" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" -- "$@"

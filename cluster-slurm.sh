#!/usr/bin/env bash
# A command of rayfed on the nodes of a SLURM job, which become one Ray cluster for as long as it runs:
#
#   sbatch cluster-slurm.sh rayfed sweep demo placement.gpus=1 resume=true
#
# Submit it from a folder that all nodes share, with the environment of rayfed in .venv below it. A job that is cancelled
# or preempted is queued again and, with resume=true, skips what is done. Adjust these lines:
#SBATCH --job-name=rayfed
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 RAY_USAGE_STATS_ENABLED=0
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300 # seconds; a slow file system delays the start of Ray
# Sockets have paths of at most 107 bytes, of which Ray's session takes 68.
if [[ -z ${RAY_TMPDIR:-} && $(printf %s "${TMPDIR:-}" | wc -c) -gt 39 ]]; then export RAY_TMPDIR=/tmp; fi
# Users of other nodes can reach Ray's ports. Every request must carry this token, which lies in the shared home.
export RAY_AUTH_MODE=token
umask 077
[[ -e ~/.ray/auth_token ]] || ray get-auth-token --generate > /dev/null
chmod 600 ~/.ray/auth_token

# This script runs on the first node, whose name may mean its loopback interface to itself. A node has one cluster at a
# time (hence --exclusive), because `ray symmetric-run` ends with `ray stop`.
RAY_ADDRESS=$(python -c 'import ray; print(ray.util.get_node_ip_address())'):6379
export RAY_ADDRESS
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$SLURM_NNODES" \
  --num-cpus "${SLURM_CPUS_PER_TASK:-1}" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" -- "$@"

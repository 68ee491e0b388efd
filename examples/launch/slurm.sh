#!/usr/bin/env bash
# Runs a recipe on the nodes of a Slurm job. Change the directives, then, in the project's folder:
#
#   sbatch examples/launch/slurm.sh RECIPE [FLAG ...]
#
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail
(($#)) || { echo "usage: sbatch examples/launch/slurm.sh RECIPE [FLAG ...]" >&2 && exit 2; }

# Slurm's own first node is number 0 to srun, too.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
# A port of its own for each job: two jobs may share a node.
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export NNODES=$SLURM_NNODES

# One task a node starts the recipe, which starts torchrun; when one fails, srun ends the others.
# shellcheck disable=SC2016  # it is each task's shell that expands it
exec srun --nodes="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --label \
    bash -c 'export NODE_RANK=$SLURM_NODEID; exec bash "$@"' task "$@"

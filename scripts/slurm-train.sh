#!/usr/bin/env bash
# A Slurm batch example: one rank per device (here 4 a node) on 2 nodes. Edit the lines below, then: sbatch scripts/slurm-train.sh run.yaml
#SBATCH --job-name=spipe-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
# Ten minutes before the end Slurm sends SIGUSR2 to the ranks: save at the next step end, then stop (exit code 75).
#SBATCH --signal=USR2@600
#SBATCH --requeue
#SBATCH --open-mode=append
#
# Not tested by the project's CI, which has no Slurm: what is relied on is the environment that srun --mpi=pmix gives its tasks.
# `srun --mpi=list` shows what the cluster offers; pmi2 works where Open MPI was built with it. Without either, use mpirun inside
# the allocation (scripts/slurm-mpirun.sh).
set -uo pipefail

config=${1:?usage: sbatch scripts/slurm-train.sh CONFIG [arguments...]}
shift
program=${SPIPE_TRAIN:-build/release/tools/spipe-train}

# The program divides each node's processors among its ranks; Slurm's binding of a task to its own --cpus-per-task is respected.
# --kill-on-bad-exit: a rank that ends badly takes the others with it, even those on other nodes.
srun --mpi=pmix --kill-on-bad-exit=1 "$program" "$config" --resume auto "$@"
code=$?
if [ "$code" -eq 75 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  scontrol requeue "$SLURM_JOB_ID"  # saved for lack of time: go on in the next slot
fi
exit "$code"

#!/usr/bin/env bash
# A Slurm batch example: one rank per device (here 4 a node) on 2 nodes. Edit the lines below; then, from the project's folder:
#   sbatch scripts/slurm-train.sh run.yaml
#SBATCH --job-name=spipe-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
# Ten minutes before the end Slurm sends SIGUSR2 to the ranks: save at the next step end, then stop (exit code 75). A --time
# below these 10 minutes would have it sent at once.
#SBATCH --signal=USR2@600
#SBATCH --requeue
#SBATCH --open-mode=append
#
# `srun --mpi=list` shows what the cluster offers; where it has no PMIx, or Open MPI was built without it, use mpirun inside the
# allocation (scripts/slurm-mpirun.sh). A save by hand: scancel --signal=USR1 JOB (and go on) or --signal=USR2 (and requeue).
# A plain scancel saves nothing.
#
# Tested by hand with Slurm 22.05.8 and Open MPI 4.1.4 (Debian 12) on one node with 2 ranks: a whole run; the signal before the
# time limit, exit code 75, requeue and resume; USR1; scancel; a killed rank (exit code 137). Not tested: several nodes.
# Of Debian's MPI types pmix works; pmi2 does not (its Open MPI has none); a plain srun is refused at the start.
set -uo pipefail

config=${1:?usage: sbatch scripts/slurm-train.sh CONFIG [arguments...]}
shift
program=${SPIPE_TRAIN:-build/release/tools/spipe-train}

# The program divides each node's processors among its ranks; Slurm's binding of a task to its own --cpus-per-task is respected.
# --kill-on-bad-exit: a rank that ends badly takes the others with it, even those on other nodes.
# --cpus-per-task: since 22.05 srun does not take it from sbatch by itself.
srun --mpi=pmix --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 "$program" "$config" --resume auto "$@"
code=$?
if [ "$code" -eq 75 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  scontrol requeue "$SLURM_JOB_ID"  # saved for lack of time: go on in the next slot
fi
exit "$code"

#!/usr/bin/env bash
# A Slurm batch example that starts the ranks by mpirun: for clusters whose srun has no PMIx, and for one node.
#   sbatch scripts/slurm-mpirun.sh run.yaml
#SBATCH --job-name=spipe-train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
# To the batch script only (B:), which hands it on to mpirun and so to the ranks: save at the next step end, then stop.
#SBATCH --signal=B:TERM@600
#SBATCH --open-mode=append
#
# Not tested by the project's CI, which has no Slurm.
set -uo pipefail

config=${1:?usage: sbatch scripts/slurm-mpirun.sh CONFIG [arguments...]}
shift
# exec: Slurm's signal then reaches launch.sh, which knows what to do with it.
exec bash scripts/launch.sh "${SLURM_NTASKS:-1}" "$config" --resume auto "$@"

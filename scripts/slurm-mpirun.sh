#!/usr/bin/env bash
# A Slurm batch example that starts the ranks by mpirun: for clusters whose srun has no PMIx, and for one node. Submit from the
# project's folder:
#   sbatch scripts/slurm-mpirun.sh run.yaml
#SBATCH --job-name=spipe-train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
# To the batch script only (B:), which hands it on to mpirun and so to the ranks: save at the next step end, then stop.
# A --time below these 10 minutes would have it sent at once.
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#
# A save by hand: scancel --batch --signal=USR1 JOB (and go on) or --signal=USR2 (and requeue). A plain scancel saves nothing.
#
# Tested by hand with Slurm 22.05.8 and Open MPI 4.1.4 (Debian 12) on one node with 2 ranks: a whole run; the signal before the
# time limit, exit code 75, requeue and resume; USR1 and USR2; scancel; a killed rank (exit code 137). Not tested: several nodes.
set -uo pipefail

config=${1:?usage: sbatch scripts/slurm-mpirun.sh CONFIG [arguments...]}
shift

# In the background: bash handles no signal while it waits for a foreground command.
bash scripts/launch.sh "${SLURM_NTASKS:-1}" "$config" --resume auto "$@" &
launch=$!
for signal in TERM USR1 USR2; do
  # shellcheck disable=SC2064  # expanded now
  trap "kill -$signal $launch 2>/dev/null" "$signal"
done
while :; do
  wait "$launch"
  code=$?
  # A trapped signal ends the wait too, with a code above 128.
  if [ "$code" -le 128 ] || ! kill -0 "$launch" 2>/dev/null; then break; fi
done
if [ "$code" -eq 75 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  scontrol requeue "$SLURM_JOB_ID"  # saved for lack of time: go on in the next slot
fi
exit "$code"

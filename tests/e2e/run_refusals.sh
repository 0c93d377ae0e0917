#!/usr/bin/env bash
# What several ranks refuse: run_refusals.sh TRAIN TINY_JOB. One error line, whoever found it, the right exit code, no hang.
set -uo pipefail

train=$1 tiny=$2
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0

run() { timeout -s KILL 60 mpirun --bind-to none --oversubscribe "$@" >"$work/out" 2>&1; }
refused() {  # refused CODE TEXT ARGUMENTS OF MPIRUN...
  rm -rf "$work/run"
  run "${@:3}"
  local code=$? lines
  lines=$(grep -ac 'error: ' "$work/out")
  if [ "$code" -ne "$1" ] || [ "$lines" -ne 1 ] || ! grep -a 'error: ' "$work/out" | grep -qF -- "$2"; then
    echo "FAILED: ${*:3}: exit code $code (wanted $1), $lines error lines, wanted '$2':" >&2
    sed 's/^/  | /' "$work/out" >&2
    bad=1
  fi
}
"$tiny" write "$work" || exit 1
ranks() { echo -np "$1" "$train" "$work/run.yaml"; }
sed 's/seed: 3/seed: 4/' "$work/run.yaml" >"$work/other.yaml"
sed 's/every: 1/every: 2/' "$work/run.yaml" >"$work/log.yaml"

refused 2 "unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?" $(ranks 3) --set optimizer.lrr=1
refused 2 "parallel.pipeline 3 x parallel.data 1 is 3 ranks, but the job has 2" $(ranks 2) --set parallel.pipeline=3
refused 2 "4 ranks cannot be divided into parallel.data 3 equal pipelines" $(ranks 4) --set parallel.data=3
refused 2 "streaming-dp needs a multiple of 2" $(ranks 2) --set parallel.schedule=streaming-dp
refused 2 "use streaming-dp" $(ranks 2) --set parallel.schedule=streaming
refused 2 "the smallest that works is" $(ranks 3) --set device.memory=1000
refused 2 "the smallest that works is" $(ranks 3) --set device.host_memory=1000
refused 2 "gpipe has 1 stage on a rank" $(ranks 2) --set parallel.schedule=gpipe --set parallel.backward_stages=4
refused 2 "device.pace_slow_rank is 5" $(ranks 2) --set device.pace=configs/hardware/this-machine.yaml --set device.pace_slow_rank=5 \
  --set device.pace_slow_factor=2
refused 2 "has another configuration than rank 0: 'seed: 4' against 'seed: 3'" $(ranks 1) : -np 1 "$train" "$work/other.yaml"
refused 2 "has another configuration than rank 0: 'every: 2' against 'every: 1'" $(ranks 1) : -np 1 "$train" "$work/log.yaml"
refused 2 "no file matches" $(ranks 2) --set "data.train=[$work/none.bin]"
refused 3 "non-finite gradient at step 2; first in" $(ranks 3) --set optimizer.lr=1e30 --set train.grad_clip=0
refused 3 "non-finite gradient at step 2; first in" -x SPIPE_FAKE_HOSTS=2 $(ranks 3) --set optimizer.lr=1e30 --set train.grad_clip=0

# Ranks that stand in other folders: what they read or write there is not the others'.
mkdir -p "$work/there"
cp "$work"/*.bin "$work/model.json" "$work/there"
mapfile -t folder < <(printf '%s\n' bash -c "[ \$OMPI_COMM_WORLD_RANK = 0 ] || cd $work/there; exec $train $work/run.yaml --set checkpoint.dir=runs/x")
pushd "$work" >/dev/null || exit 1
refused 2 "must be on a file system that all hosts share" -x SPIPE_FAKE_HOSTS=2 -np 2 "${folder[@]}"
"$tiny" write "$work/other" && cp "$work/other/train.bin" "$work/there/heldout.bin"
mapfile -t held < <(printf '%s\n' bash -c "[ \$OMPI_COMM_WORLD_RANK = 0 ] || cd $work/there; exec $train $work/run.yaml --set data.eval=[heldout.bin]")
refused 2 "reads other token files than rank 0" -np 2 "${held[@]}"
popd >/dev/null || exit 1
rm -rf "$work/runs"

# Variables of a launcher that has not started this.
OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 timeout -s KILL 60 "$train" "$work/run.yaml" >"$work/out" 2>&1
[ $? -eq 2 ] && grep -qa "say rank 0 of 2, MPI says rank 0 of 1" "$work/out" || { echo "FAILED: a launcher's variables by hand" >&2; bad=1; }

# Without standard output nothing is written into the run's files instead.
"$train" "$work/run.yaml" >&- 2>/dev/null || { echo "FAILED: a run without standard output" >&2; bad=1; }
[ "$(wc -l <"$work/run/.lock")" -eq 1 ] && ! grep -qav '^{' "$work/run/metrics.jsonl" || { echo "FAILED: output in the run's files" >&2; bad=1; }
rm -rf "$work/run"

OMPI_MCA_btl=vader,self run $(ranks 2) || { echo "FAILED: a job without shared memory between ranks" >&2; bad=1; }
rm -rf "$work/run"
run $(ranks 2) || { echo "FAILED: a good job" >&2; bad=1; }
run $(ranks 2) && { echo "FAILED: a second job in the same folder was accepted" >&2; bad=1; }
grep -qa 'already holds checkpoints' "$work/out" || { echo "FAILED: not told that the folder is taken" >&2; bad=1; }
exit "$bad"

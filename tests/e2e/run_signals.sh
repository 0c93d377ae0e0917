#!/usr/bin/env bash
# Signals to a job of several ranks: run_signals.sh TRAIN TINY_JOB HOSTS. SIGUSR2, to mpirun or to any one rank, saves and stops
# all of them with exit code 75; SIGUSR1 saves and goes on; scripts/launch.sh turns SIGTERM into a save. What is resumed, by
# other numbers of ranks and hosts and under other schedules, ends with the bits of one rank that nobody disturbed.
set -uo pipefail

train=$1 tiny=$2 hosts=$3
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
settings=(--set train.steps=400 --set device.threads=1 --set checkpoint.keep=9 --set "data.eval=[]")

fail() {
  echo "FAILED ($case): $*" >&2
  tail -n 20 "$work/out" | sed 's/^/  | /' >&2
  exit 1
}
job() {  # job NP ARGUMENTS...
  SPIPE_FAKE_HOSTS=$(($1 < hosts ? 1 : hosts)) mpirun --bind-to none --oversubscribe -np "$1" "$train" "$work/run.yaml" \
    "${settings[@]}" --set "checkpoint.dir=$work/run" "${@:2}"
}
start() {  # start NP: in the background, until steps are being done; sets $shell, $mpirun and the ranks by number
  rm -rf "$work/run"
  job "$1" >"$work/out" 2>&1 &
  shell=$!
  for _ in $(seq 200); do
    [ -s "$work/run/metrics.jsonl" ] && break
    sleep 0.05
  done
  [ -s "$work/run/metrics.jsonl" ] || fail "no step was done"
  mpirun=$(pgrep -P "$shell" mpirun || echo "$shell")
  ranks=()
  for pid in $(pgrep -P "$mpirun" -f -- "$work/run.yaml"); do
    number=$(tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')
    [ -n "$number" ] && ranks[number]=$pid
  done
}
stopped() {  # the job has saved and stopped before its end
  wait "$shell"
  code=$?
  [ "$code" -eq 75 ] || fail "exit code $code"
  grep -qa 'stopped after step' "$work/out" || fail "not a word about it"
  "$tiny" compare "$work/whole" "$work/run" >/dev/null && fail "it was not stopped"
}
resumed() {  # resumed NP ARGUMENTS...
  job "$1" --resume "${@:2}" >"$work/out" 2>&1 || fail "resuming on $1 ranks"
  "$tiny" compare "$work/whole" "$work/run" || fail "resuming on $1 ranks gives other bits"
}

case=start
"$tiny" write "$work" || exit 1
"$train" "$work/run.yaml" "${settings[@]}" --set "checkpoint.dir=$work/whole" >"$work/out" 2>&1 || fail "the undisturbed run"

case="SIGUSR2 to mpirun, then one rank"
start 3; kill -USR2 "$mpirun"; stopped; resumed 1

case="SIGUSR2 to the last rank, then two ranks and mobius"
start 3; kill -USR2 "${ranks[2]}"; stopped; resumed 2 --set parallel.schedule=mobius

case="SIGUSR2 to rank 0, then four ranks, two replicas of the pipeline's sum groups refused"
start 2; kill -USR2 "${ranks[0]}"; stopped
job 4 --resume --set parallel.data=2 >"$work/out" 2>&1 && fail "another numerics block was accepted"
grep -qa 'not the run the checkpoint belongs to: batch.sum_groups' "$work/out" || fail "the difference is not named"
resumed 4 --set parallel.schedule=1f1b

case="SIGUSR1 to a rank goes on"
start 3; kill -USR1 "${ranks[1]}"
wait "$shell" || fail "exit code $?"
"$tiny" compare "$work/whole" "$work/run" || fail "saving changed bits"
[ "$(grep -ca '^checkpoint of step\|checkpoint of step' "$work/out")" -ge 2 ] || fail "nothing was saved in between"

case="SIGTERM to scripts/launch.sh"
rm -rf "$work/run"
SPIPE_TRAIN=$train SPIPE_FAKE_HOSTS=$hosts bash scripts/launch.sh 3 "$work/run.yaml" "${settings[@]}" --set "checkpoint.dir=$work/run" \
  >"$work/out" 2>&1 &
shell=$!
for _ in $(seq 200); do
  [ -s "$work/run/metrics.jsonl" ] && break
  sleep 0.05
done
kill -TERM "$shell"; stopped; resumed 3

case="a closed terminal of scripts/launch.sh, before anything has begun"
for delay in 0.02 0.1 0.3 0.6; do
  rm -rf "$work/run"
  SPIPE_TRAIN=$train SPIPE_FAKE_HOSTS=$hosts setsid bash scripts/launch.sh 3 "$work/run.yaml" "${settings[@]}" \
    --set train.steps=100000 --set "checkpoint.dir=$work/run" >"$work/out" 2>&1 &
  shell=$!
  sleep "$delay"
  kill -HUP "$shell" 2>/dev/null
  wait "$shell"
  code=$?
  # Before launch.sh itself listens, it is the hang-up that ends it, and nothing has been started.
  [ "$code" -eq 75 ] || { [ "$code" -eq 129 ] && ! pgrep -f -- "$work/run.yaml" >/dev/null; } || fail "after $delay s: exit code $code"
done

case="SIGUSR1 to scripts/launch.sh while the run is set up"
rm -rf "$work/run"
SPIPE_TRAIN=$train SPIPE_FAKE_HOSTS=$hosts bash scripts/launch.sh 3 "$work/run.yaml" "${settings[@]}" --set "checkpoint.dir=$work/run" \
  >"$work/out" 2>&1 &
shell=$!
sleep 0.4
kill -USR1 "$shell"
wait "$shell" || fail "exit code $?"
"$tiny" compare "$work/whole" "$work/run" || fail "saving changed bits"
echo "signals on $hosts host(s): all saved, stopped or went on, and resumed to the bit"

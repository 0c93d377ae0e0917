#!/usr/bin/env bash
# Kills a job at random moments: run_kills.sh TRAIN TINY_JOB TARGET HOSTS ROUNDS, TARGET being "rank" or "mpirun".
# After each kill everybody is gone within 5 s, the exit code is not 0, nothing is left in /dev/shm, and --resume auto (with
# another number of ranks now and then) ends with the bits of a run that nobody disturbed.
set -uo pipefail

train=$1 tiny=$2 target=$3 hosts=$4 rounds=$5
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
settings=(--set checkpoint.every=2 --set checkpoint.keep=2 --set train.steps=40 --set train.eval_every=7 --set device.threads=1
          --set optimizer.schedule.warmup=2)

fail() {
  echo "FAILED (round $round, $target): $*" >&2
  sed 's/^/  | /' "$work/out" >&2
  exit 1
}
job() {  # job NP ARGUMENTS...: under mpirun
  SPIPE_FAKE_HOSTS=$(($1 < hosts ? 1 : hosts)) mpirun --bind-to none --oversubscribe -np "$1" "$train" "$work/run.yaml" \
    "${settings[@]}" "${@:2}"
}
members() { pgrep -f -- "$train $work/run.yaml" | grep -vx -e "$$" -e "$mpirun"; }

round=0
"$tiny" write "$work" || exit 1
"$train" "$work/run.yaml" "${settings[@]}" --set "checkpoint.dir=$work/whole" >"$work/out" 2>&1 || fail "the undisturbed run"
begin=$(date +%s%N)
job 3 --set "checkpoint.dir=$work/timed" >"$work/out" 2>&1 || fail "the timed run"
milliseconds=$((($(date +%s%N) - begin) / 1000000))
"$tiny" compare "$work/whole" "$work/timed" || fail "three ranks give other bits"
ls -A /dev/shm | sort >"$work/before"

hit=0 tries=0
while [ "$hit" -lt "$rounds" ]; do
  tries=$((tries + 1)) round=$tries
  [ "$tries" -gt $((3 * rounds + 5)) ] && fail "only $hit of $tries kills met a running job"
  rm -rf "$work/run"
  job 3 --set "checkpoint.dir=$work/run" >"$work/out" 2>&1 &
  shell=$!
  sleep "$(printf '%d.%03d' $((RANDOM % 32768 * milliseconds / 32768 / 1000)) $((RANDOM % 1000)))" 2>/dev/null || sleep 0.2
  mpirun=$(pgrep -P "$shell" mpirun || echo "$shell")
  mapfile -t ranks < <(pgrep -P "$mpirun" -f -- "$work/run.yaml")
  if [ "$target" = mpirun ]; then
    kill -9 "$mpirun" 2>/dev/null
  elif [ "${#ranks[@]}" -gt 0 ]; then
    kill -9 "${ranks[$((RANDOM % ${#ranks[@]}))]}" 2>/dev/null
  fi
  killed=$(date +%s%N)
  wait "$shell"
  code=$?
  while [ -n "$(members)" ]; do
    [ $(($(date +%s%N) - killed)) -lt 5000000000 ] || fail "still there after 5 s: $(members | tr '\n' ' ')"
    sleep 0.02
  done
  [ $(($(date +%s%N) - killed)) -lt 5000000000 ] || fail "gone only after more than 5 s"
  ls -A /dev/shm | sort >"$work/after"
  new=$(comm -13 "$work/before" "$work/after")
  [ -z "$new" ] || fail "left in /dev/shm: $new"
  # A job that had ended, or a rank that had done its part, is no kill.
  if [ "$code" -ne 0 ]; then hit=$((hit + 1)); fi
  if [ "$target" = rank ] && [ "$code" -ne 0 ]; then
    # Before the ranks have met (the first lines come after that) nobody but mpirun can know, and once all work is done (the
    # last evaluation) the ranks leave one by one and do not watch each other any more.
    if grep -qa ' ranks on ' "$work/out" && ! grep -qa 'eval at step 40' "$work/out"; then
      grep -ao 'error: .*' "$work/out" | tail -n 1 | grep -q 'was killed by signal 9' || fail "the cause is not told last"
    else
      grep -qa 'on signal 9' "$work/out" || fail "nobody tells the cause"
    fi
  fi
  job $((tries % 3 + 1)) --set "checkpoint.dir=$work/run" --resume auto >"$work/out" 2>&1 || fail "the resumed run"
  "$tiny" compare "$work/whole" "$work/run" || fail "the resumed run gives other bits"
done
echo "$hit kills of $target on $hosts host(s) in $tries tries, all gone and resumed to the bit"

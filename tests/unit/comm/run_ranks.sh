#!/usr/bin/env bash
# Cases that need several processes: run_ranks.sh PROGRAM CASE. PROGRAM is test_rank. Prints what went wrong; exit code 0 when all held.
set -uo pipefail

program=$1
case=$2
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "FAILED ($case): $*" >&2
  [ -s "$work/out" ] && sed 's/^/  | /' "$work/out" >&2
  exit 1
}
# Names in /dev/shm, and Open MPI's folders of jobs in the temporary folder.
leftovers() { { ls -A /dev/shm; ls -d "${TMPDIR:-/tmp}"/ompi.*/pid.* 2>/dev/null; } | sort; }
# Only what this case added counts: other jobs may run beside it.
check_clean() {
  leftovers >"$work/after"
  new=$(comm -13 "$work/before" "$work/after")
  for entry in $new; do
    owner=${entry##*/pid.}
    if [ "$owner" != "$entry" ] && [ "$owner" != "${mpirun:-0}" ] && kill -0 "$owner" 2>/dev/null; then continue; fi
    fail "left behind: $entry"
  done
}
ranks() {  # ranks NP MODE [argument]: to the end
  timeout 120 mpirun --bind-to none --oversubscribe -np "$1" "$program" "${@:2}" >"$work/out" 2>&1
}
alive() {  # of the pids in $work/pids, without zombies that nobody has reaped yet
  for pid in $(cat "$work/pids"); do
    state=$(sed -n 's/^State:\t\(.\).*/\1/p' "/proc/$pid/status" 2>/dev/null)
    [ -n "$state" ] && [ "$state" != Z ] && echo "$pid"
  done
}
start_busy() {  # start_busy NP: waits until all ranks run; sets $mpirun, writes their pids by rank
  : >"$work/out"
  setsid mpirun --bind-to none --oversubscribe -np "$1" "$program" busy >"$work/out" 2>&1 &
  mpirun=$!
  for _ in $(seq 300); do
    [ "$(grep -c ' runs$' "$work/out")" -eq "$1" ] && break
    sleep 0.1
  done
  [ "$(grep -c ' runs$' "$work/out")" -eq "$1" ] || fail "the ranks did not start"
  grep ' runs$' "$work/out" | sort -k2n | sed 's/.*pid \([0-9]*\) runs/\1/' >"$work/pids"
}
all_gone_in_time() {
  for _ in $(seq 50); do
    [ -z "$(alive)" ] && return 0
    sleep 0.1
  done
  fail "still alive after 5 s: $(alive)"
}
last_own_line() { grep -E '^(error: |warning: |rank [0-9])' "$work/out" | tail -n 1; }

leftovers >"$work/before"
case $case in
  facts)
    ranks 3 facts || fail "exit code $?"
    for rank in 0 1 2; do
      grep -q "^rank $rank of 3 local $rank of 3 host 0 of 1 map 000 threads 1$" "$work/out" || fail "facts of rank $rank"
    done
    check_clean
    ;;
  fake-hosts)
    export SPIPE_FAKE_HOSTS=2
    ranks 4 facts || fail "exit code $?"
    grep -q "^rank 3 of 4 local 1 of 2 host 1 of 2 map 0011 " "$work/out" || fail "facts of rank 3"
    grep -q "^rank 0 of 4 local 0 of 2 host 0 of 2 map 0011 " "$work/out" || fail "facts of rank 0"
    ranks 3 region || fail "regions of uneven hosts: exit code $?"
    SPIPE_FAKE_HOSTS=3 ranks 2 facts && fail "more hosts than ranks"
    [ "$(grep -c 'SPIPE_FAKE_HOSTS=3 but a machine has 2 ranks' "$work/out")" -eq 1 ] || fail "one line for the whole job"
    check_clean
    ;;
  binding)  # what mpirun does by itself, and what we say about it
    [ "$(nproc)" -ge 2 ] || { echo "SKIPPED: one processor"; exit 77; }
    timeout 60 mpirun --bind-to core --oversubscribe -np 1 "$program" facts >"$work/out" 2>&1 || fail "exit code $?"
    grep -q "threads 1$" "$work/out" || fail "one thread on one core"
    grep -q "rank 0 warning .*--bind-to none or --map-by slot:PE=4" "$work/out" || fail "no hint about binding"
    ;;
  region)
    for np in 1 2 4; do ranks "$np" region || fail "$np ranks: exit code $?"; done
    check_clean
    ;;
  collectives)
    for np in 1 3; do ranks "$np" collectives || fail "$np ranks: exit code $?"; done
    check_clean
    ;;
  messages)
    for np in 2 3; do ranks "$np" messages "$np" || fail "$np ranks: exit code $?"; done
    check_clean
    ;;
  mismatch)
    ranks 2 mismatch && fail "a wrong size was accepted"
    grep -q "rank 0 sends 10 bytes with tag 1, rank 1 expects 20" "$work/out" || fail "no word about the sizes"
    check_clean
    ;;
  late)
    ranks 3 late || fail "leaving at different times: exit code $?"
    ;;
  throw)
    ranks 3 throw 1
    code=$?
    [ "$code" -eq 2 ] || fail "exit code $code"
    [ "$(grep -c '^error: ' "$work/out")" -eq 1 ] || fail "one cause, one line"
    [ "$(last_own_line)" = "error: rank 1: data.bin: no such file; make it" ] || fail "the cause is not the last line"
    check_clean
    ;;
  throw-machines)  # the word goes to other machines by message, and carries the exit code
    export SPIPE_FAKE_MACHINES=2
    timeout 60 mpirun --bind-to none --oversubscribe -np 4 \
      bash -c '"$0" throw 1; echo "rank $OMPI_COMM_WORLD_RANK code $?"' "$program" >"$work/out" 2>&1 && fail "exit code 0"
    for rank in 2 3; do grep -q "^rank $rank code 2$" "$work/out" || fail "rank $rank was not told"; done
    [ "$(grep -c '^error: ' "$work/out")" -eq 1 ] || fail "one cause, one line"
    grep -q "^error: rank 1: data.bin: no such file; make it" "$work/out" || fail "no cause"
    check_clean
    ;;
  machines)
    export SPIPE_FAKE_MACHINES=2
    ranks 4 facts || fail "exit code $?"
    grep -q "^rank 3 of 4 local 1 of 2 host 1 of 2 map 0011 " "$work/out" || fail "facts of rank 3"
    ranks 4 region || fail "regions: exit code $?"
    SPIPE_FAKE_HOSTS=2 ranks 4 facts || fail "exit code $?"
    grep -q "^rank 3 of 4 local 0 of 1 host 3 of 4 map 0123 " "$work/out" || fail "facts of rank 3 on four hosts"
    ;;
  vanish)
    ranks 3 vanish 2 && fail "nobody missed rank 2"
    [[ "$(last_own_line)" =~ ^error:\ rank\ 2\ \(pid\ [0-9]+\)\ ended\ with\ code\ 0 ]] || fail "the cause is not the last line"
    check_clean
    ;;
  kill-rank | kill-rank-hosts)
    [ "$case" = kill-rank-hosts ] && export SPIPE_FAKE_HOSTS=2
    for round in 1 2 3 4 5; do
      start_busy 4
      sleep "0.$((RANDOM % 10))"
      victim=$((RANDOM % 4))
      pid=$(sed -n "$((victim + 1))p" "$work/pids")
      kill -9 "$pid"
      all_gone_in_time
      wait "$mpirun"
      [ $? -ne 0 ] || fail "round $round: exit code 0"
      [[ "$(last_own_line)" == "error: rank $victim (pid $pid) was killed by signal 9; run again with --resume"* ]] ||
        fail "round $round: the cause is not the last line, but: $(last_own_line)"
      check_clean
    done
    ;;
  kill-stopped)  # a rank that cannot end itself is helped
    start_busy 3
    kill -STOP "$(sed -n 2p "$work/pids")"
    kill -9 "$(sed -n 1p "$work/pids")"
    all_gone_in_time
    wait "$mpirun"
    [ $? -ne 0 ] || fail "exit code 0"
    check_clean
    ;;
  kill-mpirun)
    for round in 1 2 3 4 5; do
      start_busy 4
      sleep "0.$((RANDOM % 10))"
      kill -9 "$mpirun"
      wait "$mpirun" 2>/dev/null
      [ $? -ne 0 ] || fail "round $round: exit code 0"
      all_gone_in_time
      check_clean
    done
    ;;
  launch-save)  # a scheduler's SIGTERM to launch.sh reaches every rank as SIGUSR2, once
    SPIPE_TRAIN=$program bash scripts/launch.sh 3 await-usr2 >"$work/out" 2>&1 &
    launch=$!
    for _ in $(seq 300); do
      [ "$(grep -c ' waits$' "$work/out")" -eq 3 ] && break
      sleep 0.1
    done
    kill -TERM "$launch"
    wait "$launch"
    code=$?
    [ "$code" -eq 75 ] || fail "exit code $code"
    [ "$(grep -c ' got SIGUSR2$' "$work/out")" -eq 3 ] || fail "not every rank was asked"
    check_clean
    ;;
  launch-codes)
    SPIPE_TRAIN=$program bash scripts/launch.sh 2 collectives >"$work/out" 2>&1 || fail "exit code $?"
    SPIPE_TRAIN=$program bash scripts/launch.sh 3 throw 2 >"$work/out" 2>&1
    code=$?
    [ "$code" -eq 2 ] || fail "exit code $code of a user's error"
    bash scripts/launch.sh two run.yaml >"$work/out" 2>&1
    [ $? -eq 2 ] || fail "no usage"
    check_clean
    ;;
  *)
    echo "no such case: $case" >&2
    exit 2
    ;;
esac
echo "$case: held"

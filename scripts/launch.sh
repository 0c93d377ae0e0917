#!/usr/bin/env bash
# Starts spipe-train on several ranks of this machine (or of mpirun's --hostfile): scripts/launch.sh NP CONFIG [arguments...]
#
# mpirun runs in a session of its own, so that Ctrl-C and a scheduler's SIGTERM come here only; they reach the ranks as SIGUSR2
# ("save at the next step end, then stop"), which mpirun forwards. A second Ctrl-C ends the job at once. The exit code is mpirun's.
#   SPIPE_TRAIN    the program (default: build/release/tools/spipe-train)
#   SPIPE_MPIRUN   more options for mpirun ("--hostfile hosts")
set -uo pipefail

if [ "$#" -lt 2 ] || ! [[ "$1" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: scripts/launch.sh NP CONFIG [arguments of spipe-train...]" >&2
  exit 2
fi
ranks=$1
shift
program=${SPIPE_TRAIN:-$(dirname "$0")/../build/release/tools/spipe-train}
if ! command -v mpirun >/dev/null; then
  echo "launch: mpirun is not installed (scripts/setup.sh installs Open MPI); one rank needs none: $program $*" >&2
  exit 2
fi
if ! [ -x "$program" ]; then
  echo "launch: no program $program; build it (scripts/build.sh) or set SPIPE_TRAIN" >&2
  exit 2
fi

# Threads are divided by the program itself; binding would put them all on one core.
options=(--bind-to none)
if [ "$ranks" -gt "$(nproc)" ]; then
  options+=(--oversubscribe)
fi
if [ "$(id -u)" -eq 0 ]; then  # Open MPI refuses root otherwise; containers usually are
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# The ranks write to a terminal of mpirun's own: without this they take a log file for one and overwrite lines in it.
if ! [ -t 1 ]; then
  export TERM=dumb
  options+=(-x TERM)
fi
read -r -a more <<<"${SPIPE_MPIRUN:-}"

# What asks for a save before mpirun and the ranks listen must not kill them: until then they ignore it.
(
  trap '' USR1 USR2
  exec setsid mpirun -np "$ranks" "${options[@]}" "${more[@]}" "$program" "$@"
) &
mpirun=$!

# Runs beside mpirun: repeats after some seconds what was asked (it may have come too early), and ends an mpirun that hangs
# though all it had started is dead, which Open MPI 4 does now and then.
alive() {  # of mpirun's children, those that are no zombies
  for child in $(cat "/proc/$mpirun/task/"*/children 2>/dev/null); do
    grep -q '^State:.[^ZX]' "/proc/$child/status" 2>/dev/null && return 0
  done
  return 1
}
look_after() {
  local had=no dead=0 asked=0 again=3
  trap 'asked=1' USR2
  while sleep 1 >/dev/null 2>&1 & wait $!; kill -0 "$mpirun" 2>/dev/null; do
    if alive; then had=yes dead=0; else dead=$((dead + 1)); fi
    if [ "$had" = yes ] && [ "$dead" -ge 10 ]; then
      echo "launch: all ranks have ended, but mpirun hangs: killed" >&2
      kill -KILL "$mpirun" 2>/dev/null
      return
    fi
    if [ "$asked" -gt 0 ]; then
      asked=$((asked + 1))
      if [ "$asked" -gt "$again" ]; then
        kill -USR2 "$mpirun" 2>/dev/null
        again=$((2 * again + 1))
      fi
    fi
  done
}
trap '' USR2  # until it listens
look_after &
beside=$!

asked=no
on_signal() {
  if [ "$asked" = yes ] && [ "$1" = INT ]; then
    kill -TERM "$mpirun" 2>/dev/null
    return
  fi
  asked=yes
  echo "launch: asking the ranks to save and stop" >&2
  kill -USR2 "$mpirun" "$beside" 2>/dev/null
}
trap 'on_signal TERM' TERM
trap 'on_signal TERM' HUP  # a closed terminal
trap 'on_signal INT' INT
trap 'kill -USR1 "$mpirun" 2>/dev/null' USR1
trap 'on_signal TERM' USR2

while :; do
  wait "$mpirun"
  code=$?
  # A trapped signal ends the wait too; only a gone mpirun ends the loop.
  kill -0 "$mpirun" 2>/dev/null || break
done
kill "$beside" 2>/dev/null
# The wait that the signal ended has not seen the code of an mpirun that ended meanwhile.
if [ "$asked" = yes ]; then
  wait "$mpirun" 2>/dev/null
  late=$?
  [ "$late" -eq 127 ] || code=$late
fi
exit "$code"

#!/usr/bin/env bash
# Which registers and symbols the object files of the kernels may contain.
#   check_objects.sh OBJDUMP NM narrow OBJECTS... avx2 OBJECTS... avx512 OBJECTS...
# - narrow objects (scalar kernels, everything that is not a kernel) use neither ymm nor zmm registers, avx2 objects no zmm or
#   mask registers; avx2 and avx512 objects do use theirs, or this test would see nothing.
# - every symbol that a wide kernel object offers the linker names its own namespace: a shared inline function would be a weak
#   symbol that could be picked for a narrow build.
set -euo pipefail
objdump=$1 nm=$2
shift 2
fail=0
complain() { echo "FAIL: $*"; fail=1; }
# Counts lines of the disassembly of $1 that match the register pattern $2.
uses() { "$objdump" -d --no-show-raw-insn "$1" | grep -cE "$2" || true; }

kind="" seen_ymm=0 seen_zmm=0 objects=0
for argument in "$@"; do
  case $argument in
    narrow | avx2 | avx512) kind=$argument; continue ;;
  esac
  objects=$((objects + 1))
  name=${argument##*/}
  zmm=$(uses "$argument" '%zmm|%k[0-7]\b')
  ymm=$(uses "$argument" '%ymm')
  case $kind in
    narrow)
      [ "$zmm" = 0 ] || complain "$name (narrow) uses AVX-512 registers in $zmm lines"
      [ "$ymm" = 0 ] || complain "$name (narrow) uses AVX registers in $ymm lines" ;;
    avx2)
      [ "$zmm" = 0 ] || complain "$name (avx2) uses AVX-512 registers in $zmm lines"
      seen_ymm=$((seen_ymm + ymm)) ;;
    avx512) seen_zmm=$((seen_zmm + zmm)) ;;
    *) complain "no kind before $name" ;;
  esac
  if [ "$kind" != narrow ]; then
    foreign=$("$nm" -C --defined-only --extern-only "$argument" | grep -v "spipe::cpu::isa_$kind::" || true)
    [ -z "$foreign" ] || complain "$name ($kind) defines symbols outside its namespace: $foreign"
  fi
done
[ "$objects" -gt 0 ] || complain "no objects given"
if [ "$kind" = avx512 ]; then
  [ "$seen_ymm" -gt 100 ] || complain "the avx2 objects hardly use ymm: is the check blind?"
  [ "$seen_zmm" -gt 100 ] || complain "the avx512 objects hardly use zmm: is the check blind?"
fi
echo "$objects objects; lines with ymm in avx2: $seen_ymm, with zmm or masks in avx512: $seen_zmm"
exit $fail

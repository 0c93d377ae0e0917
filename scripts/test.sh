#!/usr/bin/env bash
# Builds the release preset with all tests and runs them: the quick ones and those for continuous integration.
#   scripts/test.sh           quick and ci
#   scripts/test.sh --quick   quick only (a minute)
#   scripts/test.sh --full    everything, slow ones included
set -euo pipefail
cd "$(dirname "$0")/.."

labels='^(quick|ci)$'
case "${1:-}" in
  "") ;;
  --quick) labels='^quick$' ;;
  --full) labels='.' ;;
  *)
    sed -n '2,5s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

bash scripts/setup.sh
bash scripts/build.sh
exec ctest --test-dir build/release --output-on-failure --no-tests=error --label-regex "$labels" --parallel "$(nproc)"

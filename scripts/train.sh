#!/usr/bin/env bash
# Builds the program, prepares a small corpus and trains the quickstart model on it (configs/quickstart.yaml).
# Arguments go to spipe-train: scripts/train.sh --set train.steps=50
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh
bash scripts/build.sh spipe spipe-train
bin=build/release/tools

data=data/quickstart
if [ ! -s "$data/train.bin" ] || [ ! -s "$data/heldout.bin" ]; then
  bash scripts/prepare_quickstart.sh "$data" "$bin/spipe"
fi

# A second call continues, or says that the run is finished.
"$bin/spipe-train" configs/quickstart.yaml --resume auto "$@"
echo "  corpus      $data"

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
  mkdir -p "$data"
  if echo '?' | bible -f gen1:1 >/dev/null 2>&1; then
    echo "corpus: the King James Bible (packages bible-kjv, bible-kjv-text), 4.4 MB, a document per chapter"
    # Verses look like "Ge1:1 In the beginning ..."; a line "%%" goes between chapters.
    echo '?' | bible -f 'gen1:1-rev22:21' |
      awk -F: 'NR > 1 && $1 != chapter { print "%%" } { chapter = $1; print }' >"$data/corpus.txt"
    held_out=0.02
  else
    echo "corpus: /usr/share/common-licenses, 0.3 MB (install bible-kjv and bible-kjv-text for a larger one)"
    : >"$data/corpus.txt"
    for file in /usr/share/common-licenses/*; do
      if [ -L "$file" ] || [ ! -f "$file" ]; then continue; fi
      [ ! -s "$data/corpus.txt" ] || echo "%%" >>"$data/corpus.txt"
      cat "$file" >>"$data/corpus.txt"
    done
    held_out=0.1
  fi
  "$bin/spipe" tokenize --input "$data/corpus.txt" --separator '%%' --output "$data/train.bin" \
    --held-out "$data/heldout.bin" --hold-out-fraction "$held_out"
fi

"$bin/spipe-train" configs/quickstart.yaml "$@"

echo
echo "corpus and token files: $data"
echo "checkpoints, metrics.jsonl and the log: the run folder (checkpoint.dir) of configs/quickstart.yaml"
echo "continue: $bin/spipe-train configs/quickstart.yaml --resume --set train.steps=N"

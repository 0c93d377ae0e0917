#!/usr/bin/env bash
# Makes the quickstart corpus: OUTDIR/train.bin and OUTDIR/heldout.bin, the last 5 % of the documents held out.
#   scripts/prepare_quickstart.sh OUTDIR path/to/spipe
# Text: the King James Bible of the Debian packages bible-kjv and bible-kjv-text, a document per chapter, a verse per line without
# its reference. Where they are not installed: the licences in /usr/share/common-licenses, in pieces of about 2 KB.
set -euo pipefail
export LC_ALL=C

if [ $# -ne 2 ]; then
  echo "usage: $0 OUTDIR SPIPE_BINARY" >&2
  exit 2
fi
out=$1 spipe=$2
mkdir -p "$out"
corpus=$out/corpus.txt

# "Ge1:1 In the beginning ...": the chapter is what stands before the colon.
bible_documents() {
  echo '?' | bible -f 'gen1:1-rev22:21' | awk '
    { at = index($0, " "); chapter = substr($0, 1, at - 1); sub(/:.*/, "", chapter)
      if (NR > 1 && chapter != last) print "%%"
      last = chapter
      print substr($0, at + 1) }'
}

# Whole paragraphs up to about 2 KB a document; a file begins a new one.
licence_documents() {
  local files=()
  for file in "$1"/*; do
    if [ -f "$file" ] && [ ! -L "$file" ]; then files+=("$file"); fi
  done
  [ ${#files[@]} -gt 0 ] || return 1
  awk '
    FNR == 1 || (size > 2000 && $0 == "") { if (NR > 1) print "%%"; size = 0 }
    { print; size += length($0) + 1 }' "${files[@]}"
}

if command -v bible >/dev/null && [ "$(echo '?' | bible -f gen1:1 2>/dev/null | wc -l)" -ge 1 ]; then
  echo "corpus: the King James Bible (packages bible-kjv and bible-kjv-text), 4 MB, a document per chapter"
  bible_documents >"$corpus.tmp"
elif licence_documents /usr/share/common-licenses >"$corpus.tmp"; then
  echo "corpus: /usr/share/common-licenses, 0.3 MB (install bible-kjv and bible-kjv-text for a better one)"
else
  rm -f "$corpus.tmp"
  echo "$0: no text found: install bible-kjv and bible-kjv-text, or make $out/train.bin and $out/heldout.bin with spipe tokenize" >&2
  exit 2
fi
mv "$corpus.tmp" "$corpus"
"$spipe" tokenize --input "$corpus" --separator '%%' --output "$out/train.bin" --held-out "$out/heldout.bin" --hold-out-fraction 0.05

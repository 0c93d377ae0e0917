#!/usr/bin/env bash
# Installs what the build needs on Debian 12 (and its relatives), or says what is missing.
# As root it installs; as anybody else it prints the one command to run. Optional packages never fail it.
set -euo pipefail

required=(build-essential cmake ninja-build pkg-config git libyaml-cpp-dev libspdlog-dev libfmt-dev libcli11-dev
          nlohmann-json3-dev libdnnl-dev libxxhash-dev libhwloc-dev libopenmpi-dev openmpi-bin catch2 libbenchmark-dev)
# ccache: faster rebuilds; the Bible's text: the corpus of scripts/train.sh.
optional=(ccache bible-kjv bible-kjv-text)

installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }
missing_of() { for package in "$@"; do installed "$package" || printf '%s ' "$package"; done; }

if ! command -v dpkg-query >/dev/null; then
  echo "setup: this is not a Debian system; install the equivalents of: ${required[*]}" >&2
  echo "setup: then run the build yourself: cmake --preset release && cmake --build --preset release" >&2
  exit 2
fi
# One word per package: the lists are split on purpose below.
missing=$(missing_of "${required[@]}")
wanted=$(missing_of "${optional[@]}")
if [ -z "$missing$wanted" ]; then
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  [ -z "$wanted" ] || echo "setup: optional packages that are not installed: $wanted" >&2
  [ -z "$missing" ] && exit 0
  echo "setup: packages are missing; run this, then try again:" >&2
  echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends $missing$wanted" >&2
  exit 2
fi

export DEBIAN_FRONTEND=noninteractive
echo "setup: installing $missing$wanted"
updated=yes
apt-get update -q || updated=no
if [ -n "$missing" ]; then
  # shellcheck disable=SC2086
  if ! apt-get install -y -q --no-install-recommends $missing; then
    [ "$updated" = yes ] || echo "setup: the package lists could not be fetched (no network?)" >&2
    echo "setup: could not install: $missing" >&2
    exit 2
  fi
fi
for package in $wanted; do
  apt-get install -y -q --no-install-recommends "$package" || echo "setup: going on without $package (optional)" >&2
done

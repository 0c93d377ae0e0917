#!/usr/bin/env bash
# Makes build/gpu-bundle: the Debian packages that scripts/gpu-check.sh needs, unpacked, for a GPU machine without a network.
#   scripts/gpu-bundle.sh [FOLDER]
# Run it where apt works; copy the repository with the folder to the GPU machine.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:-build/gpu-bundle}
packages=(catch2 libfmt-dev libfmt9 libspdlog-dev libspdlog1.10 libxxhash-dev libxxhash0 nlohmann-json3-dev)
if ! command -v apt-get >/dev/null; then
  echo "gpu-bundle: this needs apt-get (Debian 12); run it there and copy the folder" >&2
  exit 2
fi
rm -rf "$folder"
mkdir -p "$folder/packages"
(cd "$folder/packages" && apt-get download -q "${packages[@]}")
for package in "$folder"/packages/*.deb; do
  dpkg -x "$package" "$folder"
done
rm -r "$folder/packages" "$folder/usr/share/doc"
echo "gpu-bundle: $(du -sh "$folder" | cut -f1) in $folder"

#!/bin/sh
# Put promtool into a directory (default .venv/bin), where the tests of deploy/ find it: out of Debian's package
# prometheus, which is unpacked and not installed, so that no service starts. Exit code 3: it cannot be had here.
set -eu
cd "$(dirname "$0")/.."
into=${1:-.venv/bin}
[ -x "$into/promtool" ] && exit 0
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { echo "no apt-get: promtool cannot be had here" >&2; exit 3; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
(cd "$scratch" && { apt-get download -q prometheus || { apt-get update -q && apt-get download -q prometheus; }; }) >/dev/null 2>&1 ||
    { echo "apt-get has no package prometheus: promtool cannot be had here" >&2; exit 3; }
dpkg-deb -x "$scratch"/prometheus_*.deb "$scratch/unpacked"
mkdir -p "$into"
mv "$scratch/unpacked/usr/bin/promtool" "$into/promtool"

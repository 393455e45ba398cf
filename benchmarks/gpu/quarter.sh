#!/usr/bin/env bash
# Asks one GPU the questions of quarter.py: "first", then "second"; results go to $OUT.
set -e
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m benchmarks.gpu.quarter --out "${OUT:-benchmarks/results}" "$@"

#!/usr/bin/env bash
# Everything a change must pass: lint, format, types, tests. Arguments go to pytest.
#
# NVSERVE_TEST_SCALE (default 0.1) is the share of the long suites' rounds that is run.
set -euo pipefail
. "$(dirname "$0")/venv.sh"

python -m pip install --quiet --upgrade 'pip>=25.1' # the first one that knows --group
python -m pip install --quiet --editable . --group dev
# The CPU build of torch brings no triton, whose interpreter the kernel tests use.
python -c 'import triton' 2>/dev/null || python -m pip install --quiet 'triton==3.6.*'

run() {
    echo "== $*"
    "$@"
}

run ruff check .
run ruff format --check .
run pyright & # beside the other checkers: each of them keeps one core busy
pyright=$!
run mypy
run mypy tests
wait "$pyright"
run python -m pytest "$@"

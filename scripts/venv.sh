# Sourced by the scripts beside it: the active virtual environment, or .venv of the checkout, made
# when it is not there. Leaves the shell in the checkout's root.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

if [ "$(uname -s)" != Linux ]; then
    echo "nvserve runs on Linux only (pidfd, PR_SET_PDEATHSIG)" >&2
    exit 1
fi

find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
        then
            echo "$name"
            return
        fi
    done
    echo "nvserve needs Python 3.11, 3.12 or 3.13" >&2
    return 1
}

if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python) || exit 1
        echo "making .venv with $("$python" --version)"
        "$python" -m venv .venv || exit 1
    fi
    # shellcheck disable=SC1091
    . .venv/bin/activate
fi

export PYTHONSAFEPATH=1 # the folders of the checkout must not be importable by their bare names

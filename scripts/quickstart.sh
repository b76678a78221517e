#!/usr/bin/env bash
# From a fresh clone to generated text: environment, installation, one prompt on the demo model.
set -euo pipefail
. "$(dirname "$0")/venv.sh"

if ! python -c 'import nvserve, torch, uvicorn' 2>/dev/null; then
    echo "installing nvserve (the first time this fetches torch)"
    python -m pip install --quiet --editable .
fi

echo 'nvserve generate "To be, or"'
echo
nvserve generate "To be, or" "$@"
echo
if [ "${VIRTUAL_ENV}" = "$PWD/.venv" ]; then
    echo "Next:  . .venv/bin/activate"
else
    echo "Next:"
fi
echo "       nvserve launch              # serve it: http://127.0.0.1:8000/v1"
echo "       nvserve launch --model DIR  # serve a Hugging Face model folder"
echo "       nvserve chat                # talk to it"

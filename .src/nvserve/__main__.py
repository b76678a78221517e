"""`python -m nvserve` is the `nvserve` command."""

from nvserve.scripts.cli import main

main()

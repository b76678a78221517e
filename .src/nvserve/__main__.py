"""`python -m nvserve` is the `nvserve` command."""

from nvserve.scripts.entry import main

main()

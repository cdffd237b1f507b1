"""`python -m mlpipe.cli`: the same as the console script, found through the running interpreter."""

from mlpipe.cli import main

main()

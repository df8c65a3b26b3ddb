"""`python -m flashkernels` is the `flashkernels` command."""

from flashkernels.cli import main

main()

"""`python -m trainload` is the command line; torchrun needs it."""

from trainload.cli import main

main()

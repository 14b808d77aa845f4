"""`python -m trainload` is the command line; torchrun needs it."""

from trainload.cli.main import main

main()

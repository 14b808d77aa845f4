"""The program: `trainload`, and `python -m trainload`, which torchrun needs."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line.

    Ctrl-C ends the program with one line also while the modules of the command line are imported.
    """
    try:
        from trainload.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("trainload: interrupted\n")
        sys.exit(1)
    run()


if __name__ == "__main__":
    main()

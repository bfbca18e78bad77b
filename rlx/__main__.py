"""`python -m rlx`: the command line."""

from rlx.cli import main

if __name__ == "__main__":
    main()

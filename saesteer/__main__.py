"""`python -m saesteer` is the command `saesteer`; all of it is in cli.py."""

from saesteer.cli import main

if __name__ == "__main__":
    main()

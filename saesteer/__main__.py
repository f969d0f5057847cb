"""`python -m saesteer` is the command `saesteer`; all of it is in cli.py."""

from saesteer.commands.cli import main

if __name__ == "__main__":
    main()

"""The command line: one file for each command, and the embedded model that several of them use."""

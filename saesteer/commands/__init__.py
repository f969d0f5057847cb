"""The command line: what starts a server, and the embedded model. The other commands are in the workbench."""

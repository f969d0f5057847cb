"""The workbench: one file for each command that measures, finds or proves, and what several of them share."""

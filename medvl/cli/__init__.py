"""Command line of medvl: one file for each group of commands."""

"""`python -m flowdup`: the command line."""

from flowdup.cli import main

main()

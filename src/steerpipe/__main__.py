"""`python -m steerpipe` is `steerpipe`."""

from steerpipe.cli import main

main()

"""``python -m planner``: the same as ``shardwright``."""

from planner.cli import main

main()

"""``python -m edge_dflash`` is ``edge-dflash``."""

from edge_dflash.cli import main

main()

"""The numbers that the row rule, the KV cache and the slots are built on (docs/adr/0004, 0007)."""

from typing import Final

CELL_ROWS: Final = 16  # rows of a dense operation: a token's bits depend on its cell alone
KV_BLOCK_TOKENS: Final = 128  # positions of a KV block: whole cells, so that no cell straddles two blocks
SMALLEST_SLOTS: Final = 2  # one expert is computed while the other arrives

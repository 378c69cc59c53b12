"""The two numbers that the row rule and the KV cache are built on (docs/adr/0004)."""

from typing import Final

CELL_ROWS: Final = 16  # rows of a dense operation: a token's bits depend on its cell alone
KV_BLOCK_TOKENS: Final = 128  # positions of a KV block: whole cells, so that no cell straddles two blocks

"""Experts as raw blocks in a GPU's memory: copies, pinned memory and leases in stream order (docs/adr/0008-cuda.md)."""

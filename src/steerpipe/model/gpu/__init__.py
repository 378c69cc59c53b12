"""The decoder on a GPU (docs/adr/0008-cuda.md). Import it only where the device is one: it needs Triton."""

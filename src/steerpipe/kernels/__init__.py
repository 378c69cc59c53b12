"""Triton kernels and their torch references. Only what runs on a CUDA device imports this package.

Wrappers run on the current stream, write into outputs that are passed in, allocate nothing and never wait for the host:
all of them can be captured in a graph. Launch configurations stand in `configs`.
"""

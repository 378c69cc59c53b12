"""Kernels in Triton's interpreter, on CPU tensors. Where there is a GPU, tests/gpu runs them compiled instead.

Triton decides when it is imported: tests/conftest.py asks for the interpreter before anything else.
"""

import os

import torch

if torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["TRITON_INTERPRET"] = "1"  # a machine that has a GPU, but a torch that cannot use it

"""Writes requirements.lock: every dependency but torch and what only its CUDA wheel needs, each with its hashes.

Triton is of the CUDA wheel too, and is kept: tests run kernels in its interpreter where there is no GPU.

Run it with `make lock`, which provides uv. A version already in the lock is kept unless pyproject.toml forbids it;
delete the file first to take the newest of everything.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
COMPILE = [
    *(sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--extra", "dev"),
    *("--constraints", "constraints.txt"),
    *("--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"),
    *("--no-emit-package", "torch", "--quiet", "--output-file", LOCK.name),
]  # fmt: skip

# torch's own wheel says which of these it needs; a lock that named them would pull gigabytes onto every machine.
OF_THE_CUDA_WHEEL = re.compile(r"(nvidia|cuda)-")


def without_cuda(lock: str) -> str:
    """`lock` without the entries of the CUDA wheel. An entry is a line with a name and its indented hash lines."""
    entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)
    return "".join(entry for entry in entries if not OF_THE_CUDA_WHEEL.match(entry))


def main() -> None:
    subprocess.run(COMPILE, cwd=ROOT, check=True)
    lock = without_cuda(LOCK.read_text())
    assert "://" not in lock, "the lock names a host: compile it without --emit-index-url and --emit-find-links"
    LOCK.write_text(lock)
    print(f"{LOCK.name}: {len(re.findall(r'^[a-z]', lock, flags=re.MULTILINE))} packages")


if __name__ == "__main__":
    main()

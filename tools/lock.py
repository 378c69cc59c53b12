"""Writes requirements.lock: every dependency but torch and what only its CUDA wheel needs, each with its hashes.

Triton is of the CUDA wheel too, and is kept: tests run kernels in its interpreter where there is no GPU.

tests/server/lm-eval.lock holds what one slow test needs beyond that.

Run it with `make lock`, which provides uv. A version already in the lock is kept unless pyproject.toml forbids it;
delete the file first to take the newest of everything.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
LM_EVAL = ROOT / "tests" / "server" / "lm-eval.lock"
LM_EVAL_PACKAGE = "lm-eval[api]==0.4.13\n"
OPTIONS = [
    *("--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"),
    *("--no-emit-package", "torch", "--quiet"),
]  # fmt: skip
COMPILE = [
    *(sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml"),
    *("--extra", "dev", "--extra", "server", "--extra", "chat"),
    *("--constraints", "constraints.txt", *OPTIONS, "--output-file", LOCK.name),
]  # fmt: skip

# torch's own wheel says which of these it needs; a lock that named them would pull gigabytes onto every machine.
OF_THE_CUDA_WHEEL = re.compile(r"(nvidia|cuda)-")


def without_cuda(lock: str) -> str:
    """`lock` without the entries of the CUDA wheel. An entry is a line with a name and its indented hash lines."""
    entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)
    return "".join(entry for entry in entries if not OF_THE_CUDA_WHEEL.match(entry))


def beyond(lock: str, base: str) -> str:
    """The entries of `lock` for packages that `base` does not install everywhere (one with a marker it may not)."""
    entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)
    there = re.findall(r"^([a-z0-9-]+)==\S+ --hash", base, flags=re.MULTILINE)
    return "".join(entry for entry in entries if entry.partition("==")[0] not in {*there, "triton", "setuptools"})


def write_lm_eval() -> None:
    """What one slow test needs beside everything else: the same versions of what both need, and the rest."""
    pins = re.sub(r"( --hash=\S+)+", "", LOCK.read_text())
    with tempfile.TemporaryDirectory() as folder:
        wanted, known = Path(folder) / "wanted.in", Path(folder) / "known.txt"
        wanted.write_text(LM_EVAL_PACKAGE)
        known.write_text(pins + (ROOT / "constraints.txt").read_text())
        compile_it = [*COMPILE[:5], str(wanted), "--constraints", str(known), *OPTIONS, "--output-file", str(LM_EVAL)]
        subprocess.run(compile_it, cwd=ROOT, check=True)
    store(LM_EVAL, beyond(without_cuda(LM_EVAL.read_text()), LOCK.read_text()))


def store(file: Path, lock: str) -> None:
    assert "://" not in lock, "the lock names a host: compile it without --emit-index-url and --emit-find-links"
    file.write_text(re.sub(r" \\\n +--hash", " --hash", lock))  # one line each: the repository's bytes are counted
    print(f"{file.name}: {len(re.findall(r'^[a-z]', lock, flags=re.MULTILINE))} packages")


def main() -> None:
    subprocess.run(COMPILE, cwd=ROOT, check=True)
    store(LOCK, without_cuda(LOCK.read_text()))
    write_lm_eval()


if __name__ == "__main__":
    main()

"""What may stand in the lock."""

import re
from pathlib import Path

from tools import lock

ROOT = Path(__file__).parents[2]


def test_entries_of_the_cuda_wheel_are_left_out() -> None:
    kept = "numpy==2 \\\n    --hash=sha256:a\ntriton==3 \\\n    --hash=sha256:d\n"
    dropped = "nvidia-nccl==1 ; x \\\n    --hash=sha256:b\n    --hash=sha256:c\ncuda-x==3 \\\n    --hash=sha256:d\n"
    assert lock.without_cuda(kept + dropped) == lock.without_cuda(dropped + kept) == kept


def test_the_lock_has_hashes_and_no_hosts_and_neither_torch_nor_cuda() -> None:
    entries = re.split(r"^(?=\S)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) > 40
    assert all(re.match(r"[a-z0-9-]+==\S+( ; .*?)?( --hash=sha256:[0-9a-f]{64})+\n$", entry) for entry in entries)
    names = {entry.partition("==")[0] for entry in entries}
    assert not {name for name in names if re.match(r"torch$|nvidia|cuda", name)}
    assert {"transformers", "numpy", "pytest", "hatchling", "triton"} <= names

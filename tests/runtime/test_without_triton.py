"""A machine without Triton, or without a GPU, imports and runs everything but CUDA."""

import subprocess
import sys

_SCRIPT = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"{name} is not to be imported")

sys.meta_path.insert(0, NoTriton())
import steerpipe.bench.command
import steerpipe.cli
import steerpipe.integrations.transformers
import steerpipe.runtime.pipeline
mine = sorted(name for name in sys.modules if name.startswith(("steerpipe.kernels", "steerpipe.model.gpu")))
assert not mine, mine
assert not [name for name in sys.modules if name.startswith("steerpipe.transfer.cuda")]
"""


def test_nothing_imports_triton_or_what_needs_it_before_a_gpu_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

"""What every test runs under: one thread, no network, no settings from outside, reproducible examples."""

import atexit
import importlib.util
import ipaddress
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports torch or huggingface_hub: both read these once.
_CACHES = tempfile.mkdtemp(prefix="steerpipe-tests-")
atexit.register(shutil.rmtree, _CACHES, ignore_errors=True)
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HOME=os.path.join(_CACHES, "huggingface"),
    XDG_CACHE_HOME=_CACHES,
    TOKENIZERS_PARALLELISM="false",
)
# Triton decides when it is imported: without a GPU, kernels run in its interpreter, on CPU tensors.
if not (any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia").exists()):
    os.environ["TRITON_INTERPRET"] = "1"
# Processes that a test starts see the same steerpipe as the test (an installed one, a checkout or a mutant).
_package = importlib.util.find_spec("steerpipe")
assert _package is not None, "pytest's pythonpath makes steerpipe importable"
assert _package.origin is not None, "steerpipe is a package with an __init__.py"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(_package.origin).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
for _name in [name for name in os.environ if name.startswith("STEERPIPE_")] + ["HF_TOKEN", "HF_ENDPOINT"]:
    os.environ.pop(_name, None)
# A shell without job control starts what is in its background with SIGINT ignored: no interrupt would ever come.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a machine with a GPU where nothing can be installed runs the gpu tests without it
    pass
else:
    settings.register_profile("local", deadline=None)
    settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_finish() -> None:
    """Before the first test, and only where one of them has imported Triton: that takes a second."""
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        from tests.support.interpreter import spare_vain_work

        spare_vain_work()


class NetworkUseError(RuntimeError):
    """A test reached for the network. Not an OSError, so that no code takes it for a failed connection."""


def _is_loopback(host: object) -> bool:
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


def _refuse(host: object) -> None:
    if not _is_loopback(host):
        raise NetworkUseError(f"a test tried to reach {host!r}: tests use loopback addresses only")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    real_connect, real_connect_ex, real_lookup = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def connect(self: socket.socket, address: object) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse(address[0])  # type: ignore[index]
        real_connect(self, address)  # type: ignore[arg-type]

    def connect_ex(self: socket.socket, address: object) -> int:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _refuse(address[0])  # type: ignore[index]
        return real_connect_ex(self, address)  # type: ignore[arg-type]

    def getaddrinfo(host: object, *rest: object, **named: object) -> object:
        _refuse(host.decode() if isinstance(host, bytes) else host)
        return real_lookup(host, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket.socket, "connect_ex", connect_ex)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Puts torch's thread count back after a test that changed it."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)

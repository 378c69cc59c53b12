"""What cannot be had when a source is opened: a clear error, and nothing left behind."""

from types import SimpleNamespace

import pytest

from steerpipe.core.errors import CapacityError, ConfigError
from steerpipe.transfer.cuda.copier import HostCopier
from steerpipe.transfer.cuda.driver import Driver
from steerpipe.transfer.cuda.pinned import PinnedArena
from steerpipe.transfer.cuda.source import CudaSource
from steerpipe.transfer.disk import DiskLink
from tests.transfer.cuda.blocks import CPU, backing, contents, made_up
from tests.transfer.packs import tiny_pack

BLOCK = tiny_pack().layout(0).block_bytes


def test_slabs_that_cannot_be_pinned_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    pins: list[PinnedArena] = []
    pin, close_arena, close_disk = PinnedArena.pin, PinnedArena.close, DiskLink.close

    def second_fails(arena: PinnedArena) -> None:
        pins.append(arena)
        if len(pins) == 2:
            raise CapacityError("planted", fix="none")
        pin(arena)

    monkeypatch.setattr(PinnedArena, "pin", second_fails)
    monkeypatch.setattr(PinnedArena, "close", lambda arena: (closed.append(arena), close_arena(arena)))
    monkeypatch.setattr(DiskLink, "close", lambda link: (closed.append("disk"), close_disk(link)))
    with pytest.raises(CapacityError, match="planted"):
        CudaSource.open(tiny_pack(), slots=4, device=CPU, pinned_bytes=3 * BLOCK)
    assert closed == [pins[0], "disk"]
    assert not pins[0].pinned


class CopiedWords(HostCopier):
    """As a driver that cannot write single words."""

    orders_words = False


def test_without_words_in_order_kernels_never_wait_for_one() -> None:
    layers = made_up()
    blocks, copier = contents(layers), CopiedWords()
    with CudaSource(layers, backing(blocks, copier), slots=12, device=CPU, copier=copier) as source:
        assert not source.serves(1), "everything is leased"
        with source.lease(1, [0, 3]) as lease:
            assert sorted(expert for wave in lease.waves() for expert in wave) == [0, 3]
        source.check_integrity()
    copier = CopiedWords()
    with pytest.raises(ConfigError, match="cannot read missing experts"):
        CudaSource(layers, backing(blocks, copier), slots=12, device=CPU, copier=copier, direct=True)


@pytest.mark.parametrize("status", [1, 2, 304, 801])
def test_memory_that_cannot_be_locked_names_the_option(status: int) -> None:
    driver = Driver.__new__(Driver)
    driver._library = SimpleNamespace(  # type: ignore[assignment]
        cuMemHostRegister_v2=lambda *given: status, cuGetErrorName=lambda *given: 0, cuGetErrorString=lambda *given: 0
    )
    with pytest.raises(CapacityError, match="8 GiB of RAM could not be page-locked") as caught:
        driver.register(4096, 8 << 30)
    assert "--pin" in caught.value.fix

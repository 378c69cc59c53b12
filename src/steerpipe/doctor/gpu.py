"""The GPU: what torch sees, and how fast the link to it is."""

from pathlib import Path
from statistics import median

import torch

from steerpipe.core.units import format_bytes
from steerpipe.doctor.report import Fact, Finding, Level, Section

COPY_BYTES = 128 << 20
COPIES = 5
SLOW_LINK_GB_PER_SECOND = 10.0


def examine_gpu(devices: Path = Path("/dev")) -> Section:
    if torch.cuda.is_available():
        return _examine_cuda()
    return Section("gpu", (Fact("device", None),), (judge_absence(torch.version.cuda, (devices / "nvidia0").exists()),))


def judge_absence(built_for: str | None, has_device_file: bool) -> Finding:
    """`built_for`: the CUDA version of the torch wheel, None for a CPU wheel."""
    if not has_device_file:
        return Finding(Level.OK, "none: the CPU path is used")
    if built_for is None:
        return Finding(
            Level.WARNING,
            "there is an NVIDIA device, but this torch was built for the CPU only",
            fix="install the CUDA wheel of torch for this machine, as pytorch.org describes",
        )
    return Finding(
        Level.WARNING,
        f"there is an NVIDIA device, but torch (built for CUDA {built_for}) cannot use it",
        fix=f"take an NVIDIA driver that supports CUDA {built_for}, and see that CUDA_VISIBLE_DEVICES is not empty",
    )


def _examine_cuda() -> Section:
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    pageable = torch.ones(COPY_BYTES, dtype=torch.uint8)
    pinned = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    pinned_rate = copy_rate(pinned)
    how = f"median of {COPIES} copies of {format_bytes(COPY_BYTES)} to the device, after one unmeasured"
    facts = (
        Fact("device", properties.name),
        Fact("devices", torch.cuda.device_count(), how="the first one is used"),
        Fact("compute capability", f"{properties.major}.{properties.minor}"),
        Fact("memory", total, "bytes"),
        Fact("free memory", free, "bytes"),
        Fact("CUDA of torch", torch.version.cuda),
        Fact("driver", _driver()),
        Fact("pinned copy", pinned_rate, "GB/s", how),
        Fact("pageable copy", copy_rate(pageable), "GB/s", how),
    )
    used = Finding(Level.OK, f"{properties.name} is used, and memory can be pinned for it")
    return Section("gpu", facts, (used, judge_link(pinned_rate)))


def judge_link(gb_per_second: float) -> Finding:
    if gb_per_second >= SLOW_LINK_GB_PER_SECOND:
        return Finding(Level.OK, f"the link moves {gb_per_second} GB/s from pinned memory")
    return Finding(
        Level.NOTE,
        f"the link moves only {gb_per_second} GB/s from pinned memory; a full PCIe 3.0 x16 slot gives about 12",
        fix="see that the card sits in an x16 slot at full speed (nvidia-smi -q, 'Link Width')",
    )


def copy_rate(source: torch.Tensor) -> float:
    """GB/s from host memory to the device, timed by events on the device."""
    target = torch.empty_like(source, device="cuda")
    seconds: list[float] = []
    for _ in range(1 + COPIES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return round(source.nbytes / median(seconds[1:]) / 1e9, 2)


def _driver() -> str | None:
    for file in (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version")):
        if file.exists():
            return file.read_text().strip().splitlines()[0]
    return None

"""`steerpipe doctor`: reads and measures this machine, and says what is wrong and what to do."""

import time
from pathlib import Path

from steerpipe.doctor.cpu import examine_cpu, finish_product, start_product
from steerpipe.doctor.disk import examine_disk
from steerpipe.doctor.gpu import examine_gpu
from steerpipe.doctor.memory import examine_memory
from steerpipe.doctor.render import render
from steerpipe.doctor.report import DoctorReport, Fact, Finding, Level, Section
from steerpipe.doctor.versions import examine_versions

__all__ = ["DoctorReport", "Fact", "Finding", "Level", "Section", "render", "run_doctor"]


def run_doctor(folder: Path | None = None) -> DoctorReport:
    """Examines everything once, in a few seconds. `folder`: whose disk to measure; None: that of steerpipe's cache."""
    begin = time.perf_counter()
    product = start_product()
    versions, memory, disk = examine_versions(), examine_memory(), examine_disk(folder)
    cpu = examine_cpu(finish_product(product))
    gpu = examine_gpu()
    return DoctorReport((versions, cpu, memory, gpu, disk), took_seconds=round(time.perf_counter() - begin, 2))

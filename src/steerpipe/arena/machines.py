"""The machines on which a predictor's worth is stated. Blocks of Qwen1.5-MoE, whose shape the embedded model has."""

from dataclasses import dataclass

from steerpipe.transfer.machine import Machine, slots_of_share

LINKS_BYTES_PER_SECOND = {  # as measured or as sold: docs/arena.md names the source of each
    "PCIe 5": 55e9,  # x16, pinned memory, large copies
    "PCIe 4": 25e9,  # x16
    "NVMe": 7e9,  # one Gen 4 drive, read straight into the fast memory
}
BLOCK_BYTES = {"bf16": 17_301_504, "int4": 4_600_000}  # one expert: 3 x 2048 x 1408 weights
RESIDENCIES = (0.125, 0.25, 0.5)
LAYER_SECONDS = 1e-4  # Tc: compute of one layer at batch 1


@dataclass(frozen=True, slots=True)
class StatedMachine:
    """A link, a format and a share of all experts in fast memory."""

    link: str
    experts_format: str
    residency: float
    layer_seconds: float = LAYER_SECONDS

    @property
    def name(self) -> str:
        """Tc is named where it is not the usual one."""
        usual = self.layer_seconds == LAYER_SECONDS
        slower = "" if usual else f", {self.layer_seconds * 1e3:g} ms per layer"
        return f"{self.link}, {self.experts_format}, {100 * self.residency:g} %{slower}"

    def machine(self, all_experts: int) -> Machine:
        return Machine(
            slots=slots_of_share(self.residency, all_experts),
            block_bytes=BLOCK_BYTES[self.experts_format],
            link_bytes_per_second=LINKS_BYTES_PER_SECOND[self.link],
            layer_seconds=self.layer_seconds,
        )

    @property
    def paying_precision(self) -> float:
        """Share of sent blocks that must be used for prefetch to pay: 1 - Tc / Tx."""
        block_seconds = BLOCK_BYTES[self.experts_format] / LINKS_BYTES_PER_SECOND[self.link]
        return max(0.0, 1.0 - self.layer_seconds / block_seconds)


def stated_machines() -> list[StatedMachine]:
    """Every link, format and residency."""
    return [
        StatedMachine(link, experts_format, residency)
        for link in LINKS_BYTES_PER_SECOND
        for experts_format in BLOCK_BYTES
        for residency in RESIDENCIES
    ]

"""The memory bandwidth of this device, with which benchmarks are compared and which none can exceed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .device import Device

#: Bytes per second from the data sheets, by a part of the device's name. The first match counts.
DATASHEET = (
    ("GH200 480GB", 4.0e12),
    ("GH200 144G", 4.9e12),
    ("H200", 4.8e12),
    ("H20", 4.0e12),
    ("H100 NVL", 3.9e12),
    ("H100 PCIe", 2.0e12),
    ("H100 80GB HBM3", 3.35e12),
    ("A100-SXM4-80GB", 2.039e12),
    ("A100 80GB PCIe", 1.935e12),
    ("A100", 1.555e12),
    ("B200", 8.0e12),
    ("L40S", 0.864e12),
    ("RTX 5090", 1.792e12),
    ("RTX 4090", 1.008e12),
    ("RTX 3090", 0.936e12),
)

#: Each measurement moves at least this many bytes, far more than any L2 holds.
SIZE = 2**30
ROUNDS = 20


@dataclass(frozen=True)
class Roofline:
    """Bytes per second. copy: a copy within the device, bytes read plus bytes written. read: a reduction. peak: from
    the data sheet, else bus width times memory clock, else None."""

    copy: float
    read: float
    peak: float | None

    @property
    def limit(self) -> float:
        """The bandwidth that no correct benchmark can exceed. It can be above `copy`, since reads alone are faster."""
        return max(self.copy, self.read, self.peak or 0.0)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "limit": self.limit}


def measure(device: Device) -> Roofline:
    """Measure the roofline, in less than a second and with 2 GiB. The data are random, since zeros can be faster."""
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    numbers = source.view(torch.float32)
    copy = 2 * SIZE / _median(device, lambda: target.copy_(source))
    read = SIZE / min(_median(device, numbers.sum), _median(device, numbers.amax))
    return Roofline(copy, read, peak(torch.cuda.get_device_name(), torch.cuda.get_device_properties()))


def peak(name: str, properties: Any) -> float | None:
    """The theoretical bandwidth of the device `name`, or None if it is unknown."""
    for part, bandwidth in DATASHEET:
        if part in name:
            return bandwidth
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    # kHz and bits; memory transfers twice per clock.
    return 2.0 * clock * 1e3 * width / 8 or None


def _median(device: Device, function: Callable[[], object]) -> float:
    durations = []
    for _ in range(ROUNDS + 3):
        start = device.now()
        function()
        durations.append(device.now() - start)
    return statistics.median(durations[3:])

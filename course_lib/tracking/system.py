"""Measures what a rank uses of its machine: processor, memory, GPU."""

import psutil
import torch

METRICS = ("cpu_percent", "memory_mib", "memory_free_mib", "gpu_memory_mib", "gpu_memory_peak_mib")
MIB = 2**20


class SystemSampler:
    """Samples this process; ``cpu_percent`` is of one core, since the sample before, and can be above 100."""

    def __init__(self, device: torch.device):
        self.device, self.process = device, psutil.Process()
        self.process.cpu_percent()  # the first call begins the interval

    def sample(self) -> list[float]:
        """One number for each of :data:`METRICS`, memory in MiB; a CPU's GPU numbers are 0."""
        cuda = self.device.type == "cuda"
        return [
            self.process.cpu_percent(),
            self.process.memory_info().rss / MIB,
            psutil.virtual_memory().available / MIB,
            torch.cuda.memory_allocated(self.device) / MIB if cuda else 0.0,
            torch.cuda.max_memory_allocated(self.device) / MIB if cuda else 0.0,
        ]

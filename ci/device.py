"""Which device this machine measures on, found without torch."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ci.baseline import device_key
from ci.errors import UsageError

DEVICE_VARIABLE = "RAPID_LLM_BENCH_DEVICE"


@dataclass(frozen=True)
class Device:
    """A device by the name that its driver gives, and the key that names its baseline and results."""

    name: str
    type: str

    @property
    def key(self) -> str:
        return device_key(self.name)

    @property
    def is_gpu(self) -> bool:
        return self.type == "cuda"

    def asv_fields(self) -> dict[str, str]:
        """The fields that asv keeps of a machine."""
        return {
            "machine": self.key,
            "os": f"{platform.system()} {platform.release()}",
            "arch": platform.machine(),
            "cpu": cpu_name(),
            "num_cpu": str(os.cpu_count()),
            "ram": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if hasattr(os, "sysconf") else "",
            "gpu": self.name if self.is_gpu else "",
        }


def cpu_name() -> str:
    """Model name of the CPU, or the machine type where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@functools.lru_cache(maxsize=1)
def _gpu() -> tuple[str, str] | None:
    """Name and UUID of the first visible GPU, None where there is none."""
    command = ["nvidia-smi", "--query-gpu=name,uuid", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return None
    if visible:
        command.append(f"--id={visible.split(',')[0]}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    name, _, uuid = lines[0].rpartition(",") if lines else ("", "", "")
    return (name.strip(), uuid.strip()) if name.strip() else None


def gpu_uuid() -> str | None:
    """The UUID of the GPU that `detect` finds, None where that is a CPU."""
    found = _gpu()
    return found[1] if found is not None and detect().is_gpu else None


def detect() -> Device:
    """The GPU if there is one, else the CPU; RAPID_LLM_BENCH_DEVICE (auto, cpu, cuda) decides otherwise.

    Raises:
        UsageError: The variable names no device, or one that is not there.
    """
    wanted = os.environ.get(DEVICE_VARIABLE, "auto")
    if wanted not in ("auto", "cpu", "cuda"):
        raise UsageError(f"{DEVICE_VARIABLE}={wanted!r} names no device: use auto, cpu or cuda.")
    found = None if wanted == "cpu" else _gpu()
    name = None if found is None else found[0]
    if name is None and wanted == "cuda":
        raise UsageError(f"{DEVICE_VARIABLE}=cuda, and nvidia-smi shows no GPU: unset it or mend the driver.")
    return Device(f"CPU {cpu_name()}", "cpu") if name is None else Device(name, "cuda")

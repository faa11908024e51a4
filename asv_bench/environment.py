"""Where a number was obtained: device, versions, state, and the variables that change which kernel runs."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asv_bench.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


KERNEL_VARIABLES = (
    "RAPID_LLM_FORCE_BACKEND",
    "RAPID_LLM_BENCH_DEVICE",
    "TRITON_INTERPRET",
    "TRITON_DEFAULT_BACKEND",
    "TRITON_DISABLE_LINE_INFO",
    "TRITON_ALWAYS_COMPILE",
    "TRITON_PTXAS_PATH",
    "TORCH_CUDA_ARCH_LIST",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
_SMI_FIELDS = {
    "uuid": "uuid",
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "mem_clock_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "power_limit_w": "power.limit",
    "throttle_reasons": "clocks_event_reasons.active",
    "mig": "mig.mode.current",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
}
_THROTTLE_BITS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


def last_level_cache_bytes() -> int:
    """Size of the largest CPU cache that the kernel reports, 0 where it reports none."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
        sizes.append(int(text.rstrip("KM")) * factor)
    return max(sizes)


def cpu_name() -> str:
    """Model name of the CPU, or the machine type where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def boot_id() -> str:
    """Identity of this boot of the machine, "unknown" where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def collect_environment(device: torch.device) -> dict[str, Any]:
    """Device, versions, state and variables, as the process record stores them; what cannot be read is None, never guessed."""
    smi = _smi() if device.type == "cuda" else {}
    return {
        "device": _device(device, smi),
        "driver": smi.get("driver"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "boot_id": boot_id(),
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "commit": os.environ.get("ASV_COMMIT") or _git_commit(),
        "env_vars": {name: os.environ[name] for name in KERNEL_VARIABLES if name in os.environ},
        "modified_files": modified_files(),
        "state": _state(smi, device),
    }


def modified_files() -> list[str] | None:
    """Tracked files that differ from the commit, of the checkout under test and of the one that the suites and timers are from.

    None where git does not tell.
    """
    checkouts = {Path(__file__).resolve().parent.parent}
    if os.environ.get("ASV_BUILD_DIR"):
        checkouts.add(Path(os.environ["ASV_BUILD_DIR"]).resolve())
    found: list[str] = []
    for checkout in sorted(checkouts):
        command = ["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        found.extend(line[3:] for line in done.stdout.splitlines())
    return sorted(set(found))


def foreign_processes(device: torch.device) -> int | None:
    """Compute processes on the GPU besides this one, which holds a context of its own by now.

    In a container the driver lists this process under a number of another namespace, so that it cannot be told by its id: one of
    those listed is this one. None where the driver lists none or refuses.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize(device)  # makes the context, where nothing has yet
    listed = _smi_lines("--query-compute-apps=pid")
    return len(set(listed)) - 1 if listed else None


def collect_state(device: torch.device) -> dict[str, Any]:
    """Clocks, temperature, throttle reasons and other processes now; None where they cannot be read."""
    return _state(_smi() if device.type == "cuda" else {}, device)


def _state(smi: dict[str, str], device: torch.device) -> dict[str, Any]:
    """On a CPU every machine has other processes, which say nothing: the field is left out."""
    foreign = {"foreign_processes": foreign_processes(device)} if device.type == "cuda" else {}
    return {
        **foreign,
        "sm_clock_mhz": _number(smi.get("sm_clock_mhz")),
        "mem_clock_mhz": _number(smi.get("mem_clock_mhz")),
        "temperature_c": _number(smi.get("temperature_c")),
        "power_limit_w": _number(smi.get("power_limit_w")),
        "throttle_reasons": _throttle_reasons(smi.get("throttle_reasons")),
        "ecc_errors": _number(smi.get("ecc_errors")),
    }


def _device(device: torch.device, smi: dict[str, str]) -> dict[str, Any]:
    if device.type != "cuda":
        return {
            "type": "cpu",
            "name": f"CPU {cpu_name()}",
            "compute_capability": None,
            "multiprocessors": os.cpu_count(),
            "memory_bytes": None,
            "l2_bytes": last_level_cache_bytes(),
            "mig": None,
            "uuid": None,
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "mig": smi.get("mig"),
        "uuid": smi.get("uuid"),
    }


def _smi() -> dict[str, str]:
    """State of the first visible GPU from nvidia-smi; empty where it is absent or refuses."""
    lines = _smi_lines(f"--query-gpu={','.join(_SMI_FIELDS.values())}")
    if not lines:
        return {}
    values = (cell.strip() for cell in lines[0].split(","))
    return {name: value for name, value in zip(_SMI_FIELDS, values, strict=False) if "N/A" not in value}


def _smi_lines(query: str) -> list[str]:
    """What nvidia-smi answers of the first visible GPU, a line each; nothing where it is absent or refuses."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    if visible:
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.strip().splitlines() if line.strip()]


def _throttle_reasons(text: str | None) -> list[str] | None:
    if text is None:
        return None
    try:
        bits = int(text, 16)
    except ValueError:
        return None
    return [name for bit, name in _THROTTLE_BITS.items() if bits & bit]


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _triton_version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

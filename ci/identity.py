"""What tells devices and environments apart: names of baseline files, and the parts of a process record that a comparison rests on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from ci.baseline_file import Device, Environment
from ci.errors import BaselineError, UsageError

_MAX_KEY_LENGTH = 96
_HARMLESS_THROTTLES = frozenset({"none", "idle", "gpu_idle", "power_cap", "sw_power_cap", ""})
"""A power cap is the normal state of a loaded datacentre GPU; thermal and hardware reasons are not."""


_NO_MIG = frozenset({"", "disabled", "none", "n/a", "[n/a]"})


def device_key(name: str, *, mig: str | None = None) -> str:
    """The file name (without suffix) of a device's baseline.

    Letters, digits, ``.``, ``-`` and ``_`` stay, blanks become ``_``. A name that loses anything else, or is too long, ends in a hash, so
    that two devices never share a file: ``NVIDIA H200`` is ``NVIDIA_H200``.

    Args:
        name: As the driver gives it, in its own capitals; surrounding blanks do not count.
        mig: MIG profile, e.g. ``3g.40gb``; appended where the name does not contain it. Words like ``Disabled`` are no profile.
    Raises:
        UsageError: The name has no letter or digit.
    """
    plain = " ".join(name.split())
    if mig and "g." in mig and mig not in plain:
        plain = f"{plain} MIG {mig}"
    key = re.sub(r"[^A-Za-z0-9._-]+", "_", plain).strip("._-")
    if not re.search(r"[A-Za-z0-9]", " ".join(name.split())) or not key:
        raise UsageError(f"a device is named {name!r}, which has no letter or digit to name a baseline by; name it")
    lossless = key == plain.replace(" ", "_")
    if not lossless or len(key) > _MAX_KEY_LENGTH:
        digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
        key = f"{key[: _MAX_KEY_LENGTH - 9]}-{digest}"
    return key


def table(environment: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table within an environment, empty where it is absent."""
    value = environment.get(name)
    return value if isinstance(value, Mapping) else {}


def text_of(value: object) -> str | None:
    """The text of a value, None where there is none."""
    return None if value is None else str(value)


def device_of(environment: Mapping[str, Any]) -> Device:
    """The device that a process record's environment describes.

    Raises:
        BaselineError: It names no device.
    """
    device, state = table(environment, "device"), table(environment, "state")
    name = " ".join(str(device.get("name") or "").split())
    if not name:
        raise BaselineError("the environment of the run names no device; measure with a suite that records device.name")
    return Device(
        type=str(device.get("type") or ""),
        name=name,
        compute_capability=text_of(device.get("compute_capability")),
        multiprocessors=device.get("multiprocessors"),
        memory_bytes=device.get("memory_bytes"),
        mig=None if str(device.get("mig") or "").lower() in _NO_MIG else str(device.get("mig")),
        power_limit_w=state.get("power_limit_w"),
    )


def environment_of(environment: Mapping[str, Any]) -> Environment:
    """The software that a process record's environment describes."""
    names = ("driver", "cuda", "torch", "triton", "python")
    return Environment(**{name: text_of(environment.get(name)) for name in names})


def throttles(environment: Mapping[str, Any]) -> list[str]:
    """Throttle reasons that make a measurement unfit: all but none, idle and the power cap."""
    reasons = table(environment, "state").get("throttle_reasons")
    listed = reasons.split(",") if isinstance(reasons, str) else list(reasons or [])
    plain = [re.sub(r"[^a-z0-9]+", "_", str(reason).lower()).strip("_") for reason in listed]
    return [reason for reason in plain if reason not in _HARMLESS_THROTTLES]

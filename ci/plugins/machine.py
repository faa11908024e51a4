"""The device names the machine: asv asks no questions and writes nothing to the home directory.

Results lie under the device's key (`NVIDIA_H200`), the same that names its baseline, and not under a host name that changes with every
runner. `--machine NAME` still takes results of a machine that is known already.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from asv import machine, util

from ci import device

_ROOT = Path(__file__).resolve().parents[2]
_original_load = machine.Machine.load.__func__


def _file() -> str:
    return str(_ROOT / ".asv" / "machines.json")


def _load(cls: Any, /, machine_name: str | None = None, **kwargs: Any) -> Any:
    here = device.detect()
    if machine_name in (None, here.key):
        os.makedirs(_ROOT / ".asv", exist_ok=True)
        machine.MachineCollection.save(here.key, here.asv_fields())
        return _original_load(cls, machine_name=here.key, **kwargs)
    if not os.path.isfile(_file()) or machine_name not in util.load_json(_file(), 1):
        raise util.UserError(
            f"No results are known of a machine '{machine_name}'; this one is '{here.key}', leave --machine out to use it."
        )
    return _original_load(cls, machine_name=machine_name, **kwargs)


def setup() -> None:
    machine.MachineCollection.get_machine_file_path = staticmethod(_file)
    machine.Machine.get_unique_machine_name = classmethod(lambda cls: device.detect().key)
    machine.Machine.load = classmethod(_load)

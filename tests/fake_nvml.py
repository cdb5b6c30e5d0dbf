"""The part of pynvml that llmserve asks, with figures that a test sets."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any


class FakeNvml(ModuleType):
    """In place of the module. `missing` are functions that this GPU does not support."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_PCIE_UTIL_RX_BYTES = 0
    NVML_CLOCK_MEM, NVML_PCIE_UTIL_TX_BYTES = 2, 1
    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_CRC_FLIT = 0, 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, *, temperature: int = 40, reasons: int = 0, missing: str = "") -> None:
        super().__init__("pynvml")
        self.temperature, self.reasons, self.missing = temperature, reasons, missing.split()
        self.asked_for: list[object] = []

    def nvmlInit(self) -> None:
        if "Init" in self.missing:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.asked_for.append(index)
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked_for.append(uuid)
        return "handle"

    def _nvlink_errors(self, handle: str, link: int, counter: int) -> int:
        if link >= 4 or "NvLinkErrorCounter" in self.missing:  # it has four links
            raise self.NVMLError("Invalid Argument")
        return {self.NVML_NVLINK_ERROR_DL_REPLAY: 1, self.NVML_NVLINK_ERROR_DL_CRC_FLIT: 20}[
            counter
        ]

    def __getattr__(self, name: str) -> Any:
        answers = {
            "Name": "FakeGPU",
            "Temperature": self.temperature,
            "PowerUsage": 250_000,
            "EnforcedPowerLimit": 700_000,
            "ClockInfo": 1_500,
            "MaxClockInfo": 1_980,
            "UtilizationRates": SimpleNamespace(gpu=75, memory=50),
            "MemoryInfo": SimpleNamespace(used=2**30, total=2**34),
            "PcieThroughput": 4_000,
            "PcieReplayCounter": 3,
            "TotalEccErrors": 5,
            "CurrentClocksEventReasons": self.reasons,
            "CurrentClocksThrottleReasons": self.reasons,
        }
        if name == "nvmlDeviceGetNvLinkErrorCounter":
            return self._nvlink_errors
        function = name.removeprefix("nvmlDeviceGet")
        if function == name or function not in answers:
            raise AttributeError(name)

        def ask(handle: str, *_: object) -> Any:
            assert handle == "handle"
            if function in self.missing:
                raise self.NVMLError("Not Supported")
            return answers[function]

        return ask

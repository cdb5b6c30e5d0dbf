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
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    NVML_SUCCESS, nvmlEventTypeXidCriticalError = 0, 8

    def __init__(self, *, temperature: int = 40, reasons: int = 0, missing: str = "") -> None:
        super().__init__("pynvml")
        self.temperature, self.reasons, self.missing = temperature, reasons, missing.split()
        self.asked_for: list[object] = []
        self.num_gpus = 1
        self.xids: dict[str, list[int]] = {}  # that are still to be told, by GPU
        self.event_sets: dict[int, str] = {}  # the GPU of each that is open

    def nvmlInit(self) -> None:
        if "Init" in self.missing:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.asked_for.append(index)
        return f"handle {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked_for.append(uuid)
        return f"handle {uuid}"

    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus

    def nvmlDeviceGetFieldValues(self, handle: str, asked: list[tuple[int, int]]) -> list[Any]:
        if "FieldValues" in self.missing:
            raise self.NVMLError("Not Supported")
        return [
            SimpleNamespace(
                nvmlReturn=0 if link < 4 else 2, value=SimpleNamespace(ullVal=field * 2**10)
            )
            for field, link in asked
        ]

    def nvmlEventSetCreate(self) -> int:
        if "EventSetCreate" in self.missing:
            raise self.NVMLError("Not Supported")
        return len(self.event_sets) + 1

    def nvmlDeviceRegisterEvents(self, handle: str, types: int, events: int) -> None:
        assert types == self.nvmlEventTypeXidCriticalError
        self.event_sets[events] = handle

    def nvmlEventSetWait(self, events: int, timeout_ms: int) -> Any:
        waiting = self.xids.get(self.event_sets[events], [])
        if timeout_ms != 0 or not waiting:
            raise self.NVMLError("Timeout")
        return SimpleNamespace(eventData=waiting.pop(0))

    def nvmlEventSetFree(self, events: int) -> None:
        del self.event_sets[events]

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
            assert handle.startswith("handle ")
            if function in self.missing:
                raise self.NVMLError("Not Supported")
            return answers[function]

        return ask

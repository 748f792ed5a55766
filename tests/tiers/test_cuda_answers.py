"""What the bindings' answers become: an error of ours, whatever they answer with."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from transferd.errors import DeviceLost, TierError
from transferd.tiers.cuda import bindings
from transferd.tiers.cuda.bindings import (
    BindingsDriver,
    check_fit,
    check_ptx,
    check_release,
    compile_kernel,
    nvrtc_version,
)
from transferd.tiers.cuda.driver import NO_DRIVER, NOT_YET, OUT_OF_MEMORY, failure
from transferd.tiers.cuda.kernel import source


class Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_LAUNCH_FAILED = 719


class Answer(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_SYSTEM_NOT_READY = 802


def answering(work: Any) -> BindingsDriver:
    """The driver over bindings whose cuMemAlloc does `work`."""
    api = SimpleNamespace(
        CUresult=Result,
        CUdriverProcAddressQueryResult=SimpleNamespace(CU_GET_PROC_ADDRESS_SUCCESS=0),
        cuDriverGetVersion=lambda: (Result.CUDA_SUCCESS, 12040),
        cuGetProcAddress=lambda *_: (Result.CUDA_ERROR_NOT_FOUND, 0, 1),
        cuGetErrorString=lambda _: (Result.CUDA_SUCCESS, b"what it means"),
        cuMemAlloc=work,
    )
    return BindingsDriver(api)


def raises(error: Exception) -> Any:
    def work(*_: object) -> None:
        raise error

    return work


def test_an_answer_is_translated_with_its_name_and_text() -> None:
    driver = answering(lambda _: (Result.CUDA_ERROR_INVALID_VALUE, None))
    assert not driver.batches
    with pytest.raises(TierError, match=r"cuMemAlloc failed: CUDA_ERROR_INVALID_VALUE \(what it means\)") as caught:
        driver.allocate(1)
    assert not isinstance(caught.value, DeviceLost)
    with pytest.raises(DeviceLost):
        answering(lambda _: (Result.CUDA_ERROR_LAUNCH_FAILED, None)).allocate(1)


@pytest.mark.parametrize(
    "error", [ValueError("12345 is not a valid\nCUresult"), RuntimeError("function cuX is not found")]
)
def test_an_unnamed_cuda_error_is_still_a_tier_error(error: Exception) -> None:
    with pytest.raises(TierError, match="cuMemAlloc failed: ") as caught:
        answering(raises(error)).allocate(1)
    assert "\n" not in str(caught.value)


def test_a_wrong_call_of_ours_is_not_hidden() -> None:
    with pytest.raises(TypeError):
        answering(raises(TypeError("an integer is required"))).allocate(1)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", OUT_OF_MEMORY),
        ("CUDA_ERROR_NO_DEVICE", NO_DRIVER),
        ("CUDA_ERROR_INVALID_VALUE", "tier_error"),
        ("CUDA_ERROR_ILLEGAL_ADDRESS", "device_lost"),
        ("CUDA_ERROR_ECC_UNCORRECTABLE", "device_lost"),
        ("CUDA_ERROR_MPS_CLIENT_TERMINATED", "device_lost"),
        ("CUDA_ERROR_DEVICE_UNAVAILABLE", "tier_error"),
        ("CUDA_ERROR_SYSTEM_NOT_READY", NOT_YET),
    ],
)
def test_each_answer_has_a_code(name: str, code: str) -> None:
    assert failure("cuX", name).reason == code


@pytest.mark.parametrize(
    ("version", "asked"), [(12040, []), (12080, [12080]), (12090, [12080]), (13000, [13000]), (13020, [13000])]
)
def test_a_driver_is_asked_for_no_function_that_came_after_it(version: int, asked: list[int]) -> None:
    heard: list[int] = []
    rows: list[tuple[bytes, int]] = []

    def resolve(symbol: bytes, since: int, _flags: int) -> tuple[Result, int, int]:
        if symbol == b"cuMemcpyBatchAsync":
            heard.append(since)
        else:
            rows.append((symbol, since))
        return Result.CUDA_SUCCESS, id(heard), 0

    api = SimpleNamespace(
        CUresult=Result,
        CUdriverProcAddressQueryResult=SimpleNamespace(CU_GET_PROC_ADDRESS_SUCCESS=0),
        cuDriverGetVersion=lambda: (Result.CUDA_SUCCESS, version),
        cuGetProcAddress=resolve,
    )
    driver = BindingsDriver(api)
    assert (driver.batches, driver.row_batches) == (bool(asked), version >= 13000)
    assert heard == asked
    assert rows == [(b"cuMemcpy3DBatchAsync", 13000)] * (version >= 13000) + [(b"cuMemcpy2DAsync", version)]


@pytest.mark.parametrize("release", ["12.8.0", "12.9.0"])
def test_bindings_that_keep_the_gil_are_refused_in_one_line(release: str) -> None:
    with pytest.raises(TierError, match=f"cuda-bindings {release} stops every other thread") as caught:
        check_release(release)
    assert caught.value.reason == NO_DRIVER


def test_of_all_bindings_only_those_that_let_others_run_are_used() -> None:
    refused = []
    for release in ("12.8.0", "12.9.0", "12.9.1", "12.9.4.post1", "13.0.0", "13.1"):
        try:
            check_release(release)
        except TierError:
            refused.append(release)
    assert refused == ["12.8.0", "12.9.0"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("CUDA_ERROR_DEVICE_UNAVAILABLE", "exclusive mode: nvidia-smi -c DEFAULT"),
        ("CUDA_ERROR_SYSTEM_NOT_READY", "systemctl start nvidia-fabricmanager"),
        ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot after its upgrade"),
    ],
)
def test_an_answer_that_says_little_comes_with_what_to_do(name: str, remedy: str) -> None:
    assert remedy in str(failure("cuInit", name))


def test_a_fabric_manager_that_starts_late_is_waited_for() -> None:
    answers = iter([Answer.CUDA_ERROR_SYSTEM_NOT_READY] * 3 + [Answer.CUDA_SUCCESS])
    waited: list[float] = []
    bindings._initialise(SimpleNamespace(CUresult=Answer, cuInit=lambda _: (next(answers),)), waited.append)
    assert waited == [bindings.FABRIC_WAIT_S] * 3


@pytest.mark.parametrize(("answer", "waits"), [("CUDA_ERROR_SYSTEM_NOT_READY", 60), ("CUDA_ERROR_NO_DEVICE", 0)])
def test_and_not_for_ever_nor_for_anything_else(answer: str, waits: int) -> None:
    waited: list[float] = []
    with pytest.raises(TierError, match=answer):
        bindings._initialise(SimpleNamespace(CUresult=Answer, cuInit=lambda _: (Answer[answer],)), waited.append)
    assert len(waited) == waits


@pytest.mark.parametrize(
    ("driver", "nvrtc", "bindings"),
    [
        (13000, (13, 5), "13.5.0"),  # machine code of a newer minor version
        (13020, (13, 0), "13.0.3"),
        (12020, (12, 9), "12.9.1"),  # R535
        (13000, (12, 9), "12.9.1"),
        (12080, None, "12.9.1"),
    ],
)
def test_code_that_the_driver_can_load_is_no_problem(driver: int, nvrtc: tuple[int, int] | None, bindings: str) -> None:
    problem = ""
    try:
        check_fit(driver, nvrtc, bindings)
    except TierError as error:
        problem = str(error)
    assert problem == ""


@pytest.mark.parametrize(
    ("nvrtc", "driver", "remedy"),
    [
        ((13, 5), (13, 0), "pip install 'nvidia-cuda-nvrtc==13.0.*', or install a driver for CUDA 13.5"),
        ((12, 9), (12, 2), "pip install 'nvidia-cuda-nvrtc-cu12==12.2.*', or install a driver for CUDA 12.9"),
    ],
)
def test_ptx_that_the_driver_cannot_translate_is_said_in_one_line(
    nvrtc: tuple[int, int], driver: tuple[int, int], remedy: str
) -> None:
    with pytest.raises(TierError) as caught:
        check_ptx(nvrtc, driver, (99, 0))
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)
    check_ptx(driver, driver, (99, 0))
    check_ptx(driver, nvrtc, (99, 0))


def test_a_gpu_that_nvrtc_does_not_know_is_compiled_for_unless_the_driver_is_older_than_nvrtc() -> None:
    nvrtc = nvrtc_version()
    if nvrtc is None:
        pytest.skip("the cuda extra is not installed")
    assert b".version" in compile_kernel(source(), (99, 0), nvrtc), "PTX"
    assert compile_kernel(source(), (9, 0), (nvrtc[0], 0)).startswith(b"\x7fELF"), "machine code"
    with pytest.raises(TierError, match="cannot load: pip install"):
        compile_kernel(source(), (99, 0), (nvrtc[0] - 1, 9))


def test_an_nvrtc_that_is_too_new_is_said_in_one_line_with_the_packages_to_install() -> None:
    for nvrtc, what in (((13, 5), r"NVRTC 13\.5"), (None, r"cuda-bindings 13\.5\.0")):
        expected = (
            rf"supports CUDA 12\.4, but {what} is for CUDA 13: pip install 'transferd\[cuda12\]', .*R580 or newer"
        )
        with pytest.raises(TierError, match=expected) as caught:
            check_fit(12040, nvrtc, "13.5.0")
        assert "\n" not in str(caught.value)
        assert caught.value.reason == NO_DRIVER


def test_a_driver_older_than_all_packages_is_said() -> None:
    with pytest.raises(TierError, match=r"supports CUDA 11\.8: install a driver of R535 or newer"):
        check_fit(11080, (12, 9), "12.9.1")

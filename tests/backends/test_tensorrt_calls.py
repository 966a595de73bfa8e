"""The table of TensorRT's API agrees with the source, and with the API where it is installed."""

import inspect
import subprocess
import sys

import pytest

from edge_dflash.backends.cuda.tensorrt.flavours import TENSORRT, TENSORRT_RTX, load
from tests.scripts.tensorrt_calls import SINCE, calls, used


def number(release):
    return tuple(int(part) for part in release.split("."))


def test_every_name_of_the_table_is_used():
    assert [call.name for call in calls()] == list(SINCE)


def test_nothing_is_newer_than_the_first_version_that_we_run_on():
    releases = {call.since for call in calls()}
    assert max(number(r) for r in releases if not r.startswith("RTX")) == number(TENSORRT.first)
    rtx = [number(r.removeprefix("RTX ")) for r in releases if r.startswith("RTX")]
    assert max(rtx) == number(TENSORRT_RTX.first)
    newer = {call.name for call in calls() if call.since.startswith("RTX")}
    never = ("ompute", "untime", "KernelSpecialization")  # what the other flavour is not asked
    assert all(any(part in name for part in never) for name in newer)


def test_the_table_is_printed():
    command = [sys.executable, "tests/scripts/tensorrt_calls.py"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(SINCE) + 2
    assert "| INetworkDefinition.add_dynamic_quantize | 10.8 | release notes of 10.8 | net.py |" in lines


def members(trt):
    """Names of the API: members of the module, and of its classes and enumerations, each with its class."""
    found = {name: {name} for name in dir(trt)}
    for name, kind in inspect.getmembers(trt, inspect.isclass):
        for member in dir(kind):
            if not member.startswith("_"):
                found.setdefault(member, set()).add(f"{name}.{member}")
    return found


@pytest.mark.tensorrt
def test_every_name_of_the_table_exists():
    there = set().union(*members(load(TENSORRT_RTX)).values())
    assert set(SINCE) <= there


@pytest.mark.tensorrt
def test_every_name_of_the_api_in_the_source_is_in_the_table():
    listed = {name.rpartition(".")[2] for name in SINCE}
    ours = {  # names of ours, of Python or of NumPy that TensorRT has too
        *("tensorrt_rtx", "clear", "append", "count", "constant", "data", "fp8", "op", "scale", "weights", "__name__"),
        *("float32", "int32", "uint8", "ctypes", "dtype", "nbytes", "shape", "size", "stride"),
        *("start", "bias", "block_size", "bfloat16", "engine", "enqueue"),
    }
    assert sorted(name for name in used() if name in members(load(TENSORRT_RTX)) and name not in listed | ours) == []

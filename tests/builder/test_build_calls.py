"""The way from the command to a weight's bytes is short: the calls of one build, traced."""

import sys

from builder_support import DRAFTERS, TARGETS

from edge_dflash.cli import run

MOST = 7  # calls from the command's function to the first bytes of a weight
WAY = ["build", "build", "_build", "_fill", "add", "write_file", "write_bytes"]


class Written(BaseException):
    """Ends the build at its first bytes of a weight."""


def test_few_calls_lead_from_the_command_to_the_bytes_of_a_weight(tmp_path):
    calls = []

    def watch(frame, event, argument):
        file = getattr(argument, "__self__", None)
        if event == "c_call" and argument.__name__ == "write" and "/weights/" in str(getattr(file, "name", "")):
            sys.setprofile(None)
            while frame.f_globals["__name__"] != "typer.main":
                calls.insert(0, (frame.f_globals["__name__"], frame.f_code.co_name))
                frame = frame.f_back
            raise Written

    argv = [
        "--target",
        TARGETS["qwen3"],
        "--drafter",
        DRAFTERS["qwen3"],
        "--output",
        tmp_path / "out",
        "--no-calibrate",
    ]
    sys.setprofile(watch)
    try:
        run(["build", *map(str, argv)])
    except Written:
        pass
    finally:
        sys.setprofile(None)
    assert [name for _, name in calls] == WAY, calls
    assert len(calls) <= MOST
    assert len({module for module, _ in calls}) <= 4

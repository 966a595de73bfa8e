"""schemathesis against a service with a toy model: ``schemathesis_service.py [PROGRAM] [EXAMPLES]``.

PROGRAM is schemathesis's, of whatever environment; EXAMPLES: requests for each operation and phase. All its checks run
but ``positive_data_acceptance``. In its place: a body that is good by the document may be refused (contexts are short,
sessions are not there), yet never for the type or range of a field.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
KEY = "schemathesis-key-0123456789"
HOOKS = '''
import json
import schemathesis

TOGETHER = ("needs stream: true", "differ; give one", "needs logprobs: true", "give one of",
            "of a tool that is given", "tool of this name", "how many tools")

@schemathesis.check
def good_fields_are_taken(ctx, response, case):
    """A body that the document calls good is not refused for a field."""
    if response.status_code != 400 or not case.meta.generation.mode.is_positive:
        return
    error = json.loads(response.content)["error"]
    if error["param"] is not None and not any(word in error["message"] for word in TOGETHER):
        raise AssertionError(f"refused for a field: {error}")
'''
CONFIG = """
hooks = "{hooks}"
"""


def main(program: str = "schemathesis", examples: str = "300") -> int:
    """Run; returns schemathesis's exit code."""
    from fakes import SHAPE, FakeBackend
    from service_support import client_of, fake_service, live

    shape = replace(SHAPE, vocab_size=258, max_context=256, mask_token_id=257)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        service = fake_service(directory, FakeBackend(shape), queue=64, limits={"new_tokens": 8})
        (directory / "hooks.py").write_text(HOOKS)
        (directory / "schemathesis.toml").write_text(CONFIG.format(hooks=directory / "hooks.py"))
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with client_of(service, KEY) as client:  # a session whose name is soon found
            first = {"messages": [{"role": "user", "content": "x"}], "edge_dflash": {"session": "0"}}
            headers = {"authorization": f"Bearer {KEY}"}
            assert client.post("/v1/chat/completions", json=first, headers=headers).is_success
        with live(service, directory, KEY, tcp=True) as address:
            command = [program, "--config-file", str(directory / "schemathesis.toml"), "run", f"{address}/openapi.json"]
            command += ["-H", f"Authorization: Bearer {KEY}", "--exclude-checks", "positive_data_acceptance"]
            command += ["--max-examples", examples, "--seed", "7", "--continue-on-failure", "--no-color"]
            command += ["--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing"]
            done = subprocess.run(command, cwd=directory, env=environment, check=False)
        service.close()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

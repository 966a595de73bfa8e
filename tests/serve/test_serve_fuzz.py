from __future__ import annotations

from fuzz_service import Fuzz


def test_no_request_gives_a_500_or_a_file_elsewhere(tmp_path):
    fuzz = Fuzz(tmp_path)
    fuzz.run(400, 1)
    fuzz.close()
    assert fuzz.statuses[200] > 40
    assert fuzz.statuses[400] > 40

"""Speculative is plain under a JSON Schema, with every kind of drafter, whatever is drafted and accepted."""

import pytest
from golden_pairs import NAMES, WALKS, golden
from schema_answers import accepted_under_a_schema
from verify_support import exact

from edge_dflash.decode.options import Options

MODES = {"greedy": Options(), "sampled": Options(temperature=4.0, top_k=40, top_p=0.9, seed=7)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [NAMES[0], *WALKS])
def test_answers_under_a_schema_are_those_of_plain_decoding(name, mode):
    backend, prompt = exact(name), golden(name)["p0.prompt"].tolist()[-6:]
    accepted = accepted_under_a_schema(backend, prompt, MODES[mode])
    for right, lengths in enumerate(accepted):  # what the grammar puts in a wrong draft's place may be right
        assert all(right < length <= backend.shape.verify_rows for length in lengths[:-1])
    assert accepted[0] != accepted[-1]

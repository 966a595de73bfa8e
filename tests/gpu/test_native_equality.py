"""Random layers of full size: speculation at every accept length leaves the bits of plain decoding."""

import pytest
from equality import BACKENDS, check, forced, plain, prompts_for
from equality import Tally as Counts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [n for n in BACKENDS if "layers" in n])
def test_full_size_layers_are_bit_equal_at_every_accept_length(name):
    backend = BACKENDS[name]()
    try:
        tally = check(name, backend, prompts_for(name, backend)[1:2])
        assert (tally.differences, tally.accept_lengths) == (0, 16)
        assert tally.rows == 16 * 32
        assert tally.state_bytes > 1e6
    finally:
        backend.close()


def test_a_difference_would_be_counted():
    backend = BACKENDS["demo nvfp4"]()
    ids = prompts_for("demo nvfp4", backend)[0]
    tokens, logits, state = plain(backend, ids)
    tally = Counts("demo")
    forced(backend, [*ids[:-1], ids[-1] + 1], 3, (tokens, logits, state), tally)
    assert tally.differences > 0

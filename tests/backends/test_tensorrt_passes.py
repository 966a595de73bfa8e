"""Whole passes on the TensorRT backend's schedule, its plans interpreted: the reference backend's logits and tokens."""

import numpy as np
import pytest
from golden_pairs import ENGINE
from tensorrt_arena import ArenaBackend
from tensorrt_support import PAIRS, reference, spec

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.decode.backend import Precision

pytestmark = pytest.mark.tensorrt

WIDE = Precision("float32", "fp8")


@pytest.mark.parametrize("kind", ["bf16", "w4a16", "w4a4"])
@pytest.mark.parametrize("name", PAIRS)
def test_cycles_are_the_references(name, kind):
    """Logits are as near to the reference's as its own are to those of float32 activations, twice that at most.

    A rounding that falls otherwise moves a stored FP8 key by a whole step, and random weights carry that on: single
    ops are held to one BF16 step elsewhere, a whole pass cannot be.
    """
    store = reference(name, kind).store
    ours = ArenaBackend(name, store)
    theirs, wide = (ReferenceBackend(spec(name), store, p, max_context=128) for p in (ENGINE, WIDE))
    rng = np.random.default_rng(3)

    errors, noises, equal, equal_wide = [], [], [], []

    def near(found, choices, wanted, unrounded):
        assert (choices == found.argmax(-1)).all()
        errors.append(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        noises.append(np.linalg.norm(unrounded - wanted) / np.linalg.norm(wanted))
        equal.extend(choices == wanted.argmax(-1))
        equal_wide.extend(unrounded.argmax(-1) == wanted.argmax(-1))

    prompt = [int(i) for i in rng.integers(0, spec(name).target.vocab_size, 21)]
    logits, choices = ours.run("prefill", prompt)
    near(logits, choices, theirs.prefill(prompt).logits(), wide.prefill(prompt).logits())
    for kept in (3, ours.block):  # rows that are committed after each verify
        anchor = int(choices[-1])
        block = [anchor] + [spec(name).drafter.mask_token_id] * (ours.block - 1)
        logits, drafts = ours.run("propose", block)
        near(logits[1:], drafts[1:], theirs.propose(anchor).logits(), wide.propose(anchor).logits())
        rows = [anchor, *(int(i) for i in drafts[1:])]
        logits, choices = ours.run("verify", rows)
        near(logits, choices, theirs.verify(rows).logits(), wide.verify(rows).logits())
        for backend in (ours, theirs, wide):
            backend.commit(kept)
    assert np.linalg.norm(errors) <= 2 * np.linalg.norm(noises), (errors, noises)
    assert np.mean(equal) >= np.mean(equal_wide) - 0.1

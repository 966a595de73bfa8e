"""Whole passes on the TensorRT backend's schedule, its plans interpreted: the reference backend's logits and tokens."""

import numpy as np
import pytest
from golden_pairs import ENGINE
from tensorrt_arena import ArenaBackend
from tensorrt_support import PAIRS_AND_KINDS, reference, spec

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.walk import WalkRows

pytestmark = pytest.mark.tensorrt

WIDE = Precision("float32", "fp8")
PASSED = ("bf16", "w4a16", "w4a4")


@pytest.mark.parametrize(("name", "kind"), [case for case in PAIRS_AND_KINDS if case.values[1] in PASSED])
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
        logits, wide_logits = head(wanted), head(unrounded)
        errors.append(np.linalg.norm(found - logits) / np.linalg.norm(logits))
        noises.append(np.linalg.norm(wide_logits - logits) / np.linalg.norm(logits))
        equal.extend(np.equal(choices, wanted.argmax()))
        equal_wide.extend(np.equal(unrounded.argmax(), wanted.argmax()))

    drafter = spec(name).drafter
    first, walk = int(not drafter.anchor_drafts), drafter.head is not None
    prompt = [int(i) for i in rng.integers(0, spec(name).target.vocab_size, 21)]
    logits, choices = ours.run("prefill", prompt)
    assert (choices == logits.argmax(-1)).all()
    near(logits, choices, theirs.prefill(prompt), wide.prefill(prompt))
    for kept in (3, ours.block):  # rows that are committed after each verify
        anchor = int(choices[-1])
        logits, drafts = ours.run("propose", drafter.block(anchor))
        assert walk or (drafts == logits.argmax(-1)).all()
        near(logits[first:], drafts[first:], theirs.propose(anchor), wide.propose(anchor))
        rows = [anchor, *(int(i) for i in drafts[first:])]
        assert len(rows) == spec(name).verify_rows
        logits, choices = ours.run("verify", rows)
        assert (choices == logits.argmax(-1)).all()
        near(logits, choices, theirs.verify(rows), wide.verify(rows))
        for backend in (ours, theirs, wide):
            backend.commit(kept)
    assert np.linalg.norm(errors) <= 2 * np.linalg.norm(noises), (errors, noises)
    assert np.mean(equal) >= np.mean(equal_wide) - 0.1


def head(rows):
    """The head's logits, before a walk."""
    return rows.base if isinstance(rows, WalkRows) else rows.logits()

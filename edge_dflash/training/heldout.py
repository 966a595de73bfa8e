"""Accept length on held-out answers while a drafter is trained: the loop's cycles, walked with what is on the disk.

The target's greedy answer and its taps are known, so a cycle is one pass of the drafter: its drafts are accepted as far
as they are the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edge_dflash.training.drafter import BlockDrafter
from edge_dflash.training.losses import Borrowed, drafts
from edge_dflash.training.shards import Shards

MOST = 64  # answers that are walked


@torch.no_grad()
def walk_answers(
    drafter: BlockDrafter, borrowed: Borrowed, shards: Shards, indices: Sequence[int], device: str, at_once: int = 16
) -> list[list[int]]:
    """Tokens that each cycle commits, bonus included, of the greedy walk along each of some samples' answers.

    ``at_once``: samples of a pass; no more than a step has, and it needs no more memory.
    """
    walked = list[list[int]]()
    for first in range(0, len(indices), at_once):
        part = list(indices[first : first + at_once])
        batch = shards.batch(part, torch.zeros(len(part), 1)).to(device)
        context, ids = drafter.context(batch.taps), batch.ids
        at, ends = batch.anchors[:, 0], batch.lengths - 1  # of each: where the anchor stands, the last token
        lengths: list[list[int]] = [[] for _ in part]
        while bool((at < ends).any()):
            known = ids.gather(1, at[:, None])
            hidden = drafter.block(context, at[:, None], known, borrowed.embedding)
            made = drafts(drafter, borrowed, hidden, known)[:, 0]
            place = at[:, None] + 1 + torch.arange(made.shape[1], device=ids.device)
            right = (made == ids.gather(1, place.clamp(max=ids.shape[1] - 1))) & (place <= ends[:, None])
            count = right.long().cumprod(1).sum(1) + 1
            count = torch.minimum(count, ends - at)
            for row, number in enumerate(count.tolist()):
                if number > 0:
                    lengths[row].append(number)
            at = at + count
        walked += lengths
    return walked

"""Batched greedy generation with the training model, and the accept lengths a drafter would reach on its output.

For making training data and for watching quality while training; the runtime has its own loop. Knows no files.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from calib.demo.drafter import Drafter
from calib.demo.model import AttentionCache, Target
from calib.demo.tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID, Sample
from edge_dflash.training.evaluate import AcceptedDrafts, accepted


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, T] filled up on the right, and lengths [B]."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), END_OF_TEXT_ID)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return ids.to(device), lengths.to(device)


@torch.no_grad()
def greedy(target: Target, prompts: Sequence[Sequence[int]], max_new: int) -> list[tuple[int, ...]]:
    """The target's own answers, each up to and with its end of turn, at most ``max_new`` ids."""
    device = target.lm_head.weight.device
    ids, lengths = padded(prompts, device)
    x = target.model.embed_tokens(ids)
    caches = []
    for layer in target.model.blocks:
        mixed, cache = layer.mixer(layer.input_layernorm(x), lengths)
        if isinstance(cache, AttentionCache):
            cache = AttentionCache(*(F.pad(y, (0, 0, 0, max_new)) for y in (cache.k, cache.v)))
        caches.append(cache)
        x = layer.finish(x, mixed)
    last = x.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, x.shape[2]))
    tokens = []
    done = torch.zeros_like(lengths, dtype=torch.bool)
    position = lengths.clone()
    for count in range(max_new):
        token = target.lm_head(target.model.norm(last))[:, 0].argmax(-1)
        tokens.append(token)
        done |= token == END_OF_TURN_ID
        if count % 16 == 15 and bool(done.all()):
            break
        last = target.model.embed_tokens(token)[:, None]
        for layer, cache in zip(target.model.blocks, caches, strict=True):
            last = layer.finish(last, layer.mixer.step(layer.input_layernorm(last), cache, position))
        position += 1
    return [_up_to_end(row) for row in torch.stack(tokens, 1).tolist()]


def _up_to_end(row: list[int]) -> tuple[int, ...]:
    return tuple(row[: row.index(END_OF_TURN_ID) + 1] if END_OF_TURN_ID in row else row)


@torch.no_grad()
def acceptance(target: Target, drafter: Drafter, samples: Sequence[Sample]) -> AcceptedDrafts:
    """Walk each sample's answer (the target's own greedy one) as the loop of the runtime would."""
    device = target.lm_head.weight.device
    k = drafter.c.drafts
    answers = []
    for start in range(0, len(samples), 16):
        part = samples[start : start + 16]
        ids, lengths = padded([s.prompt + s.answer for s in part], device)
        _, taps = target(ids, drafter.c.target_layer_ids)
        first = torch.tensor([len(s.prompt) for s in part], device=device)
        longest = max(len(s.answer) for s in part)
        anchors = torch.minimum(first[:, None] + torch.arange(longest, device=device), lengths[:, None] - 1)
        known = ids.gather(1, anchors)
        hidden = drafter(taps, anchors, known, target.model.embed_tokens.weight)[:, :, -k:]
        drafts = drafter.proposals(hidden, target.lm_head(hidden), known).tolist()  # [B, A, K]
        for sample, rows in zip(part, drafts, strict=True):
            at, committed = 0, []
            while at < len(sample.answer) - 1:
                rest = sample.answer[at + 1 :]
                agreed = 0
                while agreed < min(len(rest), k) and rows[at][agreed] == rest[agreed]:
                    agreed += 1
                committed.append(min(agreed + 1, len(rest)))
                at += committed[-1]
            answers.append(committed)
    return accepted(answers)

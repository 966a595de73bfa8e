"""Batched greedy generation with the training model, to watch its quality. Knows no files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from calib.demo.model import AttentionCache, Target
from calib.demo.tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID


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

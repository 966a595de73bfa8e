"""A mixture of experts in torch: tile by tile of rows, so that no row depends on what the others choose."""

from __future__ import annotations

from collections.abc import Callable

import torch

from edge_dflash.backends.reference.dense import ROW_TILE, TorchWeights, pad, pointwise, sigmoid, silu
from edge_dflash.model.ops import Experts

Round = Callable[[torch.Tensor], torch.Tensor]
Notes = Callable[[str, torch.Tensor], None]  # (role, values of a tile's valid rows)


def _unheard(role: str, values: torch.Tensor) -> None:
    """Tell nobody."""


def experts(
    op: Experts,
    x: torch.Tensor,
    rows: int,
    weights: TorchWeights,
    rounded: Round,
    note: Notes = _unheard,
) -> torch.Tensor:
    """The op on x [R, H], of which ``rows`` rows count; unrounded float32.

    Without a row tile of ``weights`` each expert is computed once, on the rows that chose it.

    ``rounded``: to what activations are kept in. ``note`` is told "router_logits" [T, E], "experts" [T, k] by
    descending probability, "weights" [T, k] of them and "routed" [T, H], for each tile; without a row tile also, by the
    name of each down projection that is computed, of its input [rows, I].
    """
    if weights.row_tile is None:
        return pad(_tile(op, x[:rows], rows, weights, rounded, note), x.shape[0])
    tiles = []
    for first in range(0, x.shape[0], ROW_TILE):
        tile, valid = x[first : first + ROW_TILE], min(max(rows - first, 0), ROW_TILE)
        tiles.append(_tile(op, tile, valid, weights, rounded, note) if valid else torch.zeros_like(tile))
    return torch.cat(tiles)


def choose(op: Experts, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each row of router logits z [T, E] by descending probability, and their weights: [T, k] each."""
    e = pointwise(torch.exp, z - z.amax(-1, keepdim=True))
    p = e / e.sum(-1, keepdim=True)
    chosen = torch.sort(p, dim=-1, descending=True, stable=True).indices[:, : op.top_k]
    w = p.gather(1, chosen)
    if op.renormalised:
        total = torch.zeros_like(w[:, 0])
        ascending = chosen.sort(-1).indices
        for k in range(op.top_k):
            total = total + w.gather(1, ascending[:, k : k + 1])[:, 0]
        w = w / total[:, None]
    return chosen, w


def _tile(op: Experts, x: torch.Tensor, valid: int, weights: TorchWeights, rounded: Round, note: Notes) -> torch.Tensor:
    z = rounded(weights.linear(x, op.router))
    chosen, w = choose(op, z)
    y = torch.zeros_like(x)
    for index in sorted(set(chosen[:valid].flatten().tolist())):
        mine = chosen == index
        share = (w * mine).sum(-1, keepdim=True)  # one of them is not zero
        names = op.gates[index], op.ups[index], op.downs[index]
        if weights.row_tile is None:
            some = mine.any(-1)
            y[some] += share[some] * _mlp(x[some], names, weights, rounded, note)
            continue
        part = _mlp(x, names, weights, rounded, _unheard)
        y = torch.where(mine.any(-1, keepdim=True), y + share * part, y)
    for role, values in (("router_logits", z), ("experts", chosen), ("weights", w), ("routed", y)):
        note(role, values[:valid])
    if op.shared is not None:
        judged = sigmoid(rounded(weights.linear(x, op.shared.judge)))
        quiet = note if weights.row_tile is None else _unheard
        y = y + judged * _mlp(x, (op.shared.gate, op.shared.up, op.shared.down), weights, rounded, quiet)
    return y


def _mlp(
    x: torch.Tensor, names: tuple[str, str, str], weights: TorchWeights, rounded: Round, note: Notes
) -> torch.Tensor:
    gate, up, down = names
    g, u = rounded(weights.linear(x, gate)), rounded(weights.linear(x, up))
    hidden = rounded(silu(g) * u)
    note(down, hidden)
    return weights.linear(hidden, down)

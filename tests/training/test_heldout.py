"""Accept lengths along known answers: those of a drafter made by hand, of the golden loops, and of a planner."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from golden_pairs import WALKS, golden
from training_support import module, taps_of

from edge_dflash.training import trainer
from edge_dflash.training.losses import Batch, drafts
from edge_dflash.training.trainer import walk_answers


@pytest.fixture(autouse=True)
def _few_passes(monkeypatch):
    """A walk that commits nothing would go on for ever."""
    left = iter(range(300))

    def counted(*given):
        assert next(left, None) is not None, "the walk does not end"
        return drafts(*given)

    monkeypatch.setattr(trainer, "drafts", counted)


class Said:
    """Drafts by hand: of each sequence, which its taps number, the anchor at a place and what is drafted behind it."""

    propose, tensor = SimpleNamespace(walk=None), None

    def __init__(self, *sequences):
        self.sequences = sequences

    def context(self, taps):
        return [self.sequences[int(number)] for number in taps[:, 0, 0]]

    def block(self, context, at, known):
        rows = []
        for said, place, token in zip(context, at[:, 0].tolist(), known[:, 0].tolist(), strict=True):
            anchor, *drafted = said.get(place, (token, 0, 0, 0))
            assert anchor == token
            rows.append(drafted)
        return torch.tensor(rows)[:, None]

    def logits(self, rows):
        return F.one_hot(rows, 10).float()


def test_a_cycle_commits_the_drafts_before_the_first_wrong_one_and_the_targets_token():
    texts = [(9, 9, 1, 2, 3, 4, 5, 6, 7, 8), (9, 9, 9, 5, 7), (9, 1, 2, 3, 4, 5, 6, 7)]
    prompts = [2, 3, 1]
    drafter = Said(
        {2: (1, 2, 3, 9), 5: (4, 9, 6, 7), 6: (5, 6, 7, 8)},  # the last cycle is cut by the end
        {3: (5, 7, 0, 0)},  # behind the end are zeros
        {1: (1, 2, 3, 4), 5: (5, 9, 9, 9), 6: (6, 9, 0, 0)},
    )

    def batch(indices, share):
        assert not share.any()
        ids, taps = torch.zeros(len(indices), 10, dtype=torch.long), torch.zeros(len(indices), 10, 1)
        for row, index in enumerate(indices):
            ids[row, : len(texts[index])], taps[row] = torch.tensor(texts[index]), index
        lengths = torch.tensor([len(texts[index]) for index in indices])
        return Batch(ids, lengths, torch.tensor([prompts[index] for index in indices])[:, None], taps)

    order = [0, 1, 2, 2, 0, 1] * 4
    walked = walk_answers(drafter, SimpleNamespace(batch=batch), order, "cpu")
    assert walked == [[[3, 1, 3], [1], [4, 1, 1]][index] for index in order]


@pytest.mark.parametrize("name", ["qwen3", *WALKS])
def test_cycles_along_an_answer_are_those_of_the_golden_loop(name):
    for prompt in ("p0", "p1", "p2"):
        given = {key.split(".")[1]: value for key, value in golden(name).items() if key.startswith(f"{prompt}.")}
        ids, begin = [*given["prompt"].tolist(), *given["greedy_tokens"].tolist()], len(given["prompt"])
        batch = Batch(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([[begin]]), taps_of(name, ids)[None])
        one = SimpleNamespace(batch=lambda indices, share, batch=batch: batch)
        cycles = zip(given["cycle_start"].tolist(), given["cycle_accepted"].tolist(), strict=True)
        wanted = [min(accepted + 1, len(ids) - 1 - start) for start, accepted in cycles if start < len(ids) - 1]
        assert walk_answers(module(name), one, [0], "cpu") == [wanted]

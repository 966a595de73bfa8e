"""The values of the losses: of the goldens' rows, answers and distributions, by the published formulas in float64."""

from dataclasses import replace

import drafter_maths
import numpy as np
import pytest
import torch
from golden_pairs import WALKS, golden, pair, programs, store
from training_support import module

from edge_dflash.training import losses
from edge_dflash.training.drafter import HEAD
from edge_dflash.training.losses import Batch, block_loss, decay

PROMPTS = ("p0", "p1", "p2")
DECAY = 4  # of blocks of 8, and of DSpark's 7
COUNTED = (2, 7, 4)  # drafts of each prompt's block whose tokens lie before the end of its answer
DSPARK, DFLASH2 = WALKS[:3], WALKS[3]


def wide(name, weight):
    return store(name).get(weight).float32()


def batch_of(name):
    """The goldens' prompts and answers, a block at the first token of each; the answers go on behind their ends."""
    file, taps = golden(name), golden(DSPARK[0] if name in DSPARK else name)
    prompts = [len(file[f"{prompt}.prompt"]) for prompt in PROMPTS]
    texts = [[*file[f"{prompt}.prompt"], *file[f"{prompt}.greedy_tokens"]] for prompt in PROMPTS]
    batch = Batch(
        ids=torch.zeros(3, max(map(len, texts)), dtype=torch.long),
        lengths=torch.tensor(prompts) + 1 + torch.tensor(COUNTED),
        anchors=torch.tensor(prompts)[:, None],
        taps=torch.zeros(3, max(map(len, texts)), taps["p0.prefill_taps"].shape[1]),
    )
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        batch.ids[row, : len(text)] = torch.tensor(text)
        batch.taps[row, : prompts[row]] = torch.from_numpy(taps[f"{prompt}.prefill_taps"])
    return batch


def loss_of(name, batch):
    return block_loss(module(name), batch).item()


def blocks(name, batch):
    """Of each block: the golden's rows that draft, their logits, the anchor's token and the tokens behind it."""
    drafts = pair(name).drafter.drafts
    for row, prompt in enumerate(PROMPTS):
        hidden = golden(name)[f"{prompt}.cycle0_draft_hidden"][-drafts:].astype(np.float64)
        first, *labels = batch.ids[row, batch.anchors[row, 0] :][: drafts + 1].tolist()
        yield hidden, hidden @ wide(name, HEAD).T, first, labels


def markov(name, hidden, logits, first, labels):
    """Scores and confidence of DSpark's rows behind the answer's tokens."""
    walk = programs(name).propose.walk
    mix, judge = ([wide(name, weight) for weight in part or ()] for part in (walk.mix, walk.judge))
    matrices = wide(name, walk.predecessor), wide(name, walk.successor), *(mix or (None, None)), *judge
    return drafter_maths.markov(walk.kind, hidden, logits, first, *matrices, labels=labels)[1:]


def softmax(x):
    return np.exp(x - np.logaddexp.reduce(x, -1)[..., None])


def cross_entropy(scores, labels):
    return np.logaddexp.reduce(scores, -1) - scores[np.arange(len(labels)), labels]


def mean(each):
    """Of the losses of each block's rows: earlier ones weigh more, those behind the end nothing."""
    weights = [np.exp(-np.arange(count) / DECAY) for count in COUNTED]
    total = sum(weight @ loss[: len(weight)] for weight, loss in zip(weights, each, strict=True))
    return pytest.approx(total / np.concatenate(weights).sum(), rel=1e-4)


def test_weights_decay_by_the_size_of_a_block_as_published():
    assert {size: decay(size) for size in (16, 10, 8, 7)} == {16: 7, 10: 5, 8: DECAY, 7: DECAY}


def test_dflash_learns_the_tokens_behind_its_anchor():
    batch = batch_of("qwen3")
    each = [cross_entropy(logits, labels) for _, logits, _, labels in blocks("qwen3", batch)]
    assert loss_of("qwen3", batch) == mean(each)


def test_dflash2_learns_to_select_where_its_candidates_hold_the_token():
    batch, walk = batch_of(DFLASH2), programs(DFLASH2).propose.walk
    for row, (_, logits, _, _) in enumerate(blocks(DFLASH2, batch)):
        order, at = np.argsort(-logits, -1), int(batch.anchors[row, 0]) + 1
        for place, rank in enumerate((0, 15, 16, 3, 200, 1, 7)):  # 16 candidates
            batch.ids[row, at + place] = int(order[place, rank])
    each = []
    for hidden, logits, first, labels in blocks(DFLASH2, batch):
        tables = (wide(DFLASH2, weight) for weight in walk.weights)
        _, candidates, scores = drafter_maths.selector(hidden, logits, first, walk.top_k, *tables, labels=labels)
        found = [label in ids for label, ids in zip(labels, candidates, strict=True)]
        assert found == [True, True, False, True, False, True, True]
        places = [ids.index(label) if label in ids else 0 for label, ids in zip(labels, candidates, strict=True)]
        each.append(cross_entropy(logits, labels) + found * cross_entropy(np.array(scores), places))
    assert loss_of(DFLASH2, batch) == mean(each)


def target_rows(batch):
    """What the target's head read for the golden's logits of each position, and those logits."""
    last = torch.zeros(*batch.ids.shape, pair("qwen3").target.hidden_size)
    found = [golden("qwen3")[f"{prompt}.teacher_forced_logits"].astype(np.float64) for prompt in PROMPTS]
    for row, logits in enumerate(found):
        read = np.linalg.lstsq(wide("qwen3", HEAD).astype(np.float64), logits.T, rcond=None)[0].T
        last[row, : len(read)] = torch.from_numpy(read)
    return last, found


@pytest.mark.parametrize("name", DSPARK)
def test_dspark_learns_the_tokens_the_targets_distribution_and_how_near_it_is(name):
    batch = batch_of(name)
    last, target = target_rows(batch)
    batch, each = replace(batch, last=last), []
    for row, block in enumerate(blocks(name, batch)):
        scores, confidence = markov(name, *block)
        labels, at = block[-1], int(batch.anchors[row, 0])
        said = target[row][at : at + len(labels)]
        assert said.argmax(-1).tolist() == labels
        distance = np.abs(softmax(said) - softmax(scores)).sum(-1)
        wanted, sure = 1 - distance / 2, np.array(confidence)
        judged = -(wanted * np.log(sure) + (1 - wanted) * np.log(1 - sure)) if confidence else 0.0
        each.append(0.1 * cross_entropy(scores, labels) + 0.9 * distance + 1.0 * judged)
    assert loss_of(name, batch) == mean(each)


@pytest.mark.parametrize("name", DSPARK)
def test_dspark_learns_the_tokens_alone_where_the_targets_rows_are_not_kept(name):
    batch = batch_of(name)
    each = [cross_entropy(markov(name, *block)[0], block[-1]) for block in blocks(name, batch)]
    assert loss_of(name, batch) == mean(each)


def test_the_confidence_learns_how_near_the_scores_are_and_does_not_move_them(monkeypatch):
    name, gradients = DSPARK[0], []
    batch = batch_of(name)
    batch = replace(batch, last=target_rows(batch)[0])
    for weight in (losses.CONFIDENCE, 0.0):
        monkeypatch.setattr(losses, "CONFIDENCE", weight)
        drafter = module(name)
        block_loss(drafter, batch).backward()
        gradients.append(drafter.tensor(programs(name).propose.walk.successor).grad)
    torch.testing.assert_close(*gradients)

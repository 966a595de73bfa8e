"""What DFlash2 and DSpark add to DFlash, in float64 and plain loops, written from the published formulas alone."""

import math

import numpy as np


def grouped_conv(u, c, base, side, taps, group):
    """Rows [B, H]; c [B, 2 * taps * H / group]; base [2, taps, H]."""
    rows, hidden = u.shape
    d = c.astype(np.float64).reshape(rows, 2, taps, hidden // group)
    y = np.zeros((rows, hidden))
    for i in range(rows):
        for ch in range(hidden):
            for t in range(taps):
                if i - t >= 0:
                    y[i, ch] += (float(base[side, t, ch]) + d[i, side, t, ch // group]) * float(u[i - t, ch])
    return y


def selector(hidden, logits, anchor, top_k, projection, predecessor, successor, *, labels=None):
    """Tokens, candidates and scores of DFlash2's greedy walk; of one behind ``labels`` instead of its own tokens."""
    tokens, all_candidates, all_scores = [], [], []
    p = anchor
    for h, row in zip(hidden.astype(np.float64), logits.astype(np.float64), strict=True):
        candidates = sorted(range(len(row)), key=lambda token, row=row: (-row[token], token))[:top_k]
        g = projection.astype(np.float64) @ h
        scores = [row[c] + sum(predecessor[p].astype(np.float64) * g * successor[c]) for c in candidates]
        tokens.append(candidates[int(np.argmax(scores))])
        p = tokens[-1] if labels is None else labels[len(tokens) - 1]
        all_candidates.append(candidates)
        all_scores.append(scores)
    return tokens, all_candidates, all_scores


def sigmoid(x):
    return np.array([1 / (1 + math.exp(-value)) for value in np.atleast_1d(x)])


def markov(kind, hidden, logits, anchor, w1, w2, mix=None, bias=None, judge=None, judge_bias=None, *, labels=None):
    """Tokens, scores and confidence of DSpark's greedy walk over the whole vocabulary; ``labels``: see selector."""
    w1, w2 = w1.astype(np.float64), w2.astype(np.float64)
    tokens, all_scores, confidence = [], [], []
    state, previous = np.zeros(w1.shape[1]), anchor
    for h, row in zip(hidden.astype(np.float64), logits.astype(np.float64), strict=True):
        e = w1[previous]
        if judge is not None:
            read = np.concatenate([h, e])[: judge.shape[1]]  # the hidden row alone, or with the token before
            confidence.append(float(sigmoid(judge.astype(np.float64)[0] @ read + float(judge_bias[0]))[0]))
        x = e
        if kind == "gated":
            x = sigmoid(mix.astype(np.float64) @ np.concatenate([h, e]) + bias) * e
        if kind == "rnn":
            z = mix.astype(np.float64) @ np.concatenate([state, e, h]) + bias
            rank = len(e)
            gate, x = sigmoid(z[:rank]), np.tanh(z[2 * rank :])
            state = gate * state + (1 - gate) * np.tanh(z[rank : 2 * rank])
        scores = row + w2 @ x
        tokens.append(int(np.argmax(scores)))
        previous = tokens[-1] if labels is None else labels[len(tokens) - 1]
        all_scores.append(scores)
    return tokens, np.array(all_scores), confidence

"""Every key of a configuration is read, refused by name, or declared without effect: none is ignored."""

from collections import Counter

from tests.config_mutations import OUTCOMES, bases, verdicts


def test_no_key_is_ignored(tmp_path):
    judged = [verdict for base in bases() for verdict in verdicts(base, tmp_path)]
    assert [f"{mutation.label}: {outcome}" for mutation, outcome in judged if outcome not in OUTCOMES] == []
    counts = Counter(outcome for _, outcome in judged)
    assert sum(counts.values()) >= 1500
    assert min(counts[outcome] for outcome in OUTCOMES) > 0

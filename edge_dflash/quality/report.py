"""Figures of quality: what they are, how they are read, and their JSON. No torch: ``inspect`` shows them on a robot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_dflash.bundle.manifest import QUALITY, Manifest
from edge_dflash.common.files import read_bytes
from edge_dflash.common.tables import decode, encode
from edge_dflash.errors import BundleError

BANDS = ((0.01, "near lossless"), (0.05, "good"), (0.1, "noticeable"))  # KLD below which it is called so


@dataclass(frozen=True)
class Spread:
    """A quantity over tokens."""

    mean: float
    p50: float
    p99: float
    p999: float
    max: float


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean of -log p(next token), of both."""

    source: float
    bundle: float


@dataclass(frozen=True)
class Figures:
    """A distribution of the next token q against the source's p, over tokens."""

    kld: Spread  # sum of p log(p / q), nats
    top1: float  # share of tokens where the most probable one is the same
    top5: float  # share where the source's most probable one is among the five of the other
    perplexity: Perplexity
    tokens: int

    @property
    def band(self) -> str:
        """The mean KLD in a word."""
        return next((name for limit, name in BANDS if self.kld.mean < limit), "bad")


@dataclass(frozen=True)
class BackendQuality(Figures):
    """A backend's own logits against the source's: kernels and rounded activations are in them."""

    name: str
    against_reference: Figures  # against the bundle's weights and KV cache in float32: the backend alone


@dataclass(frozen=True)
class Protocol:
    """How figures were made."""

    version: str  # of edge-dflash
    source: str  # fingerprint of the source's files
    texts: str  # SHA-256 of all token ids
    prompts: str  # where they come from
    answers: str  # whose they are
    sequences: int
    unit_tokens: int  # tokens that single units are measured on
    layers: str = "a layer is the sum of its units, each measured alone"
    activations: str = "float32"


@dataclass(frozen=True)
class Quality(Figures):
    """Of a bundle: everything of it at first, then some of it at a time, the rest being the source's."""

    weights: Figures | None  # its weights, a wide KV cache; None: they are the source's
    kv: Figures | None  # its KV cache, the source's weights; None: it is wide
    layers: Mapping[str, Figures]  # the ten that cost most
    parts: Mapping[str, Figures]  # all units of a kind together
    where: Mapping[str, Figures]  # everything, by the place of the token that is predicted
    units: Mapping[str, Figures]  # each alone: "layers.3.mlp", "layers.3.kv", "lm_head"
    protocol: Protocol
    backend: BackendQuality | None  # None: it cannot run where this was measured


def dump_quality(quality: Quality) -> bytes:
    """Text of quality.json."""
    return (json.dumps(encode(quality), indent=1, allow_nan=False) + "\n").encode()


def read_quality(bundle: Path, manifest: Manifest) -> Quality | None:
    """The figures that a bundle holds; None: it was not measured. Raises BundleError."""
    if (entry := manifest.files.get(QUALITY)) is None:
        return None
    try:
        text = read_bytes(bundle / QUALITY)
        if hashlib.sha256(text).hexdigest() == entry.sha256:
            return decode(Quality, json.loads(text), QUALITY)
        what = "it has another hash than the manifest says"
    except (OSError, ValueError, RecursionError) as error:
        what = str(error)
    raise BundleError(f"cannot read {bundle / QUALITY}: {what}; measure it again with edge-dflash verify --quality")

"""What a build reads of two checkpoints besides their weights: specs, the tokenizer, fingerprints of the files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from edge_dflash.bundle.manifest import SourceFile
from edge_dflash.common.files import is_there, open_regular
from edge_dflash.errors import BundleError, CheckpointError
from edge_dflash.model.specs import PairSpec
from edge_dflash.model.vision import FILE, FLAT_FILE
from edge_dflash.text.template_files import TOKENIZER_FILES, read_object, read_templates, tokenizer_files
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.checkpoint import PairCheckpoint, checkpoint_pair

_CONFIG_FILES = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
_IMAGE_FILES = (FLAT_FILE, FILE)
_HEAD = 1 << 20  # bytes of a file that its fingerprint covers, besides its size: configs whole, shards their header


def read_checkpoints(target: Path, drafter: Path | None, *, text_only: bool) -> PairSpec:
    """Specs of the pair; ``text_only``: without the target's vision tower. Raises CheckpointError."""
    pair = checkpoint_pair(target, drafter)
    return pair.text_only if text_only else pair


def unread_tower(target: Path, pair: PairSpec, store: PairCheckpoint, text_only: bool) -> tuple[str, ...]:
    """A warning about a tower whose files do not say how pictures become patches."""
    if pair.target.vision is not None or text_only or not store.has_tower:
        return ()
    return (
        f"{target} has the tensors of a vision tower, but no vision_config or no {FLAT_FILE}: the bundle takes no "
        "images; download the file, or build with --text-only",
    )


def copied_files(directory: Path) -> tuple[Path, ...]:
    """Files of a checkpoint, or of tokenizer/ of a bundle, that tokenizer/ of a bundle has."""
    generation = directory / "generation_config.json"
    return (*tokenizer_files(directory), *([generation] if is_there(generation) else ()))


def read_tokenizer(target: Path, pair: PairSpec) -> tuple[Tokenizer | None, tuple[str, ...]]:
    """Return the target's tokenizer, if it has one, and warnings."""
    file = target / TOKENIZER_FILES[0]
    if not is_there(file):
        return None, (f"{target} has no {file.name}: the bundle takes and returns token ids only",)
    try:
        tokenizer = Tokenizer.open(target)
    except BundleError as error:  # its remedies are those of a bundle
        what = str(error).rpartition("; ")[0] or str(error)
        raise CheckpointError(f"{what}; download the tokenizer's files again") from None
    found = (check_mask_token(tokenizer, file, pair), _no_chats(target, tokenizer))
    return tokenizer, tuple(warning for warning in found if warning)


def _no_chats(target: Path, tokenizer: Tokenizer) -> str | None:
    """A warning about chats that are all refused."""
    if tokenizer.flaw is not None:
        return f"{target}: {tokenizer.flaw}: chats are refused until it is corrected; texts and token ids are taken"
    if tokenizer.template is not None:
        return None
    path = target / "tokenizer_config.json"
    others = read_templates(target, read_object(path) if is_there(path) else {})
    named = f" by default (it has {', '.join(sorted(others))})" if others else ""
    return f"{target} has no chat template{named}: chats are refused, texts and token ids are taken as they are"


def check_mask_token(tokenizer: Tokenizer, where: Path, pair: PairSpec) -> str | None:
    """Check that the tokenizer and the drafter's mask token belong to the same vocabulary; return a warning or None.

    Published pairs put the mask token either on a named special token or on the first id after the tokenizer's last
    one, which is a padding row of the embedding (Qwen3: 151669 behind 0..151668). Both are accepted, the second with a
    warning. Any other id without a token means that the tokenizer is of another model or lost its added tokens.
    """
    mask, vocabulary, size = pair.mask_token_id, pair.target.vocab_size, tokenizer.size
    if size > vocabulary:
        raise CheckpointError(
            f"{where} has {size} tokens, the target's vocabulary only {vocabulary}; "
            "use the tokenizer.json of this target"
        )
    if mask is None or tokenizer.token(mask) is not None:
        return None
    if mask == size:
        return f"mask token id {mask} has no token in {where.name}: it is the first id after its last"
    raise CheckpointError(
        f"{where} has no token with the drafter's mask id {mask} (it has {size} tokens); use the "
        "tokenizer.json of this target, or move it away to build a bundle that takes token ids"
    )


def fingerprints(target: Path, drafter: Path | None, *, sees: bool) -> tuple[tuple[SourceFile, ...], dict[str, str]]:
    """Fingerprints of the checkpoint files: those for the manifest, and those with times for the journal.

    ``sees``: the tower is built, so that the files of its image processor count.
    """
    sources: list[SourceFile] = []
    stamps: dict[str, str] = {}
    for model, directory in [("target", target)] + ([("drafter", drafter)] if drafter else []):
        names = [name for name in (*_CONFIG_FILES, *(_IMAGE_FILES if sees else ())) if is_there(directory / name)]
        names += [path.relative_to(directory).as_posix() for path in copied_files(directory)]
        names += sorted(path.name for path in directory.glob("*.safetensors"))
        for name in names:
            with open_regular(directory / name) as file:
                digest = hashlib.sha256(file.read(_HEAD)).hexdigest()
                state = os.fstat(file.fileno())
            sources.append(SourceFile("target" if model == "target" else "drafter", name, state.st_size, digest))
            stamps[f"{model}/{name}"] = f"{state.st_size} {state.st_mtime_ns} {digest}"
    return tuple(sources), stamps

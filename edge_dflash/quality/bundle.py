"""A bundle against the checkpoint that it was made from: what is measured, how long it takes, where it is kept."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path

import numpy as np
import torch

from edge_dflash.backends.reference.dense import arithmetic
from edge_dflash.bundle.manifest import MANIFEST, QUALITY, dump_manifest, fingerprint
from edge_dflash.bundle.parts import write_file
from edge_dflash.bundle.reader import Bundle, read_manifest
from edge_dflash.common.files import LARGE, directory, head_of, locked, read_text
from edge_dflash.common.progress import Progress, Stage
from edge_dflash.decode.backend import Backend
from edge_dflash.decode.replay import forced, replay
from edge_dflash.errors import CheckpointError, RequestError, VerificationError, short
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import PairSpec
from edge_dflash.quality import texts as given
from edge_dflash.quality.compare import Compared, figures, summed
from edge_dflash.quality.measure import ALL, KV, PARTS, UNITS, WEIGHTS, Run, Stores, all_variants, demand
from edge_dflash.quality.report import BackendQuality, Protocol, Quality, dump_quality
from edge_dflash.quality.stream import Passes, Variant
from edge_dflash.quality.texts import MOST_LINE, Text, make_texts, parse_tasks
from edge_dflash.text.prompt import Task
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.version import __version__
from edge_dflash.weights.checkpoint import PairCheckpoint, checkpoint_pair
from edge_dflash.weights.formats import KvFormat

ANSWER = 128  # tokens of an answer that is generated, at most
TOKENS = 2048  # in all, at most
FLOP = {"cpu": 2e14, "cuda": 2e16}  # of a measurement, at most about
MEMORY = 6_000_000_000  # bytes, by the forecast
_BACKEND_LOGITS = 1 << 26  # of a backend that are held at once
_READ = 8e-9  # seconds for each value of a weight, to read and widen it
_LAYERS = 10  # that are shown
_FREE = ("tied", "eos_token_ids", "max_position_embeddings")  # fields in which a source may differ
Say = Callable[[str], None]


@dataclass(frozen=True)
class TaskSet:
    """Tasks, and where they come from in a few words."""

    tasks: Sequence[Task]
    origin: str

    @classmethod
    def read(cls, path: Path) -> TaskSet:
        """Of a JSONL file. Raises RequestError."""
        try:
            return cls(parse_tasks(read_text(path, LARGE), path, MOST_LINE), path.name)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise RequestError(f"cannot read {path}: {why}; give a file of one JSON object a line") from None

    @classmethod
    def held_out(cls, bundle: Bundle) -> TaskSet:
        """Those behind what the bundle's scales were measured on."""
        scales = json.loads(read_text(bundle.path / "calibration.json"))
        return cls.behind(scales["tokens"], scales["prompts"], _tokenizer(bundle), bundle.pair.target.vocab_size)

    @classmethod
    def behind(cls, used: int, digest: str, tokenizer: Tokenizer | None, vocabulary: int) -> TaskSet:
        """Those of calib/ behind the first ``used`` tokens, if ``digest`` is its; random ids without a tokenizer."""
        if tokenizer is None:
            ids = np.random.default_rng(0).integers(0, vocabulary, (4, 64))
            return cls(ids.tolist(), "random ids (no tokenizer)")
        file = directory("calib") / "robot_planning.jsonl"
        tasks, first = parse_tasks(words := read_text(file, LARGE), file), 0
        used = used if digest == hashlib.sha256(words.encode()).hexdigest() else 0
        while used > 0 and first < len(tasks) - 1:
            used -= sum(len(tokenizer.encode_text(one["content"])) for one in tasks[first] if isinstance(one, dict))
            first += 1
        return cls(tasks[first:], f"calib/{file.name} from prompt {first + 1} on")


@dataclass(frozen=True)
class SourceModel:
    """An open checkpoint of a bundle's target."""

    store: PairCheckpoint
    digest: str  # of its files' names, sizes and heads
    stamps: str  # their times

    @classmethod
    def open(cls, directory: Path, bundle: PairSpec) -> SourceModel:
        """Raises RequestError for a checkpoint of another model, CheckpointError for a damaged one."""
        found, pair = checkpoint_pair(directory, None).text_only.target, replace(bundle.text_only, drafter=None)
        for name in (one.name for one in fields(found) if one.name not in _FREE):
            if (its := getattr(found, name)) != (mine := getattr(pair.target, name)):
                raise RequestError(
                    f"{directory}: {name} is {short(its)}, that of the bundle's target {short(mine)}; give --quality "
                    "the checkpoint that the bundle was made from"
                )
        digest, stamps = hashlib.sha256(), ""
        store = PairCheckpoint.open(directory, None, pair_programs(pair).weights)
        for path in sorted((*directory.glob("*.safetensors"), directory / "config.json")):
            try:
                size, time, head = head_of(path)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror}; remove it or download it again") from None
            digest.update(f"{path.name} {size} {head} ".encode())
            stamps += f"{time} "
        return cls(store, digest.hexdigest(), stamps)


def _tokenizer(bundle: Bundle) -> Tokenizer | None:
    return Tokenizer.open(bundle.path / "tokenizer") if bundle.manifest.tokenizer else None


def measure(
    bundle: Bundle,
    source: SourceModel,
    prompts: TaskSet,
    *,
    folder: Path,
    backend: Backend | None,
    progress: Progress,
    say: Say,
) -> Quality:
    """Measure a bundle; ``backend``: it loaded, if it runs here, which then answers, and whose logits are compared.

    What is done is kept in ``folder`` until the end, so that a killed run goes on. Raises RequestError for prompts that
    are none of this model, CheckpointError for a source or a bundle with NaN, VerificationError for a backend with NaN.
    """
    pair, kv = bundle.pair, bundle.manifest.precision.kv
    device = "cuda" if torch.cuda.is_available() else "cpu"
    passes, tokenizer = Passes.of(pair), _tokenizer(bundle)
    most = most_tokens(passes, kv, device)
    answer = None if backend is None else _answers(backend, pair, tokenizer, Stage(progress, "answers", most))
    texts = make_texts(prompts.tasks, tokenizer, pair.target.vocab_size, most, answer)
    ids = [text.ids for text in texts]
    variants = all_variants(passes, kv, sum(map(len, ids)))
    say(_forecast(passes, variants, device))

    def release() -> None:
        source.store.release()
        bundle.release()

    made_of = source.digest, source.stamps, fingerprint(bundle.manifest), given.fingerprint(texts)
    key = hashlib.sha256(repr((*made_of, __version__, arithmetic(), device)).encode()).hexdigest()
    with working(folder, key):
        run = Run(passes, Stores(source.store, bundle, kv, release), ids, variants, device=device, folder=folder)
        found = run.compared(progress)
        own = None if backend is None else _of_backend(bundle, backend, run, texts)
    answered = sum(text.answer < len(text.ids) for text in texts)
    whose = "given" if backend is None else "given, or the bundle's own, greedy"
    protocol = Protocol(
        version=__version__,
        source=source.digest,
        texts=given.fingerprint(texts),
        prompts=f"{prompts.origin}, {len(texts)} of {len(prompts.tasks)}, {len(ids[-1])} tokens of the last",
        answers=f"{whose}: {answered} of {len(texts)}" if answered else "none: no backend of the bundle runs here",
        sequences=len(texts),
        unit_tokens=min(one.rows for one in variants.values()),
    )
    places = np.array([place for text in texts for place in text.places])[run.kept + 1]
    return _quality(found, places, protocol, own)


def _quality(found: dict[str, Compared], places: np.ndarray, protocol: Protocol, own: BackendQuality | None) -> Quality:
    units = {name.removeprefix(UNITS): one for name, one in found.items() if name.startswith(UNITS)}
    alone = {name: figures(one) for name, one in found.items()}
    layers: dict[str, list[Compared]] = {}
    for name, one in units.items():
        layers.setdefault(name.rpartition(".")[0], []).append(one)
    costs = {name: figures(summed(parts)) for name, parts in layers.items() if name}  # the head is in no layer
    worst = sorted(costs, key=lambda name: -costs[name].kld.mean)[:_LAYERS]
    return Quality(
        **vars(alone[ALL]),
        weights=alone.get(WEIGHTS),
        kv=alone.get(KV),
        layers={name: costs[name] for name in worst},
        parts={name.removeprefix(PARTS): one for name, one in alone.items() if name.startswith(PARTS)},
        where={p: figures(found[ALL][:, places == p]) for p in given.PLACES if (places == p).any()},
        units={name: alone[f"{UNITS}{name}"] for name in units},
        protocol=protocol,
        backend=own,
    )


def keep(bundle: Path, quality: Quality) -> None:
    """Write quality.json into a finished bundle, and the manifest that lists it. Raises OSError.

    At every moment the bundle is whole: without the figures, or with them.
    """
    bundle = bundle.resolve()  # a link's own folder may be on another disk
    manifest, fresh = read_manifest(bundle), bundle.with_name(f"{bundle.name}.manifest")
    files = {name: entry for name, entry in manifest.files.items() if name != QUALITY}
    for text in (None, dump_quality(quality)):
        if text is not None:
            files[QUALITY] = write_file(fresh, [text])
            fresh.replace(bundle / QUALITY)
        write_file(fresh, [dump_manifest(replace(manifest, files=files))])
        fresh.replace(bundle / MANIFEST)


def most_tokens(passes: Passes, kv: KvFormat, device: str) -> int:
    """As many as FLOP and MEMORY allow."""
    some = all_variants(passes, kv, TOKENS)
    flop, most = demand(passes, some)
    fixed = demand(passes, {name: replace(one, rows=0) for name, one in some.items()})[1]
    return max(64, int(TOKENS * min(1.0, FLOP[device] / sum(flop), (MEMORY - fixed) / (most - fixed))))


def seconds(passes: Passes, variants: Mapping[str, Variant], device: str) -> float:
    """What a measurement takes, about; one product is timed for it."""
    x, w = torch.ones(256, 2048, device=device), torch.ones(2048, 2048, device=device)
    (x @ w).sum().item()
    began = time.perf_counter()
    (x @ w).sum().item()
    rate = 2 * x.shape[0] * w.numel() / (time.perf_counter() - began)
    values = sum(prod(passes.program.weights[name].shape) for name in passes.program.weights)
    return sum(demand(passes, variants)[0]) / rate + 2 * values * _READ


def _forecast(passes: Passes, variants: dict[str, Variant], device: str) -> str:
    """What is about to be done, in a line."""
    disk = 8 * sum(one.rows for one in variants.values()) * passes.program.columns[passes.program.outputs["hidden"]]
    minutes = max(1.0, seconds(passes, variants, device) / 60)
    units = [one.rows for name, one in variants.items() if name.startswith(UNITS)]
    return (
        f"measuring {variants[ALL].rows} tokens in {len(variants) - len(units) + 1} variants, {min(units)} in each of "
        f"{len(units)} units: about {minutes:.0f} min, at most {demand(passes, variants)[1] / 1e9:.1f} GB of memory, "
        f"{disk / 1e9:.1f} GB of disk"
    )


def _answers(backend: Backend, pair: PairSpec, tokenizer: Tokenizer | None, stage: Stage) -> given.Answer:
    """Greedy answers of a backend, plain or drafted: they are the same."""
    ends = {*pair.target.eos_token_ids, tokenizer.eos_token_id if tokenizer else None}

    def answer(prompt: Sequence[int]) -> list[int]:
        tokens, room = list[int](), min(ANSWER, backend.shape.usable_context - len(prompt))
        passes = replay(backend, prompt, see=len)
        while len(tokens) < room and ends.isdisjoint(tokens):
            tokens += next(passes).tokens
        end = next((at + 1 for at, token in enumerate(tokens) if token in ends), room)
        stage.advance(len(prompt) + end)
        return tokens[: min(end, room)]

    return answer


def _of_backend(bundle: Bundle, backend: Backend, run: Run, texts: Sequence[Text]) -> BackendQuality | None:
    """A backend's logits over answers (where texts have none, over all of them), by verify passes as in decoding."""
    rows, logits, first, left = list[int](), list[np.ndarray](), 0, _BACKEND_LOGITS // backend.shape.vocab_size
    for text in texts:
        begin = text.answer if text.answer < len(text.ids) else 1
        stop = min(len(text.ids), begin + left, backend.shape.usable_context)
        if begin < stop:
            for passed in forced(backend, text.ids[:begin], text.ids[begin:stop]):
                logits.append(passed.rows.logits().copy())
                if not np.isfinite(logits[-1].sum()):
                    name = bundle.manifest.backend
                    raise VerificationError(f"logits of the {name} backend are not finite; build the bundle again")
            rows += range(first + begin - 1, first + stop - 1)
            left -= stop - begin
        first += len(text.ids)
    if not rows:
        return None
    one, other = map(figures, run.backend(np.array(rows), torch.from_numpy(np.concatenate(logits))))
    return BackendQuality(**vars(one), name=bundle.manifest.backend, against_reference=other)


@contextmanager
def working(folder: Path, key: str) -> Iterator[None]:
    """A locked directory for the state of what ``key`` names; an earlier run's of anything else is removed."""

    def state() -> list[Path]:  # the key, which says whose it is, last
        there = (path for path in folder.iterdir() if path.suffix in (".safetensors", ".part", ".key", ".json"))
        return sorted(there, key=lambda path: path.suffix == ".key")

    def clear() -> None:
        for path in state():
            path.unlink()

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not (mark := folder / f"{key}.key").exists():
                if (there := state()) and there[-1].suffix != ".key":
                    why = f"a measurement keeps its state there, and {there[0].name} is none of it; move it away"
                    raise RequestError(f"{folder} is in the way: {why}")
                clear()
                mark.touch()
            yield
            clear()
        with suppress(OSError):  # somebody else's files are there
            folder.rmdir()
    except BlockingIOError:
        raise RequestError(f"{folder} is locked: another process measures this bundle; wait for it") from None
    except OSError as error:
        what = f"{error.strerror or error} ({error.filename or folder})"
        raise RequestError(f"the state of a measurement cannot be kept: {what}; give a directory to write") from None

"""Pictures of the golden run and made-up ones, without any decoder."""

from dataclasses import replace

import numpy as np
from golden_pairs import FLOAT32, golden, pair, store
from text_support import write_tokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Words

from edge_dflash.backends.reference.backend import ReferenceBackend
from edge_dflash.decode.controls import NO_CONTROLS
from edge_dflash.decode.generation import decode
from edge_dflash.decode.options import admit
from edge_dflash.model import pair_programs
from edge_dflash.model.vision import TOWER
from edge_dflash.pictures.pictured import Picture, Pictured, Placed
from edge_dflash.planner import Planner
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.formats import WideWeight

IMAGE = 186
"""The placeholder of the golden pair."""


SPEC = pair("vision").target.vision.patches


def given(levels, grid):
    """A picture by the levels of its patches [patches, 768]."""
    levels = np.ascontiguousarray(levels, np.uint8)
    return Picture(levels, tuple(grid), SPEC)


def picture(number):
    """One of the golden run's."""
    found = golden("vision")
    _, *grid = found[f"img{number}.grid_thw"].tolist()
    levels = np.rint((found[f"img{number}.pixel_values"] + 1) * 127.5).reshape(-1, 3, 2, 256)
    return given(levels[:, :, 0].reshape(-1, 768), grid)


def noise(seed, grid=(4, 4)):
    """A picture of random values."""
    rng = np.random.default_rng(seed)
    return given(rng.integers(0, 256, (grid[0] * grid[1], 768)), grid)


def changed(one):
    """A picture with another value of one pixel."""
    levels = one.levels.copy()
    levels[3, 7] ^= 1
    return given(levels, one.grid)


def prompt(number):
    """A prompt of the golden run with its pictures."""
    found = golden("vision")
    ids, images = found[f"p{number}.prompt"].tolist(), found[f"p{number}.images"].tolist()
    return mixed(*parts_of(ids, images))


def parts_of(ids, images):
    """Texts and pictures in their order."""
    parts, at = [], 0
    for image in images:
        first = ids.index(IMAGE, at)
        parts += [ids[at:first], picture(image)]
        at = first + parts[-1].tokens
    return [*parts, ids[at:]]


def mixed(*parts, image=IMAGE):
    """A prompt of ids and pictures in turns."""
    ids, pictures = [], []
    for part in parts:
        if isinstance(part, Picture):
            pictures.append(Placed(len(ids), part))
            ids += [image] * part.tokens
        else:
            ids += part
    return Pictured(tuple(ids), tuple(pictures))


def filled(backend, said, lane=0):
    """Rows of a prefill of a whole prompt in one call."""
    sight = said.sight(0, len(said.ids), lambda placed: backend.see(placed.picture))
    return backend.prefill(said.ids, lane, sight)


def ask(session, said, options, controls=NO_CONTROLS, keep=()):
    """Steps of an answer to a prompt with pictures in a session."""
    request = admit(session.backend.shape, said.ids, options, (), keep, said.pictures)
    return decode(session, request, controls)


class RandomTower:
    """The weights of another golden pair, and a tower of random ones."""

    def __init__(self, name, weights):
        self._inner, self._weights = store(name), weights

    def get(self, name):
        if not name.startswith(TOWER):
            return self._inner.get(name)
        shape, rng = self._weights[name].shape, np.random.default_rng(list(name.encode()))
        return WideWeight((rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    def kv_scale(self, state):
        return self._inner.kv_scale(state)


def sighted(name="qwen3_5", precision=FLOAT32, max_context=160, **options):
    """Another golden pair with a small random tower and a vocabulary that takes a tokenizer; the placeholder is 510."""
    blind, vision = pair(name), pair("vision").target.vision
    rope = replace(blind.target.attention.rope, mrope_section=(3, 3, 2))
    vision = replace(vision, depth=1, heads=2, out=blind.target.hidden_size, image_token_id=510, video_token_id=509)
    target = replace(blind.target, vision=vision, attention=replace(blind.target.attention, rope=rope))
    spec = replace(blind, target=target)
    weights = RandomTower(name, pair_programs(spec).weights)
    return ReferenceBackend(spec, weights, precision, max_context=max_context, **options)


def eyes_tokenizer(directory):
    """The byte tokenizer with the control tokens of images: start 508, placeholder 510, end 511."""
    path = write_tokenizer(directory / "tokenizer")
    words = Words.from_file(str(path / "tokenizer.json"))
    names = [f"<|unused_{number}|>" for number in range(words.get_vocab_size(), 508)]
    names += ["<|vision_start|>", "<|video_pad|>", "<|image_pad|>", "<|vision_end|>"]
    words.add_special_tokens([AddedToken(name, special=True) for name in names])
    words.save(str(path / "tokenizer.json"))
    return Tokenizer.open(path)


def seeing(backend, directory, **settings):
    """A planner of a :func:`sighted` backend."""
    vision = replace(
        pair("vision").target.vision, image_token_id=510, vision_start_token_id=508, vision_end_token_id=511
    )
    return Planner(backend, eyes_tokenizer(directory), bundle="f" * 64, vision=vision, **settings)


def shown(*parts):
    """One message of a user: arrays, bytes and paths are images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str) and not part.startswith("data:")
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]

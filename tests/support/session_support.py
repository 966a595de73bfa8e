"""Sessions without a worker: requests answered in them, their states, prefixes that are kept before anybody asks."""

from edge_dflash.decode import saved
from edge_dflash.decode.controls import NO_CONTROLS
from edge_dflash.decode.generation import decode
from edge_dflash.decode.options import Options, admit
from edge_dflash.decode.session import to_end


def answer(session, prompt, options, *, stop=(), keep=(), controls=NO_CONTROLS):
    """Steps of an answer in a session; checked now, begun with the first step."""
    return decode(session, admit(session.backend.shape, prompt, options, stop, keep), controls)


def forked(session):
    return to_end(session.fork())


def state_of(session):
    return to_end(saved.state_of(session))


def warm(manager, tokens):
    """Compute the state of a prefix and store it; False: the store's budget is too small."""
    if tuple(tokens) not in manager.store:
        list(answer(manager.open(), (*tokens, 0), Options(max_new_tokens=1), keep=(len(tokens),)))
    return tuple(tokens) in manager.store

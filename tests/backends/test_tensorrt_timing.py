"""What the compiler of a board does with a timing cache, on a TensorRT that only keeps books."""

from types import SimpleNamespace

import pytest

from edge_dflash.backends.cuda.tensorrt import compile as compile_module
from edge_dflash.backends.cuda.tensorrt.compile import Compiler
from edge_dflash.backends.cuda.tensorrt.lower import Lowered
from edge_dflash.backends.cuda.tensorrt.units import Binding, RowRange, Unit
from edge_dflash.errors import BuildError

HERE = b"here:"  # caches of this GPU and version begin so
UNIT = Unit("head", (), (Binding("rows", "bf16", 8),), (), (RowRange(4, 4, 4), RowRange(1, 32, 32)))
LOWERED = Lowered(UNIT, SimpleNamespace(network="network"))


class Cache:
    def __init__(self, data):
        self.data = data or HERE

    def serialize(self):
        return self.data


class Config:
    def __init__(self):
        self.profiles, self.cache = [], None

    def create_timing_cache(self, data):
        return None if data == b"cut" else Cache(data)

    def set_timing_cache(self, cache, ignore_mismatch):
        assert not ignore_mismatch
        if cache.data.startswith(HERE):
            self.cache = cache
        return cache.data.startswith(HERE)

    def add_optimization_profile(self, profile):
        self.profiles.append(profile)


class Profile(dict):
    def set_shape(self, name, *shapes):
        self[name] = shapes


class Builder:
    said = ""  # what it says instead of a plan

    def __init__(self, log):
        self.log = log

    def create_builder_config(self):
        return Config()

    def create_optimization_profile(self):
        return Profile()

    def build_serialized_network(self, network, config):
        Builder.config = config
        config.cache.data += b"t"
        if Builder.said:
            self.log.log("error", Builder.said)
            return None
        return b"plan"


@pytest.fixture
def board(monkeypatch):
    logger = type("ILogger", (), {"ERROR": "error", "INTERNAL_ERROR": "internal"})
    trt = SimpleNamespace(__version__="10.13.3.9", ILogger=logger, Builder=Builder)
    monkeypatch.setattr(compile_module, "load", lambda flavour: trt)
    monkeypatch.setattr(Builder, "said", "")
    return trt


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", HERE + b"t"), (HERE + b"tt", HERE + b"ttt"), (b"other GPU", HERE + b"t"), (b"cut", HERE + b"t")],
)
def test_a_cache_grows_and_one_that_does_not_fit_is_begun_anew(board, before, after):
    compiler = Compiler("sm110", before)
    assert bytes(compiler.build(LOWERED)) == b"plan"
    assert compiler.timing == after
    compiler.build(LOWERED)
    assert compiler.timing == after + b"t"


def test_a_plan_has_a_profile_for_each_range_of_rows_and_one_stream(board):
    Compiler("sm110").build(LOWERED)
    assert Builder.config.profiles == [{"rows": ((4, 8), (4, 8), (4, 8))}, {"rows": ((1, 8), (32, 8), (32, 8))}]
    assert Builder.config.max_aux_streams == 0


def test_what_was_timed_before_a_refusal_is_kept(board, monkeypatch):
    monkeypatch.setattr(Builder, "said", "Error Code 10:\n  no tactic for logits#3 matmul")
    compiler = Compiler("sm110")
    with pytest.raises(BuildError, match=r"plan head for sm110: TensorRT 10.13.3.9 says Error Code 10: no tactic for"):
        compiler.build(LOWERED)
    assert compiler.timing == HERE + b"t"

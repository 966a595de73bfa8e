"""The table of number formats: what derives from it agrees with the weights themselves and with each other."""

from typing import get_args

import numpy as np
import pytest
from bundle_support import random_weight

from edge_dflash.bundle.parts import from_tensors, to_tensors
from edge_dflash.weights.formats import FORMATS, TIED, WeightFormat, read_as
from edge_dflash.weights.layout import UNIT_BYTES
from edge_dflash.weights.quantize import ENCODERS, dequantize, wide_tensor
from edge_dflash.weights.recipe import WISHES
from edge_dflash.weights.stacks import STREAMED

SHAPE = (48, 64)


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_of_the_table_are_those_of_a_weight(form):
    weight = random_weight(np.random.default_rng(0), SHAPE, form, None)
    assert weight.format == form
    assert FORMATS[form].nbytes(SHAPE) - weight.nbytes in (0, 4 * (SHAPE[0] - 1))  # FP8: one scale of at most 48
    part = weight.rows(slice(16, 32))
    assert (part.format, part.shape) == (form, (16, SHAPE[1]))
    again = from_tensors("a", to_tensors("a", weight), SHAPE, form)
    assert np.array_equal(dequantize(again), dequantize(weight))
    assert not weight.damaged()


def test_words_derive_from_the_table():
    assert get_args(WeightFormat) == (*FORMATS, TIED)
    assert set(WISHES) == {*ENCODERS, "keep"}
    assert {"nvfp4": 1152, "fp8": 2048, "bf16": 2048}.items() <= UNIT_BYTES.items()
    assert set(STREAMED) <= {*FORMATS, TIED}
    assert read_as(TIED) is FORMATS["bf16"]


@pytest.mark.parametrize("form", ENCODERS)
def test_a_format_that_a_recipe_may_wish_has_an_encoder(form):
    wide = random_weight(np.random.default_rng(1), SHAPE, "f32", None)
    assert ENCODERS[form](wide_tensor(wide)).format == form
    assert set(ENCODERS) == {name for name, found in FORMATS.items() if found.wished}

"""The table of number formats: what derives from it agrees with the weights themselves and with each other."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from bundle_support import random_weight
from native_support import NATIVE_PAIR, formats_of

from edge_dflash.backends.cuda.support import check_native
from edge_dflash.backends.cuda.tensorrt import dense
from edge_dflash.bundle.parts import from_tensors, to_tensors
from edge_dflash.errors import BackendError, BuildError, RecipeError
from edge_dflash.model.program import WeightSpec
from edge_dflash.training.drafter import fake_weight
from edge_dflash.weights.formats import FORMATS, TIED, Format, WeightFormat, read_as
from edge_dflash.weights.layout import UNIT_BYTES
from edge_dflash.weights.quantize import ENCODERS, dequantize, wide_tensor
from edge_dflash.weights.recipe import WISHES, Recipe
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


def test_a_new_row_is_refused_by_name_where_nobody_wrote_its_part(monkeypatch):
    other = replace(FORMATS["nvfp4"], name="other", streamed=None, tensorrt=Format.tensorrt)
    monkeypatch.setitem(FORMATS, "other", other)
    weight = torch.ones(4, 32)
    with pytest.raises(BuildError, match="a drafter is not trained in other"):
        fake_weight(weight, "other", weight.max())
    with pytest.raises(
        RecipeError, match=r"asks for other of target.visual.a, but vision weights are built as bf16 or"
    ):
        Recipe("r", target={"vision": "other"}).choice("target.visual.a", WeightSpec((4, 32), "linear", "vision"), None)
    with pytest.raises(
        BackendError, match=r"down_proj is stored as 'other', the native kernels take .*--backend refer"
    ):
        check_native(NATIVE_PAIR, formats_of("bf16", down_proj="other"))
    monkeypatch.setattr(dense, "check_native", lambda *_, **__: None)
    with pytest.raises(BackendError, match="down_proj is other, which TensorRT does not run; build it with"):
        dense.check_engines(NATIVE_PAIR, formats_of("bf16", down_proj="other"), "sm120")

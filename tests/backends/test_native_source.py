"""What kernels take is what their C++ text says, and values that do not fit are refused before a launch."""

import ctypes
import re
from types import SimpleNamespace

import pytest

from edge_dflash.backends.cuda.kernels.source import KERNELS, Signature, structure
from edge_dflash.backends.cuda.memory import NULL, DevicePointer, Matrix

STRUCTURES = [
    ("job.cuh", "Job"), ("conv.cu", "Conv"), ("walk.cu", "Mix"), ("walk.cu", "Walk"), ("sample.cu", "Job"),
    ("choice.cuh", "Settings"), ("experts.cu", "Route"), ("experts.cu", "Choice"), ("experts_linear.cu", "Products"),
]  # fmt: skip
SIZES = {"double": 8, "u64": 8, "int": 4, "u32": 4, "float": 4}
AT, OTHER = DevicePointer(1 << 40, 64), DevicePointer(2 << 40, 64)


@pytest.mark.parametrize(("file", "name"), STRUCTURES)
def test_a_structure_has_the_fields_of_the_kernel(file, name):
    body = re.search(rf"struct {name} \{{.*?\n(.*?)\n\}};", (KERNELS / file).read_text(), re.S)[0]
    fields = re.findall(r"^\s*(?:const )?(\w+\*?) ([\w, \[\]]+);", body, re.M)
    wanted = [(one.strip(), kind) for kind, names in fields for one in names.split(",")]
    for (field, kind), (found, ours) in zip(wanted, structure(file, name)._fields_, strict=True):
        count = 4 if field.endswith("[PARTS]") else 1
        assert field.removesuffix("[PARTS]") == found
        assert ctypes.sizeof(ours) == count * (8 if kind.endswith("*") else SIZES[kind])


def test_structures_hold_structures_arrays_and_products():
    assert ctypes.sizeof(structure("attend.cu", "AppendedLayers")) == 8 * 72
    assert ctypes.sizeof(structure("cycle.cu", "Blocks")) == 8 * 32
    assert ctypes.sizeof(structure("tower.cu", "Channels")) == 32
    parts = structure("cycle.cu", "Parts").of(x=[Matrix(AT, 5)], out=[Matrix(OTHER, 7)], columns=[3])
    assert (parts.x[0], parts.x[1], parts.out[0]) == (AT.address, None, OTHER.address)
    assert ([*parts.x_stride], [*parts.out_stride][:2], [*parts.columns][:2]) == ([5, *[0] * 7], [7, 0], [3, 0])


def test_arguments_come_by_name_in_the_order_of_the_kernel():
    norm = Signature("small.cu", "rms_norm")
    given = norm(x=Matrix(AT, 24), weight=OTHER, out=Matrix(OTHER, 32), columns=20, eps=0.5)
    assert given == (AT, OTHER, OTHER, 20, 24, 32, 0.5)
    record = SimpleNamespace(weight=AT, columns=1, eps=2.0)
    assert norm(record, x=Matrix(AT, 24), out=Matrix(OTHER, 32), columns=20) == (AT, AT, OTHER, 20, 24, 32, 2.0)
    assert (
        Signature("cycle.cu", "cycle_set")(control=None, blocks=structure("cycle.cu", "Blocks")(), slots=1)[0] == NULL
    )


def test_kernels_that_a_macro_defines_have_its_parameters():
    combine = Signature("attend.cu", "COMBINE")
    numbers = ["rows", "tile_log2", "group", "kv_heads", "dim", "capacity", "window", "flags"]
    names = ["partial", "partial_ml", "out", "gate", "control", *numbers]
    values = dict(zip(names, [AT] * 5 + list(range(8)), strict=True))
    values |= {"out": Matrix(AT, 9), "gate": Matrix(AT, 8), "v_scale": 0.5}
    assert combine(**values) == (*[AT] * 5, *range(10), 0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "nothing is given for rows"),
        ({"rows": AT}, "rows is DevicePointer.*a number is wanted"),
        ({"rows": None}, "rows is .*a number is wanted"),
        ({"rows": 1, "control": 7}, "control is 7, a pointer is wanted"),
        ({"rows": SimpleNamespace().__init__}, "a number is wanted"),
    ],
)
def test_what_does_not_fit_is_refused(values, message):
    with pytest.raises(TypeError, match=message):
        Signature("small.cu", "commit_rows")(**{"control": AT, "slots": 1} | values)


def test_names_that_are_not_there_are_refused():
    with pytest.raises(TypeError, match=r"small.cu has no kernel other"):
        Signature("small.cu", "other")
    with pytest.raises(TypeError, match=r"small.cu has no structure Other"):
        structure("small.cu", "Other")

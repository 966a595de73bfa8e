import pytest

from edge_dflash.backends.cuda.driver import bf16_map
from edge_dflash.backends.cuda.memory import DevicePointer, Matrix
from edge_dflash.errors import BackendError


@pytest.mark.parametrize(("address", "stride"), [(0x1008, 64), (0x1000, 60)])
def test_a_matrix_that_tensor_copies_cannot_reach_is_refused(address, stride):
    matrix = Matrix(DevicePointer(address, 4096), stride)
    with pytest.raises(BackendError, match=rf"8 x 48 at address {address:#x}, row stride {stride}, .* 16 bytes"):
        bf16_map(matrix, 8, 48, (32, 64))

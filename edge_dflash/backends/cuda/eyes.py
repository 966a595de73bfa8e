"""What images change on the device: rows of a prompt's chunk in the place of embeddings, and the tokens' positions."""

from __future__ import annotations

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.loading import Loaded
from edge_dflash.backends.cuda.memory import Array
from edge_dflash.backends.cuda.tower import HostRows
from edge_dflash.decode.backend import no_tower
from edge_dflash.decode.pictured import Picture, Sight


class Eyes:
    """The tower of a loaded pair, and where its rows go. Without a tower, text alone."""

    def __init__(self, gpu: Gpu, loaded: Loaded) -> None:
        self._gpu, self._tower, self._turns = gpu, loaded.tower, loaded.common.states.turns
        self._images, self._vocabulary = loaded.common.buffers.images, loaded.common.layout.vocabulary

    def see(self, picture: Picture) -> HostRows:
        """Run the tower. Raises BackendError without one."""
        if self._tower is None:
            raise no_tower()
        return self._tower.see(picture)

    def place(self, lane: int, first: int, sight: Sight) -> None:
        """Tokens from index ``first`` of a lane on are where ``sight`` says. Raises BackendError without a tower."""
        if self._tower is None:
            raise no_tower()
        for turns in self._turns:
            turns.place(self._gpu, lane, first, sight.positions)
            turns.shift(self._gpu, lane, first + sight.positions.shape[1], sight.delta)

    def shift(self, lane: int, first: int, delta: int) -> None:
        """Tokens from index ``first`` of a lane on are at their index + ``delta``."""
        for turns in self._turns:
            turns.shift(self._gpu, lane, first if delta else 0, delta)

    def fill(self, ids: Array, first: int, sight: Sight) -> None:
        """Bring the images' rows of a pass to the device: rows ``first``, ... of the sight, whose ``ids`` these are.

        Ids of such rows become those behind the vocabulary, which the gather takes from there.
        """
        for part in sight.rows:
            assert isinstance(part.seen, HostRows)
            begin, end = max(part.row, first), min(part.row + part.count, first + len(ids))
            if begin >= end:
                continue
            bits = part.seen.bits[part.first + begin - part.row : part.first + end - part.row]
            self._gpu.write(self._images.at(bits[0].nbytes * (begin - first), bits.nbytes), bits)
            ids[begin - first : end - first] = range(self._vocabulary + begin - first, self._vocabulary + end - first)

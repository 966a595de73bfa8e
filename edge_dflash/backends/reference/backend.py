"""The Backend protocol on the torch interpreter: optimistic state in lanes that never meet in a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.backends.reference.tower import TorchTower
from edge_dflash.decode.backend import Asked, Cycle, Outcome, Precision, Rows, Snapshot, no_drafter, no_tower, replaced
from edge_dflash.decode.cycle import host_cycle, host_cycles
from edge_dflash.decode.shape import PairShape, check_lane
from edge_dflash.decode.tree import Parents, branch, check_commit, check_parents
from edge_dflash.decode.walk import WalkRows
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import GatedDelta
from edge_dflash.model.program import KvState, PairPrograms
from edge_dflash.model.specs import PairSpec
from edge_dflash.pictures.pictured import Picture, Seen, Sight
from edge_dflash.weights.formats import WeightStore


class TorchRows:
    """Logits of a pass, [rows, V] float32. ``check`` raises once a later pass has replaced them, as on a device."""

    def __init__(self, logits: torch.Tensor, check: Callable[[], None]) -> None:
        self._logits, self._check = logits, check

    def __len__(self) -> int:
        return self._logits.shape[0]

    def argmax(self) -> list[int]:
        """Largest logit of each row; the lowest id on a tie."""
        self._check()
        return [int(i) for i in self._logits.numpy().argmax(axis=-1)]  # numpy documents the first on a tie

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits [rows, V]."""
        self._check()
        return self._logits.numpy()


@dataclass
class _Lane:
    """One sequence."""

    memory: Memory
    verified: int | None = None  # rows of the last verify, until they are committed
    tree: tuple[Sequence[int], Parents] | None = None  # their ids and parents, where they are no chain

    def drop_verify(self) -> None:
        """Forget rows in flight."""
        self.verified = self.tree = None
        for memory in self.memory.delta.values():
            memory.in_flight = None


class ReferenceBackend:
    """Interprets a pair's Programs in torch on the CPU. See :class:`edge_dflash.decode.backend.Backend`."""

    def __init__(
        self,
        spec: PairSpec,
        store: WeightStore,
        precision: Precision,
        *,
        max_context: int,
        prefill_chunk: int = 512,
        lanes: int = 1,
        programs: PairPrograms | None = None,
    ) -> None:
        self._programs = programs or pair_programs(spec)
        self._drafter = spec.drafter
        self._shape = PairShape.of(spec, max_context, prefill_chunk, lanes)
        self._precision = precision
        self._weights = TorchWeights(store)
        self._interpreter = Interpreter(self._weights, precision)
        vision, see = spec.target.vision, self._programs.see
        self._tower = TorchTower(vision, see, self._weights, precision) if vision and see else None
        self._deltas = [op for op in self._programs.verify.ops if isinstance(op, GatedDelta)]
        states = self._programs.states.items()
        self._scales = {name: store.kv_scale(name) for name, state in states if isinstance(state, KvState)}
        self._lanes = [_Lane(self._allocate()) for _ in range(lanes)]
        self._passes = 0

    @property
    def shape(self) -> PairShape:
        """Sizes of the loaded pair."""
        return self._shape

    def length(self, lane: int = 0) -> int:
        """Number of committed rows."""
        return self._lane(lane).memory.length

    @torch.inference_mode()
    def reset(self, lane: int = 0) -> None:
        """Forget the sequence."""
        at = self._lane(lane)
        at.drop_verify()
        at.memory.clear()

    def see(self, picture: Picture) -> Seen:
        """Run the tower over one picture; see Backend."""
        if self._tower is None:
            raise no_tower()
        return self._tower.see(picture)

    def prefill(self, ids: Sequence[int], lane: int = 0, sight: Sight | None = None) -> TorchRows:
        """Append and commit ids chunk by chunk; logits of the last row."""
        at = self._lane(lane)
        memory, length = at.memory, at.memory.length
        stop = length + len(ids)
        if not ids or stop > self._shape.max_context:
            raise BackendError(
                f"cannot prefill {len(ids)} tokens at {length}: the context holds {self._shape.max_context} tokens"
            )
        at.verified = at.tree = None
        chunk = self._shape.prefill_chunk
        for first in range(0, len(ids), chunk):
            part = ids[first : first + chunk]
            seen = sight.part(first, first + len(part)) if sight is not None else None
            outputs = self._interpreter.run(self._programs.prefill, part, memory, sight=seen)
            memory.length += len(part)
        if sight is not None:
            memory.offset = sight.delta
        return TorchRows(outputs["logits"], self._newest())

    def cycle(self, asked: Asked) -> Cycle:
        """Propose, verify and accept; see Backend."""
        return host_cycle(self, asked)

    def cycles(self, asked: Sequence[Asked]) -> list[Outcome]:
        """Lane by lane; see Backend."""
        return host_cycles(self, asked)

    def copy(self, source: int, target: int) -> None:
        """Copy all arrays of a lane."""
        self.restore(self.snapshot(source), target)

    def propose(self, anchor: int, lane: int = 0) -> Rows:
        """One drafter pass; row i is the draft for position length + 1 + i."""
        at = self._lane(lane)
        if self._drafter is None:
            raise no_drafter()
        at.drop_verify()
        program = self._programs.propose
        outputs = self._interpreter.run(program, self._drafter.block(anchor), at.memory)
        check = self._newest()
        if program.walk is None:
            return TorchRows(outputs["logits"], check)

        def weights(name: str) -> npt.NDArray[np.float32]:
            check()
            return self._weights.tensor(name).numpy()

        hidden, logits = (outputs[role].numpy() for role in ("draft_hidden", "logits"))
        return WalkRows(program.walk, weights, hidden, logits, anchor)

    def verify(self, ids: Sequence[int], lane: int = 0, parents: Parents | None = None) -> TorchRows:
        """Run rows at length, length + 1, ... without committing them; of a tree, each row behind its own branch."""
        at = self._lane(lane)
        if not 1 <= len(ids) <= self._shape.verify_rows:
            raise BackendError(f"verify takes 1 to {self._shape.verify_rows} rows, not {len(ids)}")
        at.verified, at.tree = len(ids), None
        if parents is None:
            return TorchRows(self._verify(ids, at), self._newest())
        check_parents(parents, len(ids))
        at.tree = list(ids), list(parents)
        branches = ([ids[one] for one in branch(parents, row)] for row in range(len(ids)))
        return TorchRows(torch.stack([self._verify(ids, at)[-1] for ids in branches]), self._newest())

    def _verify(self, ids: Sequence[int], at: _Lane) -> torch.Tensor:
        return self._interpreter.run(self._programs.verify, ids, at.memory)["logits"]

    def commit(self, rows: int, lane: int = 0, path: Sequence[int] | None = None) -> None:
        """Make rows of the last verify real; of a tree, its path is the chain that was verified last."""
        at = self._lane(lane)
        ids, parents = at.tree or (None, None)
        chosen = check_commit(rows, at.verified, path, parents)
        if ids is not None and chosen:
            self._verify([ids[row] for row in chosen], at)
        for memory in at.memory.delta.values():
            memory.commit(rows)
        at.memory.length += rows
        at.verified = at.tree = None

    @torch.inference_mode()
    def flush(self, lane: int = 0) -> None:
        """Replay pending rows into the recurrent state."""
        memory = self._lane(lane).memory
        for op in self._deltas:
            memory.delta[op.state].replay(op, self._interpreter.delta_weights(op))

    def snapshot(self, lane: int = 0) -> Snapshot:
        """Copy the state of both models, flushed."""
        self.flush(lane)
        memory = self._lane(lane).memory
        length = memory.length
        arrays = {name: place.numpy().copy() for name, place in _places(memory, length).items()}
        return Snapshot(length, arrays, memory.offset)

    @torch.inference_mode()
    def restore(self, snapshot: Snapshot, lane: int = 0) -> None:
        """Replace the state by a snapshot of the same pair and precision."""
        check_lane(self._shape, lane)
        memory = self._allocate()
        if snapshot.length > self._shape.max_context:
            raise BackendError(
                f"the snapshot holds {snapshot.length} tokens, the context only {self._shape.max_context}"
            )
        places = {name: place.numpy() for name, place in _places(memory, snapshot.length).items()}
        snapshot.check_like(places)
        for name, place in places.items():
            place[:] = snapshot.arrays[name]
        memory.length, memory.offset = snapshot.length, snapshot.delta
        self._lanes[lane] = _Lane(memory)

    def close(self) -> None:
        """Nothing to release on the CPU."""

    def _newest(self) -> Callable[[], None]:
        """Count a pass; the check of its rows."""
        self._passes = this = self._passes + 1

        def check() -> None:
            if self._passes != this:
                raise replaced()

        return check

    def _lane(self, lane: int) -> _Lane:
        check_lane(self._shape, lane)
        return self._lanes[lane]

    def _allocate(self) -> Memory:
        shape = self._shape
        return Memory.allocate(self._programs.states, shape.max_context, self._precision, self._scales.__getitem__)


def _places(memory: Memory, length: int) -> dict[str, torch.Tensor]:
    """What a snapshot holds, by its names: rows of keys and values, of which BF16 as int16, and recurrent states."""
    found: dict[str, torch.Tensor] = {}
    for name, kv in memory.kv.items():
        for role, stored in zip("kv", kv.stored, strict=True):
            rows = stored[:length]
            found[f"{name}.{role}"] = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows
    for name, delta in memory.delta.items():
        found |= {f"{name}.state": delta.state, f"{name}.conv": delta.history}
    return found

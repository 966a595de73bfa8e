"""The steps of a pass, each one call of a kernel face."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_dflash.model.ops import Elementwise, Experts, GroupedConv, RmsNorm, StateOp, Walk
from edge_dflash.weights.stacks import ExpertStack, Stack


@dataclass(frozen=True)
class PassStep:
    """One call. ``reads`` and ``writes`` are names of tensors."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def label(self) -> str:
        """What profiles call it."""
        return type(self).__name__

    @property
    def norms(self) -> tuple[RmsNorm, ...]:
        """Norms whose weights the step reads."""
        return ()


@dataclass(frozen=True)
class BeforeNorm(PassStep):
    """A step that ends with the norm behind it, where one follows."""

    norm: RmsNorm | None = field(default=None, kw_only=True)

    @property
    def norms(self) -> tuple[RmsNorm, ...]:
        """The next norm."""
        return (self.norm,) if self.norm else ()


@dataclass(frozen=True)
class Gather(BeforeNorm):
    """Rows of the embedding for the pass's ids, then a norm where one follows. Writes (x[, norm])."""

    weight: str


@dataclass(frozen=True)
class Multiply(PassStep):
    """A stack on one input, perhaps with a BF16 stack on the same input. Reads (x); writes outputs, side's last."""

    stack: Stack
    side: Stack | None = None

    @property
    def side_outputs(self) -> int:
        """How many of the writes are the side's."""
        return 0 if self.side is None else 1 if self.side.joined else len(self.side.names)


@dataclass(frozen=True)
class Project(BeforeNorm):
    """One matrix, then residual and next norm where there are some. Reads (x[, residual]); writes (y[, norm])."""

    stack: Stack


@dataclass(frozen=True)
class Mix(BeforeNorm):
    """Experts, then residual and next norm where there are some. Reads (x[, residual]); writes (y[, norm])."""

    op: Experts
    up: ExpertStack
    down: ExpertStack

    @property
    def label(self) -> str:
        """What profiles call it."""
        return f"{self.op.output} {self.up.layout.format}"


@dataclass(frozen=True)
class Head(PassStep):
    """The output head: logits and the largest of each row."""

    stack: Stack


@dataclass(frozen=True)
class Normalise(PassStep):
    """``rms_norm``."""

    op: RmsNorm

    @property
    def norms(self) -> tuple[RmsNorm, ...]:
        """The op itself."""
        return (self.op,)


@dataclass(frozen=True)
class Columns(PassStep):
    """An elementwise op of tensors that no one launch made."""

    op: type[Elementwise]


@dataclass(frozen=True)
class Convolve(BeforeNorm):
    """A grouped convolution, then residual and next norm where there are some. Reads (u, c[, residual])."""

    op: GroupedConv


@dataclass(frozen=True)
class Copy(PassStep):
    """Columns that could not be written in place: of each tensor that is read to the one that is written."""


@dataclass(frozen=True)
class Last(PassStep):
    """The last valid row."""


@dataclass(frozen=True)
class State(PassStep):
    """A state op."""

    op: StateOp


@dataclass(frozen=True)
class Draft(PassStep):
    """The walk that chooses the drafts. Reads (hidden rows), of which the first draft's is row ``first``."""

    op: Walk
    first: int

"""Bytes and operations of Programs by arithmetic: what a pass moves, what a loaded pair holds, what prompts compute.

Pure functions of :mod:`edge_dflash.model.program` and a format per weight. A cycle is one propose pass and one verify
pass, each reading every weight once, of a mixture the experts that its rows choose; the replay of the previous cycle's
rows happens in the verify pass. :class:`CycleBytes` counts weights as a bundle stores them, :class:`Costs` as the
native kernels read them: in streaming form with their scales. Activations stay in caches and are not counted.

A pass reads each expert that one of its rows chose once. Where rows choose uniformly and independently, T rows with k
choices of E read E (1 - (1 - k/E)^T) on average. Rows of one text choose more alike: this is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

from edge_dflash.board.archs import Arch, Chip
from edge_dflash.bundle.parts import stack_bytes
from edge_dflash.decode.gaze import SEEN_BYTES
from edge_dflash.model.ops import Attend, Experts, FrameAttend, KvAppend, Linear, SelectRows, StateOp
from edge_dflash.model.program import DeltaState, KvState, PairPrograms, Program, State
from edge_dflash.model.specs import PairSpec, VisionSpec
from edge_dflash.pictures.decode import DEFAULT_LIMITS, in_flight
from edge_dflash.pictures.picture import target_size
from edge_dflash.weights.formats import KV_BYTES, TIED, KvFormat, WeightFormat, read_as
from edge_dflash.weights.layout import UNIT_ROWS, Layout
from edge_dflash.weights.stacks import STREAMED, program_stacks

ACTIVATION_BYTES = 2  # BF16
LOGIT_BYTES = 4  # logits leave a pass as FP32


def _label(text: str) -> Any:
    """A field of bytes, and what tables call it."""
    return field(metadata={"label": text})


@dataclass(frozen=True)
class CycleBytes:
    """Bytes that one cycle moves between memory and processor, with some number of tokens committed."""

    target_weights: int = _label("verify: target weights, lm_head included")  # the embedding is only gathered from
    experts: int = _label("verify: experts that rows choose, at most")
    drafter_weights: int = _label("draft: drafter weights")  # fc, context K/V, block: every weight once
    drafter_lm_head: int = _label("draft: lm_head again")
    walk: int = _label("draft: the walk's weights")  # of its tables only the rows that drafts read
    drafter_kv_projections: int = _label("drafter K/V projections again (context rows)")
    embedding_rows: int = _label("embedding rows")  # B rows each for verify and propose
    delta_state: int = _label("gated delta state, read and written")  # S and conv history of all layers
    tape: int = _label("replay tape, written and read")  # B rows each: by verify, and by the next replay
    target_kv: int = _label("target K/V")  # context rows read, B rows written
    drafter_kv: int = _label("drafter K/V")  # visible context rows read, B rows written


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes resident while a pair is loaded, without operating system, driver context and libraries."""

    target_weights: int = _label("target weights")
    drafter_weights: int = _label("drafter weights")
    embedding: int = _label("embedding")  # wide rows for the gather
    target_kv: int = _label("target K/V")  # max_context rows a lane
    drafter_kv: int = _label("drafter K/V")  # max_context rows a lane
    delta_state: int = _label("gated delta state, a slot for each lane")
    tape: int = _label("replay tape, a block for each lane")
    scratch: int = _label("scratch")  # peak of tensors alive in a prefill chunk, a block or a picture
    tower: int = _label("vision tower")
    seen: int = _label("rows of pictures that are kept, at most")
    pictures: int = _label("pictures that are being read, at most")  # of the host


def labelled(parts: CycleBytes | MemoryBytes) -> list[tuple[str, int]]:
    """What tables call each part, and its bytes; those of none are left out."""
    sizes = ((part.metadata["label"], getattr(parts, part.name)) for part in fields(parts))
    return [(label, size) for label, size in sizes if size]


@dataclass(frozen=True)
class Traffic:
    """Bytes that one pass of the native kernels moves."""

    weights: Mapping[str, int]  # by format, row scales included
    embedding_rows: int
    kv: int  # keys and values, read and written
    state: int  # recurrent state and convolution history, read and written
    tape: int  # rows of the replay tape, read and written
    experts: int = 0  # those that rows choose
    walk: int = 0  # of its tables only the rows that drafts read

    @property
    def total(self) -> int:
        """All bytes."""
        tables = self.embedding_rows + self.walk
        return sum(self.weights.values()) + self.experts + tables + self.kv + self.state + self.tape


@dataclass(frozen=True)
class Costs:
    """What decides the bytes of a pair's passes on the native kernels."""

    programs: PairPrograms
    formats: Mapping[str, WeightFormat]
    kv: KvFormat
    pair: PairSpec

    def propose(self, context: int) -> Traffic:
        """A propose pass at ``context`` committed tokens."""
        return self._pass(self.programs.propose, context, self.pair.block_size, 0)

    def verify(self, context: int, pending: int, rows: int | None = None, experts: float | None = None) -> Traffic:
        """A verify pass of ``rows`` (None: anchor and drafts) that replays ``pending`` rows; 0: it writes no state.

        ``experts``: how many a layer reads; None: as many as uniform, independent rows do on average.
        """
        return self._pass(self.programs.verify, context, rows or self.pair.verify_rows, pending, experts)

    @property
    def expert_layers(self) -> int:
        """Layers of the target that have experts."""
        return len(expert_layers(self.programs.verify))

    def prefill_operations(self, tokens: int) -> int:
        """Multiplications and additions of the linears and of attention for a prompt of ``tokens``.

        The head runs on one row. Attention counts the visible half of the scores and of the weighted sums.
        """
        program = self.programs.prefill
        every_row = row_parameters(program)
        linears = sum(prod(program.weights[op.weight].shape) for op in program.ops if isinstance(op, Linear))
        linears += sum(row_weights(program, op) for op in expert_layers(program))
        heads = sum(op.heads * op.head_dim for op in program.ops if isinstance(op, Attend))
        return 2 * (tokens * every_row + linears - every_row) + 4 * heads * tokens * (tokens + 1) // 2

    def _pass(self, program: Program, context: int, rows: int, pending: int, experts: float | None = None) -> Traffic:
        weights: dict[str, int] = {}
        for stack in program_stacks(program, self.formats):
            weights[stack.layout.format] = weights.get(stack.layout.format, 0) + stack_bytes(stack)
        streamed = streamed_bytes(program, self.formats)
        chosen = {name for op in expert_layers(program) for name in routed(op)}
        for name in streamed.keys() - chosen:
            form = self.formats[name]
            weights[form] = weights.get(form, 0) + streamed[name]
        stored = {name: 2 * prod(spec.shape) for name, spec in program.weights.items()}
        tables = [spec.shape[1] for spec in program.weights.values() if spec.kind == "embedding"]
        deltas = [state for state in program.states.values() if isinstance(state, DeltaState)]
        return Traffic(
            weights=weights,
            embedding_rows=2 * rows * sum(tables),
            walk=walk_bytes(program, stored, self.pair.drafts),
            kv=_kv_bytes(program, context, rows, self.kv, Attend, KvAppend),
            state=sum((2 if pending else 1) * state.state_bytes + 2 * state.conv_bytes for state in deltas),
            tape=(rows + pending) * tape_bytes_per_row(deltas),
            experts=routed_bytes(program, streamed, rows, experts),
        )


def kv_bytes_per_token(states: Iterable[State], kv: KvFormat) -> int:
    """Bytes of keys and values that one committed token adds to the KV states among ``states``."""
    return KV_BYTES[kv] * sum(2 * one.kv_heads * one.head_dim for one in states if isinstance(one, KvState))


def kv_read_bytes(program: Program, context: int, kv: KvFormat) -> int:
    """Bytes of committed keys and values that one pass at ``context`` committed tokens must read.

    A layer with a window S reads the S - 1 rows that its first row sees; every other layer reads all rows.
    """
    ops = [op for op in program.ops if isinstance(op, Attend)]
    rows = [context if op.window is None else min(context, op.window - 1) for op in ops]
    return sum(n * kv_bytes_per_token((program.states[op.state],), kv) for n, op in zip(rows, ops, strict=True))


def delta_bytes(states: Iterable[State]) -> int:
    """Bytes of one copy of the recurrent state: S in FP32 and the conv history in BF16, over all layers."""
    return sum(state.state_bytes + state.conv_bytes for state in states if isinstance(state, DeltaState))


def tape_bytes_per_row(states: Iterable[State]) -> int:
    """Bytes of one row of the replay tape over all layers."""
    return sum(state.tape_bytes_per_row for state in states if isinstance(state, DeltaState))


def walk_bytes(program: Program, read: Mapping[str, int], drafts: int) -> int:
    """Bytes that a walk of ``drafts`` drafts reads: for each, a row of its predecessor and those of its candidates."""
    if (walk := program.walk) is None:
        return 0
    vocabulary = program.weights[walk.predecessor].shape[0]
    rows = {walk.predecessor: drafts, walk.successor: drafts * (walk.top_k or vocabulary)}
    return sum(read[name] * rows.get(name, vocabulary) // vocabulary for name in walk.weights)


def cycle_bytes(
    programs: PairPrograms,
    read: Mapping[str, int],
    pair: PairSpec,
    context: int,
    kv: KvFormat,
    drafts: int | None = None,
) -> CycleBytes:
    """Cost of a propose and a verify pass of ``drafts`` (None: all); ``read``: the bytes of one read of a weight."""
    block, rows = pair.block_size, pair.verify_rows if drafts is None else drafts + 1
    verify, propose, states = programs.verify, programs.propose, programs.verify.states.values()
    both = verify.weights.keys() & propose.weights.keys()
    shared = sum(read[name] for name in both if name.startswith("drafter."))
    tables = [read[name] // weight.shape[0] for name, weight in verify.weights.items() if weight.kind == "embedding"]
    return CycleBytes(
        target_weights=_sum(read, verify, "target") - sum(read[n] for op in expert_layers(verify) for n in routed(op)),
        experts=routed_bytes(verify, read, rows),
        drafter_weights=_sum(read, verify, "drafter") + _sum(read, propose, "drafter") - shared,
        drafter_lm_head=_sum(read, propose, "target"),
        walk=walk_bytes(propose, read, pair.drafts),
        drafter_kv_projections=shared,
        embedding_rows=((block if propose.ops else 0) + rows) * sum(tables),
        delta_state=2 * delta_bytes(states),
        tape=2 * rows * tape_bytes_per_row(states),
        target_kv=_kv_bytes(verify, context, rows, kv, Attend),
        drafter_kv=_kv_bytes(propose, context, block, kv, Attend),
    )


def memory_bytes(
    programs: PairPrograms,
    stored: Mapping[str, int],
    pair: PairSpec,
    max_context: int,
    chunk: int,
    kv: KvFormat,
    lanes: int = 1,
) -> MemoryBytes:
    """Resident bytes; ``stored`` is the bytes of each weight that is not read from another's."""
    states = programs.states.values()
    block, rows = pair.block_size, pair.verify_rows
    chunk = min(chunk, max_context)
    passes = [(programs.prefill, chunk, 1), (programs.verify, rows, lanes), (programs.propose, block, lanes)]
    tower = {} if programs.see is None else {name: stored[name] for name in programs.see.weights}
    if programs.see is not None and pair.target.vision is not None:
        passes.append((programs.see, picture_patches(pair.target.vision), 1))
    return MemoryBytes(
        target_weights=_sum(stored, programs.verify, "target"),
        drafter_weights=sum(size for name, size in stored.items() if name.startswith("drafter.")),
        embedding=sum(
            size for name, size in stored.items() if programs.weights[name].kind == "embedding" and name not in tower
        ),
        target_kv=lanes * _kv_bytes(programs.verify, 0, max_context, kv, Attend),
        drafter_kv=lanes * _kv_bytes(programs.propose, 0, max_context, kv, Attend),
        delta_state=lanes * delta_bytes(states),
        tape=lanes * rows * tape_bytes_per_row(states),
        scratch=max(slots * scratch_bytes(program, rows) for program, rows, slots in passes),
        tower=sum(tower.values()),
        seen=SEEN_BYTES if tower else 0,
        pictures=in_flight(DEFAULT_LIMITS.pixels) if tower else 0,
    )


def _kv_bytes(program: Program, context: int, rows: int, kv: KvFormat, *writers: type[StateOp]) -> int:
    """Bytes of ``context`` rows read by attention and of ``rows`` rows written by the ops of the types ``writers``."""
    written = [program.states[op.state] for op in program.ops if isinstance(op, writers)]
    return kv_read_bytes(program, context, kv) + rows * kv_bytes_per_token(written, kv)


def _sum(size: Mapping[str, int], program: Program, model: str) -> int:
    """Bytes of a pass's weights of a model, without tables of which rows are gathered."""
    return sum(size.get(name, 0) for name in program.read_whole.get(model, ()))


def row_parameters(program: Program) -> int:
    """Weights that each row of a pass is multiplied with: linears, but for those of selected rows (the head)."""
    selected: set[str] = set()
    total = 0
    for op in program.ops:
        if isinstance(op, SelectRows) or selected & set(op.inputs):
            selected.add(op.output)
        elif isinstance(op, Linear):
            total += prod(program.weights[op.weight].shape)
        elif isinstance(op, Experts):
            total += row_weights(program, op)
    return total


def expert_parameters(program: Program) -> int:
    """Those of :func:`row_parameters` that are a mixture's."""
    return sum(row_weights(program, op) for op in expert_layers(program))


def read_bytes(programs: PairPrograms, formats: Mapping[str, WeightFormat]) -> dict[str, int]:
    """Bytes of one read of each weight."""
    return {name: read_as(formats[name]).nbytes(weight.shape) for name, weight in programs.weights.items()}


def stored_bytes(programs: PairPrograms, formats: Mapping[str, WeightFormat]) -> dict[str, int]:
    """Those of the weights that are stored: one that is tied is another's."""
    return {name: size for name, size in read_bytes(programs, formats).items() if formats[name] != TIED}


def pass_bytes(program: Program, read: Mapping[str, int], rows: int) -> int:
    """Bytes of weights that a pass of ``rows`` reads: each once, of a mixture the experts that its rows choose."""
    whole = sum(_sum(read, program, model) for model in ("target", "drafter"))
    chosen = sum(read[name] for op in expert_layers(program) for name in routed(op))
    return whole - chosen + routed_bytes(program, read, rows)


def scratch_bytes(program: Program, rows: int) -> int:
    """Peak bytes of the tensors alive at once in a pass of ``rows`` rows, each freed after its last use."""
    size: dict[str, int] = {}
    counts = dict.fromkeys(program.inputs, rows)
    live = peak = 0
    for op, freed in zip(program.ops, program.freed, strict=True):
        counts[op.output] = op.rows(counts[op.inputs[0]])
        width = LOGIT_BYTES if op.output == program.outputs.get("logits") else ACTIVATION_BYTES
        size[op.output] = counts[op.output] * program.columns[op.output] * width
        live += size[op.output]
        between = scratch_of_row(program, op) * counts[op.output] if isinstance(op, Experts) else 0
        peak = max(peak, live + between)
        live -= sum(size.pop(name, 0) for name in freed)
    return peak


def distinct(op: Experts, rows: int) -> float:
    """Experts that ``rows`` uniform and independent rows read."""
    count = len(op.gates)
    return count * (1.0 - (1.0 - op.top_k / count) ** rows)


def expert_layers(program: Program) -> tuple[Experts, ...]:
    """All mixtures of a pass, one a layer."""
    return tuple(op for op in program.ops if isinstance(op, Experts))


def routed(op: Experts) -> tuple[str, ...]:
    """Weights of the experts that rows choose: neither router nor shared expert."""
    return (*op.gates, *op.ups, *op.downs)


def routed_bytes(program: Program, size: Mapping[str, int], rows: int, counted: float | None = None) -> int:
    """Bytes that ``rows`` rows read of routed experts; ``counted``: experts a layer, else as by :func:`distinct`."""
    total = 0.0
    for op in expert_layers(program):
        read = distinct(op, rows) if counted is None else counted
        total += read / len(op.gates) * sum(size[name] for name in routed(op))
    return round(total)


def streamed_bytes(program: Program, formats: Mapping[str, WeightFormat]) -> dict[str, int]:
    """Bytes that the native kernels read of each weight of experts and routers, row scales included."""
    found: dict[str, int] = {}
    for op in expert_layers(program):
        shared = op.shared
        mlps = [*zip(op.gates, op.ups, op.downs, strict=True)]
        for gate, up, down in (*mlps, *([(shared.gate, shared.up, shared.down)] if shared else [])):
            rows, k = program.weights[gate].shape
            both = _streamed(Layout(STREAMED[formats[gate]], (rows, rows), k, swiglu=True))
            found |= {gate: both // 2, up: both // 2}
            found[down] = _streamed(Layout(STREAMED[formats[down]], (k,), rows))
        for name in (op.router, *([shared.judge] if shared else [])):
            found[name] = 2 * prod(program.weights[name].shape)
    return found


def expert_weights(program: Program, op: Experts) -> int:
    """Weights of one expert."""
    return sum(prod(program.weights[name].shape) for name in routed(op)) // len(op.gates)


def row_weights(program: Program, op: Experts) -> int:
    """Weights that each row is multiplied with."""
    weights = program.weights
    always = (op.router, *(op.shared or ()))
    return op.top_k * expert_weights(program, op) + sum(prod(weights[name].shape) for name in always)


def scratch_of_row(program: Program, op: Experts) -> int:
    """Bytes of one row between an op's kernels: FP32 outputs of its experts, slices of the shared one among them."""
    hidden, inner = program.weights[op.downs[0]].shape
    shared = program.weights[op.shared.down].shape[1] // inner if op.shared else 0
    return 4 * hidden * (op.top_k + shared)


def _streamed(layout: Layout) -> int:
    return layout.nbytes + 4 * layout.units * UNIT_ROWS


PICTURE = (600, 800)  # pixels, height by width


@dataclass(frozen=True)
class TowerCosts:
    """A tower, and a picture."""

    picture: tuple[int, int]  # pixels, height by width
    parameters: int
    bytes: int  # of its weights
    patches: int  # of the picture
    tokens: int  # rows of the language model
    operations: int  # multiplications and additions of the linears and of attention
    milliseconds: float | None  # at the rate of the tower; None where that is not known


def tower_costs(
    pair: PairSpec, programs: PairPrograms, stored: Mapping[str, int], arch: Arch | None, chip: Chip
) -> TowerCosts | None:
    """Cost the vision tower of a pair, if it has one; ``stored``: bytes of each weight."""
    if (spec := pair.target.vision) is None or (program := programs.see) is None:
        return None
    patches = picture_patches(spec)
    count = tower_operations(program, patches)
    return TowerCosts(
        picture=PICTURE,
        parameters=sum(prod(weight.shape) for weight in program.weights.values()),
        bytes=sum(stored[name] for name in program.weights),
        patches=patches,
        tokens=patches // spec.patches.merge**2,
        operations=count,
        milliseconds=None if arch is None else 1e3 * count / arch.tower.per_second(chip),
    )


def picture_patches(spec: VisionSpec) -> int:
    """Patches of a picture of PICTURE pixels."""
    height, width = target_size(*PICTURE, spec.patches)
    return height * width // spec.patches.patch**2


def tower_operations(program: Program, patches: int) -> int:
    """Multiplications and additions of one frame: of every weight of a linear with every row, of attention."""
    rows, count = dict.fromkeys(program.inputs, patches), 0
    for op in program.ops:
        rows[op.output] = op.rows(rows[op.inputs[0]])
        if isinstance(op, Linear):
            count += 2 * rows[op.output] * prod(program.weights[op.weight].shape)
        elif isinstance(op, FrameAttend):
            count += 4 * patches**2 * op.heads * op.head_dim
    return count

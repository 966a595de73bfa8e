"""The rows of a verify as a tree: row 0 is the anchor, and each later row is a draft that follows an earlier one.

``parents`` has for each row the one that it follows, -1 for row 0. A row's position is the committed length plus its
depth. The chain, in which row i follows row i - 1, is the tree that every backend verifies; None stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_dflash.errors import BackendError

Parents = Sequence[int]


def branch(parents: Parents, row: int) -> list[int]:
    """Rows from the anchor to ``row``, both included."""
    rows = []
    while row >= 0:
        rows.append(row)
        row = parents[row]
    return rows[::-1]


def check_parents(parents: Parents, rows: int) -> None:
    """Raise BackendError unless ``parents`` makes a tree of ``rows`` rows."""
    if len(parents) != rows or any(not (0 <= parent < row) for row, parent in enumerate(parents[1:], 1)):
        raise BackendError(f"parents {list(parents)} of {rows} rows; give -1, then for each row one that is before it")
    if parents[0] != -1:
        raise BackendError(f"row 0 follows row {parents[0]}; it is the anchor and follows none: give -1")


def check_commit(
    rows: int, verified: int | None, path: Sequence[int] | None = None, parents: Parents | None = None
) -> list[int]:
    """The first ``rows`` rows of a path through a verify of ``verified`` rows (None: none is open).

    Raises BackendError for more rows than the path has, and for rows that do not follow each other.
    """
    most = verified or 0 if path is None else len(path)
    if verified is None or not 0 <= rows <= min(most, verified):
        state = "no verify is open" if verified is None else f"the last verify had {verified} rows"
        raise BackendError(f"cannot commit {rows} rows{'' if path is None else f' of {list(path)}'}: {state}")
    chosen = list(range(rows) if path is None else path[:rows])
    for before, row in zip([-1, *chosen], chosen, strict=False):
        if not 0 <= row < verified or (row - 1 if parents is None else parents[row]) != before:
            raise BackendError(f"cannot commit rows {chosen}: row {row} does not follow row {before}")
    return chosen


def check_chain(parents: Parents | None, backend: str) -> None:
    """Raise BackendError for rows that are no chain, for a backend that verifies nothing else."""
    if parents is not None and list(parents) != list(range(-1, len(parents) - 1)):
        raise BackendError(
            f"the {backend} backend verifies chains, and these rows follow {list(parents)}; "
            "give each row the one before it, or use the reference backend"
        )

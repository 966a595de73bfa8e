"""Model architectures, each written once as a Program."""

from edge_dflash.model.registry import pair_programs

__all__ = ["pair_programs"]

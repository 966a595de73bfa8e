"""Bytes per cycle, memory and speed limits of a pair on a board, by arithmetic."""

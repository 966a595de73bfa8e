"""Kernels by family: NAME.cu, and its Python face NAME.py next to it."""

"""Weights: number formats, checkpoints, recipes, quantization, layouts that kernels read. No torch at import."""

"""The native backend: CUDA kernels, compiled ahead of time, launched without torch."""

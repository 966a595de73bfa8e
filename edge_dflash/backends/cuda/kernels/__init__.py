"""Kernels by family: units NAME.cu, compiled to one cubin each, headers NAME.cuh, and Python faces NAME.py that launch.

The units of the linears (finish.cu, linear*.cu) share the face linear.py, and splits.py divides them over a device.
Those of the experts (experts*.cu) share experts.py. Benchmarks alone launch bench.cu. source.py reads C++ parameters.
"""

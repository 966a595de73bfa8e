"""The TensorRT mode of the native engine: its linears, and what goes with them, are engines made of standard layers."""

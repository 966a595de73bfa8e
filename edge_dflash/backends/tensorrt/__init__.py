"""TensorRT: the dense ops of a pair as engines made of standard layers; state stays with the native kernels."""

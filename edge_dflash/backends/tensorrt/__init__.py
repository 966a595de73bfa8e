"""TensorRT: the dense ops of a pair as plans made of standard layers; state stays with the native kernels."""

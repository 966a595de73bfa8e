"""Weight and KV quantization: NVFP4, FP8, recipes, calibration."""

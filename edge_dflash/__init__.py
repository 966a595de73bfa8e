"""edge-dflash: lossless speculative decoding with DFlash drafters, for language models on robots."""

__version__ = "0.1.0"

"""What quantization costs: the next token's distribution of a bundle against its source, layer by layer."""

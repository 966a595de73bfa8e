"""The demo pair: corpus, tokenizer, training."""

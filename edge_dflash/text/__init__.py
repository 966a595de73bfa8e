"""Text on both sides of the tokens: templates, tokenizer, answers taken apart, tool calls."""

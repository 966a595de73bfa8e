"""Grammars: what an answer must look like, as masks over the tokens that may come next."""

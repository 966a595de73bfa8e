"""Is this machine fit to serve a bundle? Facts are gathered, judged by code, and nothing is changed."""

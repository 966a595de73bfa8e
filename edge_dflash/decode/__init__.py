"""From tokens to tokens: the loop, acceptance, sampling, sessions. No text, no device."""

"""Shards of taps: what they hold, that they are made again alone where one is missing, and what a training reads."""


"""Conversations that go on: sessions on one backend, shared prefixes, saved states. No text, no threads."""

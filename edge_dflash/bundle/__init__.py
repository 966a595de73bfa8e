"""The contract between build and run: manifest, weight files, reading. No torch."""

"""The torch reference backend: any CPU, the truth for every test."""

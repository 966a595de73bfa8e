"""Model architectures, each written once as a Program."""

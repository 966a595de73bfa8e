"""Pictures on their way to a vision tower: decoded, resized, cut into patches. NumPy, and Pillow for files."""

"""The op set and the Program: what a forward pass is, independent of any backend."""

"""Other libraries' names and argument order over Flash Kernels' ops, so that migrating is one import."""

"""Compiling before it is needed: ahead of time, into a folder, or when a process starts."""

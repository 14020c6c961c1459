"""Attention kernels: one file an algorithm and architecture."""

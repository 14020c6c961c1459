"""Other libraries' names and protocols: the array API, NumPy, DLPack, einops, PyTorch."""

"""Every operation on tensors, one file a family. Its functions are also `tensorgrad.<name>`."""

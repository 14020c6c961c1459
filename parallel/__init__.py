"""Training on several ranks over MPI and NCCL. Import as `tensorgrad.parallel`."""

if __name__ != "tensorgrad.parallel":
    raise ImportError("`parallel` is tensorgrad.parallel: write `from tensorgrad import parallel`")

"""Communication between ranks: MPI, NCCL, staging through the host, launchers and the watchdog."""

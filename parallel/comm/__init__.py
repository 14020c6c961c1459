"""Communication between ranks: MPI, NCCL, launchers and the watchdog."""

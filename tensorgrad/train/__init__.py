"""The training loop: settings, progress, evaluation, checkpoints and logs."""

"""The parts of the example job: model, data, checkpoints, training loop and report."""

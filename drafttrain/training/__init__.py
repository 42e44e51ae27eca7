"""Training: Lightning module, batches and their course, optimiser, checkpoints, evaluation while
training, joint training, boost-tuning and search. It reads no configuration files."""

"""Training frameworks that save generations: Lightning, the Trainer of transformers, Accelerate."""

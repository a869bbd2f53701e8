"""What a place can do for checkpoints, tried out: ``ckptfmt doctor``."""

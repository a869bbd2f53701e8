"""What ``ckptfmt bench`` runs: states of random numbers, raw limits of memory and disk, and contenders to compare."""

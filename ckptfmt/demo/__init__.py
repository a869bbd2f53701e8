"""The main job on real input: train, be killed, resume, compare, inspect (``ckptfmt demo``)."""

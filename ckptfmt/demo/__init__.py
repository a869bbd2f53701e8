"""The main job on real input: train, be killed, resume, compare, inspect (``python -m ckptfmt.demo``)."""

"""The save, load and keep engine. It sees storage, SQL and tensors only through ``ckptfmt.ports``."""
